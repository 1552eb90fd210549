"""Hugging Face accelerate leaves a sharded model as it is."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from typing import Any

from torch import nn


def leave_alone(model: nn.Module) -> None:
    """Tells accelerate not to wrap `model` in DistributedDataParallel."""
    object.__setattr__(model, "_is_accelerate_prepared", True)
    try:
        version = importlib.metadata.version("accelerate")
    except importlib.metadata.PackageNotFoundError:
        return
    if [int(part) for part in re.findall(r"\d+", version)[:2]] < [1, 14]:  # Older ones do not ask.
        _teach()


@functools.lru_cache(maxsize=None)
def _teach() -> None:
    from accelerate import Accelerator
    original = Accelerator.prepare_model

    @functools.wraps(original)
    def prepare_model(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if not getattr(model, "_is_accelerate_prepared", False):
            return original(self, model, *args, **kwargs)
        if not any(one is model for one in self._models):
            self._models.append(model)
        return model

    Accelerator.prepare_model = prepare_model
