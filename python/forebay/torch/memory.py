"""Out of memory in an operator of torch: the error says forebay's share, and what would free how much."""

from __future__ import annotations

import ctypes
import sys
import weakref
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import torch

from forebay import core
from forebay._library import Error
from forebay.torch import describe

if TYPE_CHECKING:
    from forebay.torch.sharded import Sharded

_POOLS = (("parameters", "parameters"), ("gradients", "gradients"), ("optimizer", "optimizer states"),
          ("gathered", "gathered units"), ("buckets", "send buffers"))
_KINDS = tuple(kind for kind in (getattr(torch, "OutOfMemoryError", None), torch.cuda.OutOfMemoryError) if kind)


def is_out_of_memory(error: Optional[BaseException]) -> bool:
    return isinstance(error, _KINDS) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def trim_heap() -> None:
    """Gives free pages of the C library's heap back to the system, where the library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def size_text(size: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size} bytes"


def _device_bytes(sharded: "Sharded", **changes: Any) -> int:
    options = {**sharded.options, **changes}
    for own in ("rank", "size", "local_rank"):
        options.pop(own, None)
    communicator = sharded.engine.communicator
    with core.Engine(size=communicator.size if communicator else 1, **options) as engine:
        describe.describe(engine, sharded.plans, sharded.names, sharded.groups, sharded.elementwise)
        return engine.report()["plan"]["bytes"]["total"]


def remedies(sharded: "Sharded") -> List[Tuple[str, int]]:
    """Other options and the device bytes that each would free on this rank, the most first."""
    now = _device_bytes(sharded)
    offload = sharded.options.get("offload", "none")
    ranks = sharded.engine.communicator.size if sharded.engine.communicator else 1
    candidates: List[Dict[str, Any]] = [{"stage": stage} for stage in range(sharded.stage + 1, 4) if ranks > 1]
    if offload == "none":
        candidates.append({"offload": "optimizer"})
    if offload != "optimizer+parameters":
        candidates.append({"stage": 3, "offload": "optimizer+parameters"})
    if sharded.dtype == torch.float32:
        candidates.append({"dtype": "bf16"})
    found = []
    for changes in candidates:
        try:
            freed = now - _device_bytes(sharded, **changes)
        except Error:  # The combination is refused.
            continue
        if freed > 0:
            found.append((", ".join(f"{name}={value!r}" for name, value in changes.items()), freed))
    return sorted(found, key=lambda one: -one[1])


def share(sharded: "Sharded") -> str:
    """The sentences that an out-of-memory error of torch gets."""
    held = sharded.engine.report()["plan"]["bytes"]
    parts = ", ".join(f"{words} {size_text(held[name])}" for name, words in _POOLS if held[name])
    text = (f"forebay holds {size_text(held['total'])} on {sharded.device} for this {type(sharded.model).__name__}, "
            f"outside of torch's allocator: {parts}")
    found = "; ".join(f"{options} {size_text(freed)}" for options, freed in remedies(sharded)[:4])
    if found:
        text += f". Options of shard() and the memory that each would free: {found}"
    return text + (". Activations are torch's: a smaller batch, activation checkpointing or "
                   "forebay.offload_activations(model) frees them")


def explain(sharded: "Sharded", error: Optional[BaseException]) -> None:
    """Adds the share to an out-of-memory error, once."""
    if not is_out_of_memory(error) or sharded.engine is None or "forebay holds" in str(error):
        return
    error.args = (f"{error}\n{share(sharded)}",)


_alive: "weakref.WeakSet[Sharded]" = weakref.WeakSet()


def watch(sharded: "Sharded") -> None:
    """Errors that no forward pass sees, as those of backward passes, are explained when they end the program."""
    if not _alive:
        before = sys.excepthook

        def hook(kind: Any, error: BaseException, trace: Any) -> None:
            for one in list(_alive):
                explain(one, error)
            before(kind, error, trace)
        sys.excepthook = hook
    _alive.add(sharded)
