"""Tries an installed wheel as its user does: no compiler, not root. It runs in the bare system of fresh_root.sh --wheel,
or anywhere:

    wheel_trial.py forebay.whl minimal.py    makes an environment in HOME, installs the wheel there and tries it
    wheel_trial.py --installed VENV          tries a wheel that is installed in an environment, without PyTorch
    wheel_trial.py --digests                 prints the digests of trainings by the library that FOREBAY_LIBRARY names

FOREBAY_TRIAL_TORCH=0 leaves out PyTorch, which is installed from PyPI.
"""

import array
import ctypes
import hashlib
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import threading

HOME = pathlib.Path(os.environ.get("HOME", "/nonexistent"))


def train(rank, group, results, dtype, stage, offload):
    """One rank of three: two units, whose gradients are computed from values and rank without a library."""
    import forebay
    device = forebay.Device()
    with group.communicator(rank, device) as ranks:
        engine = forebay.Engine(device, ranks, dtype=dtype, stage=stage, offload=offload, bucket=4096)
        sizes = (3001, 517)
        for unit, count in enumerate(sizes):
            engine.add_parameter(engine.add_unit(f"unit {unit}"), f"weight {unit}", count)
        engine.commit()
        for unit, count in enumerate(sizes):
            values = array.array("f", [((i * 7919) % 1009 - 504) / 1777 for i in range(count)])
            engine.set(unit, 0, "fp32", values.buffer_info()[0], count)
        engine.hyperparameter("lr", 0.01, 0)
        engine.hyperparameter("weight-decay", 0.1, 0)
        for step in range(4):
            engine.step_begin()
            engine.micro_step_begin(0)
            for unit in (0, 1):
                engine.acquire(unit)
                engine.release(unit)
            for unit in (1, 0):
                engine.acquire(unit, backward=True)
                address, _ = engine.gradient(unit, 0)
                # Bytes of normal numbers of moderate size, in every format.
                shown = (ctypes.c_float if dtype == "fp32" else ctypes.c_uint16) * sizes[unit]
                gradient = shown.from_address(address)
                if dtype == "fp32":
                    gradient[:] = [((i * 31 + rank * 17 + step * 3) % 997 - 498) / 313 for i in range(sizes[unit])]
                else:
                    one = 0x3F80 if dtype == "bf16" else 0x3C00
                    gradient[:] = [one - (i * 31 + rank * 17 + step * 3) % 997 | (i % 3 == 0) << 15
                                   for i in range(sizes[unit])]
                engine.release(unit)
            result = engine.step()
        results[rank] = f"{engine.digest()} {result.grad_norm.hex()}"
        engine.close()


def digests():
    """One line for each dtype, after every stage and offload gave the same."""
    import forebay
    for dtype in ("fp32", "bf16", "fp16"):
        seen = set()
        for stage in range(4):
            for offload in ("none", "optimizer"):
                results = [None] * 3
                with forebay.LocalGroup(3) as group:
                    threads = [threading.Thread(target=train, args=(rank, group, results, dtype, stage, offload))
                               for rank in range(3)]
                    for thread in threads:
                        thread.start()
                    for thread in threads:
                        thread.join()
                seen.update(results)
        assert len(seen) == 1 and None not in seen, (dtype, seen)
        print(f"{dtype} {seen.pop()}")


# A rank without a launcher.
EXCHANGE = """
import forebay, sys
rank, store, kind = sys.argv[1:]
with forebay.Communicator(forebay.Device(), rank=rank, size=2, store=store, communicator=kind) as ranks:
    print(ranks.exchange(bytes([65 + ranks.rank])))
"""

CONFIGS = """
import forebay
model = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
print(forebay.plan(model, ranks=16, stage=3))
print(forebay.simulate(model, cluster="dgx-2", batch=4, stage=3))
"""

# A rank of torchrun: minimal.py with the options of the trial, and the digest at the end.
RANK_PROGRAM = """
import os, re, sys
text = open(sys.argv[1]).read()
text = re.sub(r'stage=3, offload="optimizer"', sys.argv[2], text)
torch_threads = "import torch; torch.set_num_threads(1); torch.use_deterministic_algorithms(True)\\n"
exec(compile(torch_threads + text + '''
digest = forebay.digest(model)
os.write(1, f"digest {digest}\\\\n".encode())
''', sys.argv[1], "exec"))
"""


def run(*command, fails=False, **variables):
    """Runs a command; returns its output. With `fails`, it is to fail."""
    environment = {**os.environ, **variables}
    done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, env=environment, cwd=HOME, timeout=1500, check=False)
    if (done.returncode != 0) != fails:
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def expect(text, pattern):
    if not re.search(pattern, text):
        sys.exit(f"no {pattern!r} in: {text}")
    return text


def exchange(python, place):
    """Two processes for each kind of meeting and communicator."""
    (place / "secret").write_text("a" * 64)
    (place / "secret").chmod(0o600)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    for kind in ("gloo", "shm"):
        (place / kind).mkdir(exist_ok=True)
        for store in (place / kind, f"tcp://127.0.0.1:{port}"):
            ranks = [subprocess.Popen([python, "-c", EXCHANGE, str(rank), str(store), kind], stdout=subprocess.PIPE, text=True,
                                      env={**os.environ, "FOREBAY_SECRET_FILE": str(place / "secret")}) for rank in range(2)]
            for rank in ranks:
                expect(rank.communicate(timeout=120)[0], "b'A', b'B'")


def passed(text):
    print(f"ok  {text}", flush=True)


def torch_digest(python, wheel_python, minimal, options):
    """The digest of two ranks under torchrun."""
    (HOME / "rank.py").write_text(RANK_PROGRAM)
    text = run(python, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", 2, "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "localhost:0", HOME / "rank.py", minimal, options, OMP_NUM_THREADS="1", **wheel_python)
    found = set(re.findall(r"^digest (\w+)$", text, re.M))
    if len(found) != 1:
        sys.exit(f"no digest, or several: {text}")
    return found.pop()


def try_installed(venv):
    """The package and the command of an environment: import, plan, simulate, run, trainings of threads and processes."""
    python, forebay = venv / "bin/python", venv / "bin/forebay"
    version = run(python, "-c", "import forebay; print(forebay.version())").strip()
    for command in ([forebay], [python, "-m", "forebay"]):
        expect(run(*command, "--version"), f"^forebay {re.escape(version)}\n$")
        expect(run(*command, "plan", "--parameters", 7500000000, "--ranks", 64, "--stage", 3, "--dtype", "bf16"), "stage 3")
    passed(f"import, `forebay`, `python -m forebay` and `forebay plan`: {version}")
    expect(run(python, "-c", CONFIGS), r"ZeRO stage 3(.|\n)*16 ranks of dgx-2, .*simulated\n  step ")
    passed("forebay.plan() and forebay.simulate()")
    expect(run(forebay, "run", "--", python, "-c", "import os; print(os.environ['LD_PRELOAD'])"),
           r"(?m)^/.*/forebay/lib/libforebay-preload.so$")
    expect(run(python, "-c", "import forebay; forebay.enable_allocator()", fails=True), "Unavailable: .*Install torch")
    passed("`forebay run` finds the preload; enable_allocator() asks for torch")
    print(run(python, os.path.abspath(__file__), "--digests"), end="")
    passed("3 ranks, stages 0 to 3, with and without offload: one digest for each dtype")
    exchange(python, HOME)
    passed("2 processes over Gloo and over shared memory, which meet in a directory and at a tcp:// address")


def main():
    wheel, minimal = (os.path.abspath(name) for name in sys.argv[1:3])
    assert os.geteuid() != 0, "as root this is no trial"
    found = [name for name in ("cc", "gcc", "g++", "c++", "clang") if shutil.which(name)]
    assert not found, f"there is a compiler: {found}"
    venv = HOME / "venv"
    run(sys.executable, "-m", "venv", venv)
    run(venv / "bin/pip", "install", "--no-index", wheel)
    python = venv / "bin/python"
    passed("installed by pip as user " + str(os.geteuid()) + ", without a compiler")
    try_installed(venv)

    if os.environ.get("FOREBAY_TRIAL_TORCH") == "0":
        print("left out: PyTorch")
        return
    run(venv / "bin/pip", "install", "--quiet", "--no-cache-dir", "torch", "numpy")
    for first, second in (("forebay", "torch"), ("torch", "forebay")):
        run(python, "-W", "ignore", "-c", f"import {first}; import {second}; forebay.version(); torch.ones(3).sum()")
    passed("import beside torch in either order, torch " + run(python, "-c", "import torch; print(torch.__version__)").strip())
    expect(run(python, "-c", "import forebay; forebay.enable_allocator()", fails=True), "Unavailable: .*(no|without|none)")
    seen = {options: torch_digest(python, {}, minimal, options)
            for options in ('stage=0', 'stage=3, offload="optimizer"', 'stage=2')}
    if len(set(seen.values())) != 1:
        sys.exit(f"digests differ: {seen}")
    print(f"torch {hashlib.sha256(open(minimal, 'rb').read()).hexdigest()[:8]} {seen['stage=0']}")
    passed("2 ranks under torchrun: one digest at stages 0, 2 and 3 with offload")


if __name__ == "__main__":
    if sys.argv[1:] == ["--digests"]:
        digests()
    elif sys.argv[1:2] == ["--installed"]:
        try_installed(pathlib.Path(sys.argv[2]))
    else:
        main()
