"""forebay state import of real checkpoints of DeepSpeed's ZeRO and torch.distributed.checkpoint.

Small models train on two ranks with Gloo. Each value that an import gives is compared bit for bit with those
of the tool itself.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import support

support.need("torch", "numpy", "safetensors")
COMMAND = os.environ.get("FOREBAY_COMMAND")

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from torch import nn

torch.set_num_threads(1)

STEPS = 3
RANKS = 2
FIELDS = {"master": None, "m": "exp_avg", "v": "exp_avg_sq"}


class Model(nn.Module):
    """Odd sizes, a buffer, a frozen parameter and one parameter with two names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.second = nn.Linear(7, 5)
        self.third = nn.Linear(5, 7, bias=False)
        self.third.weight = self.first.weight
        self.norm.bias.requires_grad_(False)
        self.register_buffer("seen", torch.ones(3, dtype=torch.int64))

    def forward(self, x):
        return self.third(self.second(torch.tanh(self.norm(self.first(x)))))


def batch(step, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 5, generator=generator).to(dtype)


def groups(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in trained if p.dim() > 1]},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]


# --- one rank of a job, started by torchrun ---

def train_with_deepspeed(place, stage, bf16):
    """Trains and saves. The fp32 values that DeepSpeed itself gives for each parameter are saved, too."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    model = Model()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True,
              "bf16": {"enabled": bf16}, "zero_optimization": {"stage": stage, "sub_group_size": 40}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups(model), lr=1e-2), config=config)
    for step in range(STEPS):
        loss = engine(batch(step, rank, torch.bfloat16 if bf16 else torch.float32)).float().pow(2).sum()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(place)
    if stage < 3:  # DeepSpeed links the moments after the first group's first step, before those of the second exist.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    expected = {}
    for name, p in engine.module.named_parameters():
        if p.requires_grad:
            expected[f"{name}/master"] = safe_get_full_fp32_param(p)
            expected[f"{name}/m"] = safe_get_full_optimizer_state(p, "exp_avg")
            expected[f"{name}/v"] = safe_get_full_optimizer_state(p, "exp_avg_sq")
        else:
            with deepspeed.zero.GatheredParameters([p], enabled=stage == 3):
                expected[f"{name}/master"] = p.detach().clone()
    if rank == 0:
        torch.save({name: value.detach().float().clone() for name, value in expected.items()}, f"{place}/expected.pt")
    torch.distributed.barrier()


def train_with_torch(place, kind):
    """`kind`: "plain", or "rows" and "columns" for tensors that the ranks divide."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    try:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    except ImportError:  # PyTorch 2.4.
        from torch.distributed._tensor import Replicate, Shard, distribute_tensor
    torch.distributed.init_process_group("gloo")
    model = Model()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    for step in range(STEPS):  # All ranks the same.
        optimizer.zero_grad()
        model(batch(step, 0)).pow(2).sum().backward()
        optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    expected = {f"{name}/master": value for name, value in weights.items() if value.is_floating_point()}
    for name, fields in state["state"].items():
        expected.update({f"{name}/{field}": fields[key] for field, key in FIELDS.items() if key})
    if torch.distributed.get_rank() == 0:
        torch.save({name: value.detach().clone() for name, value in expected.items()}, f"{place}.expected.pt")
    mesh = init_device_mesh("cpu", (RANKS,))

    def divide(value):
        if kind == "plain" or not value.is_floating_point() or value.dim() == 0:
            return value
        dimension = value.dim() - 1 if kind == "columns" else 0
        where = Shard(dimension) if value.shape[dimension] >= RANKS else Replicate()
        return distribute_tensor(value.detach().clone(), mesh, [where])

    weights = {name: divide(value) for name, value in weights.items()}
    state["state"] = {name: {key: divide(value) for key, value in fields.items()}
                      for name, fields in state["state"].items()}
    dcp.save({"model": weights, "optim": state}, checkpoint_id=place)
    torch.distributed.barrier()


# --- the tests ---

def run_ranks(case):
    support.torchrun(__file__, RANKS, case)


class Imports(unittest.TestCase):
    def setUp(self):
        if not COMMAND:
            self.skipTest("FOREBAY_COMMAND does not name the program")
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.place = pathlib.Path(place.name)

    def command(self, *words):
        done = subprocess.run([COMMAND, "state", *map(str, words)], capture_output=True, text=True, timeout=300,
                              check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def imported(self, source, *words):
        """The tensors of an imported state, from its own files, and what `show` says of it."""
        from safetensors.torch import load_file
        state = self.place / "state"
        self.command("import", state, "--from", source, *words)
        self.command("verify", state)
        facts = json.loads(self.command("show", state, "--json"))
        shapes = {p["name"]: p["shape"] for p in facts["parameters"]}
        found = {}
        for file in pathlib.Path(facts["path"]).glob("*.safetensors"):
            for name, value in load_file(file).items():
                parameter, _, field = name.rpartition("/")
                if field in FIELDS and parameter in shapes:
                    found[name] = value.reshape(shapes[parameter])
        self.command("export", state, "--to", self.place / "model.safetensors")
        exported = load_file(self.place / "model.safetensors")
        for name, value in exported.items():
            self.assertTrue(torch.equal(value, found[f"{name}/master"]), name)
        return found, facts

    def check(self, source, expected, *words):
        found, facts = self.imported(source, *words)
        self.assertEqual(sorted(found), sorted(expected))
        for name, value in expected.items():
            self.assertEqual(found[name].dtype, torch.float32)
            self.assertEqual(found[name].shape, value.shape, name)
            self.assertTrue(torch.equal(found[name].view(torch.int32), value.float().view(torch.int32)), name)
        return facts


class FromDeepSpeed(Imports):
    def setUp(self):
        super().setUp()
        support.need("deepspeed")

    def test_every_stage_gives_masters_moments_and_steps(self):
        for stage in (1, 2, 3):
            for bf16 in (False, True):
                with self.subTest(stage=stage, bf16=bf16):
                    self.setUp()
                    source = self.place / "zero"
                    run_ranks({"kind": "deepspeed", "place": str(source), "stage": stage, "bf16": bf16})
                    expected = torch.load(source / "expected.pt")
                    self.assertEqual(len(expected), 3 * 5 + 1)  # The name `third.weight` is not there.
                    facts = self.check(source, expected)
                    self.assertEqual((facts["step"], facts["applied_steps"]), (STEPS, STEPS))
                    self.assertEqual([p["name"] for p in facts["parameters"] if p["frozen"]], ["norm.bias"])

    def test_a_sharded_model_goes_on_from_it(self):
        """The next step of forebay is the one that DeepSpeed's AdamW would do, to rounding."""
        support.need_library()
        import forebay
        source = self.place / "zero"
        run_ranks({"kind": "deepspeed", "place": str(source), "stage": 2, "bf16": False})
        expected = torch.load(source / "expected.pt")
        self.command("import", self.place / "state", "--from", source)
        model = forebay.shard(Model())
        optimizer = forebay.AdamW(groups(model), lr=1e-2, weight_decay=0.01)
        forebay.restore(model, self.place / "state")
        for name, value in model.state_dict().items():
            if f"{name}/master" in expected:
                self.assertTrue(torch.equal(value, expected[f"{name}/master"]), name)
        plain = Model()
        with torch.no_grad():
            for name, p in plain.named_parameters():
                p.copy_(expected[f"{name}/master"])
        reference = torch.optim.AdamW(groups(plain), lr=1e-2, weight_decay=0.01)
        for name, p in plain.named_parameters():
            if p.requires_grad:
                reference.state[p] = {"step": torch.tensor(float(STEPS)), "exp_avg": expected[f"{name}/m"].clone(),
                                      "exp_avg_sq": expected[f"{name}/v"].clone()}
        for one, update in ((model, optimizer), (plain, reference)):
            one(batch(9, 0)).pow(2).sum().backward()
            update.step()
        for name, value in plain.state_dict().items():
            found = model.state_dict()[name]
            if value.is_floating_point():
                self.assertLess((found - value).abs().max().item(), 1e-6, name)


class FromTorch(Imports):
    def test_every_division_gives_masters_moments_and_steps(self):
        for kind in ("plain", "rows", "columns"):
            with self.subTest(kind=kind):
                self.setUp()
                source = self.place / "checkpoint"
                run_ranks({"kind": "torch", "place": str(source), "division": kind})
                expected = torch.load(f"{source}.expected.pt")
                expected.pop("third.weight/master", None)
                found, facts = self.imported(source)
                found.pop("third.weight/master", None)  # get_state_dict() may list both names.
                self.assertEqual(sorted(found), sorted(expected))
                for name, value in expected.items():
                    self.assertTrue(torch.equal(found[name], value), name)
                self.assertEqual((facts["step"], facts["applied_steps"]), (STEPS, STEPS))

    def test_weights_alone(self):
        import torch.distributed.checkpoint as dcp
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3).to(torch.bfloat16))
        expected = {f"{name}/master": value for name, value in model.state_dict().items()}
        for number, (state, words) in enumerate([(model.state_dict(), []), ({"model": model.state_dict()}, []),
                                                 ({"a": {"net": model.state_dict()}}, ["--prefix", "a.net."])]):
            self.setUp()
            source = self.place / f"checkpoint-{number}"
            dcp.save(state, checkpoint_id=str(source))
            facts = self.check(source, expected, *words)
            self.assertEqual(facts["step"], 0)

    def test_buffers_can_be_left_out(self):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict
        import forebay
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        source = self.place / "checkpoint"
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=str(source))
        copy = forebay.shard(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)))
        forebay.AdamW(copy)
        self.imported(source)
        with self.assertRaisesRegex(forebay.InvalidArgument, "--leave-out 1.running_mean"):
            forebay.restore(copy, str(self.place / "state"))
        shutil.rmtree(self.place / "state")
        done = subprocess.run([COMMAND, "state", "import", str(self.place / "state"), "--from", str(source), "--leave-out", "none.*"],
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("--leave-out none.* is the name of no tensor", done.stderr)
        self.imported(source, "--leave-out", "*.running_mean", "--leave-out", "*.running_var")
        forebay.restore(copy, str(self.place / "state"))
        for name, value in copy.named_parameters():
            self.assertTrue(torch.equal(copy.state_dict()[name], weights[name]), name)

    def test_moments_under_numbers_are_refused_with_a_remedy(self):
        import torch.distributed.checkpoint as dcp
        model = nn.Linear(5, 7)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        source = self.place / "checkpoint"
        dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=str(source))
        done = subprocess.run([COMMAND, "state", "import", str(self.place / "state"), "--from", str(source)],
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertTrue(re.search("get_state_dict.*--weights-only", done.stderr), done.stderr)
        found, _ = self.imported(source, "--weights-only")
        self.assertTrue(torch.equal(found["weight/master"], model.weight))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        case = json.loads(sys.argv[1])
        if case["kind"] == "deepspeed":
            train_with_deepspeed(case["place"], case["stage"], case["bf16"])
        else:
            train_with_torch(case["place"], case["division"])
        support.leave()
    else:
        support.main()
