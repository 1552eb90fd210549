"""One rank of training_test.py, started by torchrun: trains models.GPT and shows the result.

    ranks.py '{"kind": "run", "options": {...of shard()}, "model": {...}, "clip": 0.5, "micro_steps": 2}'
"""

import json
import os
import sys

import support

import torch

import forebay
import models
from forebay.torch import memory, state

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


RANK = int(os.environ.get("RANK", "0"))


def run(options, model=None, clip=None, micro_steps=2, steps=3):
    """Trains on this rank's batches."""
    made = models.make(**(model or {}))
    forebay.shard(made, **options)
    optimizer = forebay.AdamW(made, lr=1e-2)
    seen = models.train(made, optimizer, steps=steps, micro_steps=micro_steps, clip=clip, rank=RANK)
    return {"rank": RANK, "seen": seen, "digest": forebay.digest(made), "norm": optimizer.grad_norm}


def table(dtype, files):
    """Every stage, offload and kind of activation checkpointing: a digest by case, and the results of one case."""
    offloads = {"none": {}, "host": {"offload": "optimizer"},
                "files": {"offload": "optimizer", "offload_tier": f"nvme:{files}"}}
    digests = {}
    for stage in range(4):
        for place, offload in offloads.items():
            for recompute in (None, "nonreentrant", "reentrant"):
                done = run({"stage": stage, "dtype": dtype, "guard": True, **offload}, {"recompute": recompute}, clip=0.5)
                digests[f"stage {stage}, offload {place}, checkpointing {recompute}"] = done["digest"]
    return {"rank": RANK, "digests": digests, "seen": done["seen"]}


def clear(options):
    """Gradients of the first batch of the first and of the second step are dropped on all ranks."""
    made = forebay.shard(models.make(), **options)
    optimizer = forebay.AdamW(made, lr=1e-2)
    made(*models.batch(7, 8, RANK)).backward()
    made.zero_grad()
    models.train(made, optimizer, steps=1, rank=RANK)
    made(*models.batch(7, 7, RANK)).backward()
    made.zero_grad()
    models.train(made, optimizer, steps=2, rank=RANK)
    return {"rank": RANK, "digest": forebay.digest(made)}


def transport(options):
    """The transport between the ranks."""
    made = forebay.shard(models.make(), **options)
    models.train(made, forebay.AdamW(made, lr=1e-2), steps=1, rank=RANK)
    return {"rank": RANK, "transport": made._forebay.engine.communicator.report()["name"]}


def alone(options):
    """Rank 0 alone reads the values: before the first step, between steps, and after values were set."""
    made = forebay.shard(models.make(), **options)
    optimizer = forebay.AdamW(made, lr=1e-2)
    totals = []

    def read():
        if RANK == 0:
            totals.append(sum(value.double().sum().item() for value in made.state_dict().values()))
            with forebay.gathered(made):
                totals.append(sum(p.double().sum().item() for _, p in made.named_parameters(remove_duplicate=False)))

    read()
    for _ in range(2):
        models.train(made, optimizer, steps=1, rank=RANK)
        read()
    made.load_state_dict({name: value / 2 for name, value in made.state_dict().items()})
    read()
    models.train(made, optimizer, steps=1, rank=RANK)
    read()
    return {"rank": RANK, "digest": forebay.digest(made), "totals": totals}


def fewer(options):
    """Rank 1 leaves out a forward pass. The text of the error."""
    made = forebay.shard(models.make(), **options, deadline=60000)
    optimizer = forebay.AdamW(made, lr=1e-2)
    models.train(made, optimizer, rank=RANK)
    try:
        with torch.no_grad():
            for i in range(4 - RANK):
                made(*models.batch(0, i))
        forebay.digest(made)
        return {"rank": RANK, "error": ""}
    except forebay.Error as error:
        return {"rank": RANK, "error": f"{type(error).__name__}: {error}"}


def different(options):
    """Rank 1 begins with another value of a parameter. The text of the error."""
    made = models.make()
    with torch.no_grad():
        made.norm.weight[3] += RANK
    forebay.shard(made, **options)
    try:
        forebay.AdamW(made, lr=1e-2)
        return {"rank": RANK, "error": ""}
    except forebay.Error as error:
        return {"rank": RANK, "error": str(error)}


def switched(options):
    """Rank 1 freezes a parameter. The text of the error."""
    made = forebay.shard(models.make(), **options)
    optimizer = forebay.AdamW(made, lr=1e-2)
    models.train(made, optimizer, rank=RANK)
    made.norm.weight.requires_grad_(RANK == 0)
    try:
        models.train(made, optimizer, steps=1, rank=RANK)
        return {"rank": RANK, "error": ""}
    except forebay.Error as error:
        return {"rank": RANK, "error": str(error)}


def remedies(options):
    """The device bytes that offload frees on this rank, and those that an out-of-memory error of torch says options would."""
    made, offloaded = (forebay.shard(models.make(), **options, **more) for more in ({}, {"offload": "optimizer"}))
    for one in (made, offloaded):
        forebay.AdamW(one)
    held, left = (forebay.report(one)["plan"]["bytes"]["total"] for one in (made, offloaded))
    return {"rank": RANK, "freed": held - left, "said": dict(memory.remedies(made._forebay))}


def joined(options):
    """A parameter joins the model after shard(). The text of the error."""
    made = forebay.shard(models.make(), **options)
    optimizer = forebay.AdamW(made, lr=1e-2)
    made.norm.adapter = torch.nn.Linear(2, 2)
    try:
        models.train(made, optimizer, steps=1, rank=RANK)
        return {"rank": RANK, "error": ""}
    except forebay.Error as error:
        return {"rank": RANK, "error": str(error)}


def loaded(options):
    """Rank 0 loads a state within gathered(write=True) and broadcasts it. Whether all ranks' masters are those of the state."""
    torch.distributed.init_process_group("gloo")
    made = forebay.shard(models.make(), **options)
    optimizer = forebay.AdamW(made, lr=1e-5)
    initial = {name: value.clone() for name, value in made.state_dict().items()}
    models.train(made, optimizer, rank=RANK)
    with forebay.gathered(made, write=True):
        if RANK == 0:
            made.load_state_dict(initial)
        for p in made.parameters():
            torch.distributed.broadcast(p.data, 0)
    masters = []
    for p in made._forebay.parameters:
        master = torch.empty(p.shape, dtype=torch.float32)
        made._forebay.engine.get(*made._forebay.places[p][0], "fp32", master.data_ptr(), master.numel())
        masters.append(torch.equal(master, initial[made._forebay.names[p]].float()))
    models.train(made, optimizer, steps=1, rank=RANK)
    return {"rank": RANK, "exact": all(masters), "digest": forebay.digest(made)}


def collected(options):
    """Rank 0 alone makes a state_dict(): twice within, and in a block that writes. Whether that changed anything, or is wrong."""
    made = forebay.shard(models.make(), **options)
    models.train(made, forebay.AdamW(made, lr=1e-2), rank=RANK)
    before, found = made.state_dict(), []

    def look():
        with state.collected(made), state.collected(made):
            if RANK == 0:
                found.append(made.state_dict())

    look()
    with forebay.gathered(made, write=True):
        look()
    found.append(made.state_dict())
    return {"rank": RANK, "right": all(torch.equal(one[name], value) for one in found for name, value in before.items())}


def given_up(options, how):
    """Rank 1 drops its gradients, or has none, before a step. The text of the error."""
    made = forebay.shard(models.make(), **options)
    optimizer = forebay.AdamW(made, lr=1e-2)
    models.train(made, optimizer, steps=2, rank=RANK)
    loss = made(*models.batch(7, 8, RANK))
    if RANK != 1 or how == "cleared":
        loss.backward()
    if RANK == 1:
        optimizer.zero_grad()
    text = ""
    try:
        optimizer.step()
    except forebay.Error as error:
        text = str(error)
    optimizer.zero_grad()
    if RANK == 0 and options["stage"] != 3:
        made.state_dict()  # Alone, and training goes on.
    models.train(made, optimizer, steps=1, rank=RANK)
    return {"rank": RANK, "error": text}


if __name__ == "__main__":
    case = json.loads(sys.argv[1])
    support.show(globals()[case.pop("kind", "run")](**case))
