"""The part of a training step that forebay's hooks and ctypes take, in processor time of the training thread.

    python overhead.py --model 124m

Counted: the time within the hooks, without the copies of gradients (torch's) and without the library's own work; and a
call through ctypes at the price of an empty one.
"""

import argparse
import functools
import statistics
import time

import torch

import compare
import forebay
from forebay import _library, core
from forebay.torch import sharded

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", choices=compare.MODELS, default="124m")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--stage", type=int, default=3)
arguments = parser.parse_args()
torch.set_num_threads(1)

spent = {"hooks": 0.0, "inside": 0.0, "calls": 0}
depth = 0


def hook(function):
    """Counts the time of the outermost hook."""
    @functools.wraps(function)
    def timed(*of, **options):
        global depth
        # The memory of a gradient is freed without forebay too, so not within the hook.
        kept = [one.grad for one in of if isinstance(one, torch.nn.Parameter)]
        depth += 1
        began = time.thread_time()
        try:
            return function(*of, **options)
        finally:
            depth -= 1
            if depth == 0:
                spent["hooks"] += time.thread_time() - began
            kept.clear()
    return timed


def inside(function, is_call=True):
    """Counts the time within a hook that is the library's or torch's own work."""
    @functools.wraps(function)
    def timed(*of, **options):
        began = time.thread_time()
        try:
            return function(*of, **options)
        finally:
            if depth:
                spent["inside"] += time.thread_time() - began
            spent["calls"] += is_call
    return timed


for owner, names in ((sharded.Unit, ("before_forward", "after_forward")), (sharded._Call, ("output_gradient",)),
                     (sharded.Sharded, ("before_model", "after_model", "take_gradient", "leave_backward", "step",
                                        "begin_backward"))):
    for name in names:
        setattr(owner, name, hook(getattr(owner, name)))
backward = sharded._InputsDone.backward
sharded._InputsDone.backward = staticmethod(hook(backward))
for name in ("acquire", "release", "gradient", "step", "micro_step_begin", "step_begin", "hyperparameter"):
    setattr(core.Engine, name, inside(getattr(core.Engine, name)))
for name in ("copy_", "add_"):
    setattr(torch.Tensor, name, inside(getattr(torch.Tensor, name), is_call=False))

GPT = compare.gpt(arguments.model)
vocabulary = compare.MODELS[arguments.model][3]
torch.manual_seed(0)
model = forebay.shard(GPT(), stage=arguments.stage, host_threads=1)
optimizer = forebay.AdamW(model)

shares, steps = [], []
for step in range(arguments.steps + 2):
    tokens = torch.randint(0, vocabulary, (1, arguments.length + 1), generator=torch.Generator().manual_seed(step))
    spent.update(hooks=0.0, inside=0.0, calls=0)
    began = time.process_time()
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step >= 2:  # The first steps are checked and recorded.
        steps.append(time.process_time() - began)
        shares.append((spent["hooks"] - spent["inside"], spent["calls"]))

library = _library.library()
began = time.thread_time()
for _ in range(100000):
    library.code_name(0)
call = (time.thread_time() - began) / 100000
own, calls = statistics.median(one[0] for one in shares), statistics.median(one[1] for one in shares)
whole = statistics.median(steps)
print(f"{arguments.model}: a step takes {1e3 * whole:.0f} ms of processor time; hooks {1e3 * own:.2f} ms; {calls:.0f} "
      f"calls of {1e6 * call:.2f} us; together {100 * (own + calls * call) / whole:.2f} % of the step")
