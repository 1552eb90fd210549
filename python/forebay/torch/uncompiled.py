"""Functions that torch.compile leaves alone."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, Optional

import torch


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As torch.compiler.disable(), which loads torch._dynamo (some 80 MB) even in a program that compiles nothing."""
    disabled: Optional[Callable[..., Any]] = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
            torch._dynamo.eval_frame.skip_code(call.__code__)  # Else this wrapper is compiled for each `function`.
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # Where a compiled function calls it, the graph ends.
    return call
