"""Functions that torch.compile leaves alone, and what they can tell of compiled code."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any, Callable, Optional

import torch
from torch import nn

from forebay.torch.after_import import after_import


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As torch.compiler.disable(), which loads torch._dynamo (some 80 MB) even in a program that compiles nothing."""
    disabled: Optional[Callable[..., Any]] = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if not hasattr(sys.modules.get("torch._dynamo"), "disable"):  # While it is imported it has none yet.
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
            torch._dynamo.eval_frame.skip_code(call.__code__)  # Else this wrapper is compiled for each `function`.
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # Where a compiled function calls it, the graph ends.
    return call


def left_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """As uncompiled(), without a wrapper, for a function that is short and called often. The functions that it calls are compiled."""
    function._torchdynamo_disable = True
    after_import("torch._dynamo.eval_frame", lambda module: module.skip_code(function.__code__))
    return function


def calls_on_stack(module: nn.Module, thread: Optional[int] = None) -> int:
    """How often `module` is being called in this thread, or in that of this number; many where compiled code hides it."""
    count, frame = 0, sys._getframe() if thread is None else sys._current_frames().get(thread)
    while frame is not None:
        name = frame.f_code.co_name
        if name.startswith("torch_dynamo_resume"):
            return sys.maxsize
        count += name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


def is_in_state_dict(module: nn.Module, thread: int) -> bool:
    """Whether the thread of this number is in state_dict() of `module`."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name == "state_dict" and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


def is_in_compiled_code() -> bool:
    """Whether torch.compile() called this; also where a function of the program that it leaves alone did."""
    frame = sys._getframe()
    while frame is not None:
        back = frame.f_back
        if (frame.f_code.co_filename.endswith("_dynamo/eval_frame.py")
                and (back is None or back.f_code.co_filename != __file__)):  # Not call() above.
            return True
        frame = back
    return False


@functools.lru_cache(maxsize=None)
def guard_hooks() -> None:
    """torch.compile() looks for hooks before it takes a graph again. Called by shard().

    By default it does not, so a graph of another model of the same class would run without the hooks.
    """
    def teach(config: ModuleType) -> None:
        config.skip_nnmodule_hook_guards = False
        if hasattr(sys.modules.get("torch._dynamo"), "reset"):
            torch._dynamo.reset()  # Graphs from before.

    after_import("torch._dynamo.config", teach)
