"""forebay: ZeRO stages, offload and memory management from Python, over libforebay-c.so.1.

    import forebay
    model = forebay.shard(model, stage=3, offload="optimizer")  # in place
    optimizer = forebay.AdamW(model, lr=1e-4)                    # the loop stays as it is

The names that need PyTorch are loaded at their first use. docs/pytorch.md is the guide.
"""

from __future__ import annotations

import importlib
from typing import Any

from forebay._library import (Corruption, Error, InputOutputError, Internal, InvalidArgument, OutOfMemory,
                              PeerLost, Timeout, Unavailable, Unsupported)
from forebay.core import (Arena, Checkpointer, Communicator, Device, Engine, LocalGroup, Options, PinnedPool,
                          StepResult, devices, explain, plan, simulate, version)

_TORCH = ("Adafactor", "Adam", "AdamW", "Lion", "Muon", "SGD", "shard", "wrap", "gathered", "load", "save", "restore", "report", "digest",
          "offload_activations")
_ALLOCATOR = ("enable_allocator", "memory_pool")

__all__ = ["Arena", "Checkpointer", "Communicator", "Corruption", "Device", "Engine", "Error", "InputOutputError",
           "Internal", "InvalidArgument", "LocalGroup", "Options", "OutOfMemory", "PeerLost", "PinnedPool",
           "StepResult", "Timeout", "Unavailable", "Unsupported", "devices", "explain", "plan", "simulate", "version",
           *_TORCH, *_ALLOCATOR]


def __getattr__(name: str) -> Any:
    if name in _TORCH:
        return getattr(importlib.import_module("forebay.torch"), name)
    if name in _ALLOCATOR:
        return getattr(importlib.import_module("forebay._allocator"), name)
    raise AttributeError(f"module 'forebay' has no attribute {name!r}")
