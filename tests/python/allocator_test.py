"""forebay.enable_allocator() and memory_pool(), under the stand-in for PyTorch over the fake driver; and the command of
`python -m forebay`."""

import os
import subprocess
import sys
import unittest

import support

import forebay
from forebay import _library

support.need_library()

FAKE_TORCH = support.ROOT / "tests" / "fakes" / "torch"
LIBRARIES = os.path.dirname(_library.library().path)
FAKE_CUDA = os.path.join(os.path.dirname(LIBRARIES), "tests", "fake_cuda")

PROGRAM = """
import forebay, sys, torch
try:
    {statement}
except Exception as error:
    print(type(error).__name__, error)
"""


def output_of(statement, torch=True):
    """The output of a program that runs a statement under the fake torch."""
    path = [str(support.ROOT / "python")] + ([str(FAKE_TORCH)] if torch else [])
    # Its runtime is the driver's fake, and the arena reads the device from there too.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "LD_LIBRARY_PATH": FAKE_CUDA,
                   "FAKE_CUDA_MEMORY": str(256 << 20), "FOREBAY_LOG": "info"}
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(statement=statement)], env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False)
    return done.stdout


class Allocator(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not os.path.exists(os.path.join(FAKE_CUDA, "libcuda.so.1")):
            raise unittest.SkipTest(f"{FAKE_CUDA} has no libcuda.so.1")

    def test_it_serves_every_tensor(self):
        text = output_of("forebay.enable_allocator(); forebay.enable_allocator(); t = torch.empty(1 << 22);"
                         "print(torch._mode, t.data_ptr() != 0, bool(torch._pluggable))")
        self.assertIn("pluggable True True", text)

    def test_a_pool_serves_the_tensors_of_its_block(self):
        text = output_of("pool = forebay.memory_pool(); before = torch._mode\n"
                         "    with torch.cuda.use_mem_pool(pool): t = torch.empty(1 << 20); inside = torch._mode\n"
                         "    print(before, inside, torch._mode, t.data_ptr() != 0, bool(pool.allocator_.record_stream))")
        self.assertIn("cache pluggable cache True True", text)

    def test_after_the_first_tensor_it_is_refused(self):
        text = output_of("t = torch.empty(1 << 20); forebay.enable_allocator()")
        self.assertRegex(text, r"InvalidArgument enable_allocator\(\) .* already initialized .*memory_pool\(\)")

    def test_a_torch_without_cuda_is_refused(self):
        for change, reason in (("torch.version.cuda = None", "is built without CUDA. Install"),
                               ("torch.cuda.is_available = lambda: False", "torch finds none here. Run on")):
            self.assertRegex(output_of(change + "; forebay.enable_allocator()"), f"Unavailable .*{reason}")

    def test_a_core_of_another_build_is_never_taken(self):
        text = output_of("forebay._library.library().path = '/no/such/libforebay-c.so.1'; forebay.enable_allocator()")
        self.assertIn("Unavailable /no/such/libforebay-core.so.0 cannot be loaded", text)


class Command(unittest.TestCase):
    def test_the_module_is_the_command(self):
        if not os.path.exists(_library.command()):
            self.skipTest("FOREBAY_COMMAND names no program")
        done = subprocess.run([sys.executable, "-m", "forebay", "--version"], capture_output=True, text=True, check=True,
                              env={**os.environ, "PYTHONPATH": str(support.ROOT / "python")})
        self.assertEqual(done.stdout.strip(), f"forebay {forebay.version()}")

    def test_a_missing_command_is_named(self):
        done = subprocess.run([sys.executable, "-m", "forebay"], capture_output=True, text=True, check=False,
                              env={**os.environ, "PYTHONPATH": str(support.ROOT / "python"),
                                   "FOREBAY_COMMAND": "/no/such/program"})
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, "/no/such/program cannot be started: .* Set FOREBAY_COMMAND")


if __name__ == "__main__":
    support.main()
