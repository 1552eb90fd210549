"""Ordinary programs under forebay, FSDP2 and DeepSpeed at stage 3: the same weights, other ones, or a refusal.

    python refusals.py

One rank, on the CPU. Each case is compared with plain PyTorch.
"""

import contextlib
import copy
import os
import socket
import subprocess
import sys

import torch
import torch.distributed
from torch import nn

METHODS = ("forebay", "fsdp2", "deepspeed")


class Model(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.embed = nn.Embedding(50, 16, sparse=sparse)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 50)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


def batch(step):
    return torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(step))


def adamw(parameters):
    return torch.optim.AdamW(list(parameters), lr=1e-2)


class Made:
    """A model and its optimizer under one method. `make` makes the optimizer; `before`: ahead of sharding."""

    def __init__(self, method, model, make=adamw, before=False):
        self.method, self.model = method, model
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = make(parameters) if before or method in ("plain", "deepspeed") else None
        if method == "forebay":
            import forebay
            forebay.shard(model, stage=3)
            optimizer = forebay.wrap(optimizer or make(parameters))
        elif method == "fsdp2":
            from torch.distributed.fsdp import fully_shard
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            optimizer = optimizer or make([p for p in model.parameters() if p.requires_grad])
        elif method == "deepspeed":
            import deepspeed
            self.model, optimizer, _, _ = deepspeed.initialize(
                model=model, optimizer=optimizer, config={
                    "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
                    "zero_optimization": {"stage": 3}, "gradient_clipping": 0.0})
        self.optimizer = optimizer

    def step(self, *losses):
        for loss in losses:
            self.model.backward(loss) if self.method == "deepspeed" else loss.backward()
        if self.method == "deepspeed":
            self.model.step()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def steps(self, count=3):
        for step in range(count):
            self.step(self.model(batch(step)))


def loop(method):
    made = Made(method, Model())
    made.steps()
    return made


def own_lines(method):
    """loss.backward(), optimizer.step() and zero_grad(), as they were."""
    made = Made(method, Model())
    for step in range(3):
        made.model(batch(step)).backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
    return made


def optimizer_before(method):
    made = Made(method, Model(), before=True)
    made.steps()
    return made


def clip(method):
    made = Made(method, Model())
    for step in range(3):
        made.model(batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(made.model.parameters(), 0.1)
        made.optimizer.step()
        made.optimizer.zero_grad()
    return made


def two_forwards(method):
    made = Made(method, Model())
    for step in range(3):
        made.step(made.model(batch(step)) - 0.5 * made.model(batch(step + 10)))
    return made


def no_sync(method):
    made = Made(method, Model())
    for step in range(3):
        with made.model.no_sync() if hasattr(made.model, "no_sync") else contextlib.nullcontext():
            made.model(batch(step)).backward()
        made.model(batch(step + 10)).backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
    return made


def frozen(method):
    model = Model()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].bias.requires_grad_(False)
    made = Made(method, model)
    made.steps()
    return made


def shapes(method):
    made = Made(method, Model())
    made.steps()
    model = getattr(made.model, "module", made.model)
    assert model.head.weight.numel() == 800 and type(model.head.weight.data) is torch.Tensor, (
        f"{type(model.head.weight.data).__name__} of shape {list(model.head.weight.shape)}")
    return made


def sgd(method):
    made = Made(method, Model(), make=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    made.steps()
    return made


def deepcopied(method):
    made = Made(method, Model())
    copy.deepcopy(made.model)
    made.steps()
    return made


def double_backward(method):
    made = Made(method, Model())
    for step in range(3):
        made.model(batch(step)).backward(create_graph=True)
        made.optimizer.step()
        made.optimizer.zero_grad()
    return made


def sparse(method):
    made = Made(method, Model(sparse=True), make=lambda parameters: (
        torch.optim.SparseAdam([parameters[0]]) if method == "plain" else adamw(parameters)))
    made.steps()
    return made


def state_dict(method):
    made = Made(method, Model())
    made.steps()
    values = getattr(made.model, "module", made.model).state_dict()
    assert list(values["head.weight"].shape) == [50, 16] and type(values["head.weight"]) is torch.Tensor, (
        f"{type(values['head.weight']).__name__} of shape {list(values['head.weight'].shape)}")
    return made


CASES = {one.__name__: one for one in (own_lines, loop, optimizer_before, clip, two_forwards, no_sync, frozen, shapes,
                                       state_dict, sgd, deepcopied, double_backward, sparse)}


def weights(made):
    """All values; None where there is no way to read them."""
    if made.method == "forebay":
        return list(made.model.state_dict().values())
    if made.method == "fsdp2":
        return [p.full_tensor() for p in made.model.parameters()]
    if made.method == "deepspeed":
        import deepspeed
        with deepspeed.zero.GatheredParameters(list(made.model.parameters())):
            return [p.detach().clone() for p in made.model.parameters()]
    return list(made.model.state_dict().values())


def case(method, name):
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", DS_ACCELERATOR="cpu")
    with socket.socket() as one:
        one.bind(("localhost", 0))
        os.environ["MASTER_PORT"] = str(one.getsockname()[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    expected = weights(CASES[name]("plain")) if name != "sparse" else None
    if method == "deepspeed":
        import deepspeed
        deepspeed.init_distributed(dist_backend="gloo")
    else:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    try:
        found = weights(CASES[name](method))
    except Exception as error:
        print("result: " + f"refused: {type(error).__name__}: {error}".splitlines()[0][:150], flush=True)
        os._exit(0)
    far = max(((a - b).abs().max().item() for a, b in zip(found, expected)), default=0) if expected else 0
    print("result: " + ("same" if far < 1e-3 else f"OTHER WEIGHTS, by {far:.2g}"), flush=True)
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        case(*sys.argv[1:])
    print("| | " + " | ".join(METHODS) + " |\n|---|" + "---|" * len(METHODS))
    for name in sys.argv[1:] or CASES:
        row = []
        for method in METHODS:
            try:
                done = subprocess.run([sys.executable, "-W", "ignore", __file__, method, name], capture_output=True,
                                      text=True, check=False, timeout=180)
                lines = [line[8:] for line in done.stdout.splitlines() if line.startswith("result: ")]
                row.append(lines[-1] if lines else f"ended with {done.returncode}")
            except subprocess.TimeoutExpired:
                row.append("no end in 180 s")
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)
