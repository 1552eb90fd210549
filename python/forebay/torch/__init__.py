"""forebay for PyTorch: shard() a module in place, and train it by the loop that it had."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from forebay.torch import describe, huggingface, state, uncompiled
from forebay.torch.activations import offload_activations
from forebay.torch.optimizer import SGD, Adafactor, Adam, AdamW, Lion, Muon, Optimizer, wrap
from forebay.torch.sharded import Sharded
from forebay.torch.state import digest, gathered, load, report, restore, save

__all__ = ["Adafactor", "Adam", "AdamW", "Lion", "Muon", "Optimizer", "SGD", "digest", "gathered", "load", "offload_activations", "report",
           "restore", "save", "shard", "wrap"]


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Shards the parameters, gradients and optimizer states of `model` over the ranks, in place.

    Returns the same module. Parameters keep their object, shape, dtype and device; from the making of the optimizer
    on they lie in forebay's memory. All ranks call it with the same model and values.

    Options: those of the C interface for an engine, its device and its ranks, by name with underscores: stage (0 to 3),
    offload ("none", "optimizer", "optimizer+parameters"), offload_tier ("cpu", "nvme:DIR"), dtype ("fp32", "bf16", "fp16";
    default: the model's), bucket, memory, save_async, communicator, ...; forebay.Options().list() explains all. And of this
    function:
      units      classes, names or modules that are gathered as one; default: the class that repeats most in a
                 ModuleList. A unit covers its submodules.
      resident   the same; their parameters are gathered for the whole pass.
      check      True: every operator is checked for reads of released parameters. Without it, the first step is.
      config     a DeepSpeed configuration, ds_config.json or a dict (docs/deepspeed.md); options given by name win.
      device     the device of a model on the meta device. store: a torch.distributed.Store for the ranks to meet.
    Errors: InvalidArgument with the reason and the remedy.
    """
    describe.refuse_wrappers(model)
    sharded = Sharded(model, **options)
    object.__setattr__(model, "_forebay", sharded)
    state.install(sharded)
    if not hasattr(model, "no_sync"):
        object.__setattr__(model, "no_sync", contextlib.nullcontext)  # Every micro-step reduces.
    huggingface.install()
    uncompiled.guard_hooks()
    if sharded.offloads_activations:
        offload_activations(model)
    return model
