"""The programs and guides of samples/pytorch, run on one and two ranks, and a short run of a benchmark."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import support

support.need("torch")
support.need_library()

SAMPLES = support.ROOT / "samples" / "pytorch"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(support.ROOT / "python"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(program, *arguments, ranks=1, directory=None):
    """The output of a program of one or several ranks, rank by rank."""
    with tempfile.TemporaryDirectory() as logs:
        start = [sys.executable, "-W", "ignore"]
        if ranks > 1:
            # A file for each rank: in one pipe the letters of two ranks may be mixed.
            start += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d",
                      "--rdzv-endpoint", "localhost:0", "--log-dir", logs, "--redirects", "1"]
        done = subprocess.run([*start, str(program), *arguments], capture_output=True, text=True, env=ENVIRONMENT,
                              cwd=directory, timeout=900, check=False)
        files = sorted(pathlib.Path(logs).rglob("stdout.log"))
        output = done.stdout + "".join(file.read_text(encoding="utf-8") for file in files)
    if done.returncode:
        raise AssertionError(output + done.stderr)
    return output


def losses(text):
    return [float(one) for one in re.findall(r"loss ([\d.]+)", text)]


def need(*modules):
    missing = [name for name in modules if support.importlib.util.find_spec(name) is None]
    return unittest.skipIf(missing, f"no module {', '.join(missing)}")


class Readme(unittest.TestCase):
    def test_the_quickstart_prints_the_text_below_it(self):
        text = (support.ROOT / "README.md").read_text(encoding="utf-8")
        program, printed = re.search(r"```python\n(import forebay, torch\n.*?)```.*?```\n(.*?)```", text, re.S).groups()
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "quickstart.py")
            with open(path, "w", encoding="utf-8") as file:
                file.write(program)
            found = run(path, ranks=2)
        self.assertEqual(sorted(found.splitlines()), sorted(printed.splitlines() * 2))


class Programs(unittest.TestCase):
    def test_the_benchmark_of_saves_in_the_background_runs(self):
        with tempfile.TemporaryDirectory() as directory:
            output = run(support.ROOT / "tests" / "bench" / "background_save.py", "--layers", "2", "--width", "64", "--rounds",
                         "2", "--steps", "2", "--directory", directory)
            self.assertEqual(os.listdir(directory), [])
        self.assertIn("stage 2, bf16", output)
        self.assertRegex(output, r"a save in the background costs -?[\d.]+ ms, -?[\d.]+ %")

    @need("transformers")
    def test_gpt2_finetune_goes_on_where_it_was_saved(self):
        with tempfile.TemporaryDirectory() as directory:
            program = SAMPLES / "gpt2_finetune.py"
            whole = run(program, "--steps", "14", ranks=2)
            first = run(program, "--steps", "7", "--save", directory, ranks=2)
            rest = run(program, "--steps", "14", "--save", directory, "--stage", "1", ranks=2)
            self.assertEqual(losses(first) + losses(rest), losses(whole))
            self.assertLess(losses(whole)[-1], losses(whole)[0])
            planned, measured = re.findall(r"(\d+) bytes", whole)
            self.assertEqual(planned, measured)
            self.assertIn("generated", whole)

    @need("transformers")
    def test_gpt2_finetune_with_given_weights(self):
        import torch
        import transformers
        config = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2)
        with tempfile.TemporaryDirectory() as directory:
            torch.manual_seed(1)
            transformers.GPT2LMHeadModel(config).save_pretrained(directory)
            text = run(SAMPLES / "gpt2_finetune.py", "--weights", directory, "--steps", "3")
            self.assertEqual(len(losses(text)), 3)

    @need("transformers", "accelerate")
    def test_trainer(self):
        for ranks in (1, 2):
            text = run(SAMPLES / "trainer.py", "--steps", "6", ranks=ranks)
            first, last = re.search(r"loss ([\d.]+) -> ([\d.]+)", text).groups()
            self.assertLess(float(last), float(first))

    @need("transformers", "peft")
    def test_lora(self):
        text = run(SAMPLES / "lora.py", ranks=2)
        self.assertLess(losses(text)[-1], losses(text)[0])
        self.assertIn("adapter:", text)


PRELUDE = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.square().sum()
data = [torch.ones(2, 16) * i for i in range(1, 103)]
"""


class Guides(unittest.TestCase):
    """The code under "After" runs as it stands."""

    def after(self, name, ds_config=None):
        text = (SAMPLES / name).read_text(encoding="utf-8")
        [code] = re.findall(r"```python after\n(.*?)```", text, re.DOTALL)
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "after.py")
            with open(path, "w", encoding="utf-8") as file:
                file.write(PRELUDE + code + "\nprint('loss', loss.item())\n")
            if ds_config:
                with open(os.path.join(directory, "ds_config.json"), "w", encoding="utf-8") as file:
                    file.write(ds_config)
            for ranks in (1, 2):
                self.assertEqual(len(losses(run(path, ranks=ranks, directory=directory))), ranks)
            return os.listdir(directory)

    def test_from_deepspeed(self):
        found = self.after("from_deepspeed.md", """{"zero_optimization": {"stage": 2, "offload_optimizer":
            {"device": "cpu"}, "overlap_comm": true}, "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}""")
        self.assertIn("states", found)

    def test_from_fsdp(self):
        self.after("from_fsdp.md")


if __name__ == "__main__":
    support.main()
