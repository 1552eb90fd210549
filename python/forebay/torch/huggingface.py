"""Hugging Face's accelerate and Trainer over a sharded model: no wrapper around it, forebay's optimizer in place of
torch.optim.AdamW, and checkpoints that all ranks write."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import warnings
from types import ModuleType
from typing import Any, Iterator, List, Optional, Tuple

import torch
from torch import nn

from forebay._library import InvalidArgument, Unsupported
from forebay.torch import state
from forebay.torch.after_import import after_import
from forebay.torch.optimizer import Optimizer, wrap

STATE = "forebay"  # The directory of the saved state within one of the Trainer's checkpoints.


def _sharded_in(model: Any) -> Optional[nn.Module]:
    """The sharded module: `model` or one within it."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((one for one in modules if "_forebay" in one.__dict__), None)


@contextlib.contextmanager
def moments_are_saved() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="optimizer.state_dict\\(\\) has no moments")
        yield


def _save_in_checkpoint(model: nn.Module, directory: str) -> None:
    """Saves a part of a checkpoint, which is replaced as a whole: by another Trainer of the program too. Collective."""
    try:
        return state.save(model, directory)
    except InvalidArgument as error:  # On all ranks.
        if "which this save would replace" not in str(error):
            raise
    communicator = model._forebay.engine.communicator
    if communicator is None or communicator.rank == 0:  # The others wait for it in save().
        for entry in os.scandir(directory):  # Nothing but states.
            if entry.name == "latest":
                os.remove(entry.path)
            elif entry.name.startswith("step-") and entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
    state.save(model, directory)


def _restore(model: nn.Module, directory: str) -> None:
    if os.path.isdir(directory):
        state.restore_over_weights(model, directory)
    else:
        warnings.warn(f"there is no {directory}, which has the moments, so they begin at zero; copy it with the checkpoint", stacklevel=3)


def _teach_accelerate(module: ModuleType) -> None:
    cls = module.Accelerator
    prepare_model, prepare_optimizer = cls.prepare_model, cls.prepare_optimizer

    @functools.wraps(prepare_model)
    def model_as_it_is(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if "_forebay" not in model.__dict__:
            return prepare_model(self, model, *args, **kwargs)
        if any(one is model for one in self._models):
            return model
        kwargs.update(device_placement=False, evaluation_mode=True)  # With autocast, and without a wrapper such as DDP.
        return prepare_model(self, model, **kwargs)

    @functools.wraps(prepare_optimizer)
    def wrapped(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # Accelerate's own wrapper comes back where a Trainer trains again.
        if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(getattr(optimizer, "optimizer", optimizer),
                                                                           Optimizer):
            if any(hasattr(p, "_forebay") for group in optimizer.param_groups for p in group["params"]):
                optimizer = wrap(optimizer)
        return prepare_optimizer(self, optimizer, *args, **kwargs)

    backward = cls.backward

    @functools.wraps(backward)
    def of_scaled(self: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        optimizers = [getattr(one, "optimizer", one) for one in self._optimizers]
        scales = [one.loss_scale if isinstance(one, Optimizer) else 1.0 for one in optimizers]
        if len(scales) > 1 and any(scale != 1 for scale in scales):
            raise Unsupported("this Accelerator has several optimizers, one of them of parameters in fp16, so it cannot tell which losses to "
                              "scale; call (loss * optimizer.loss_scale).backward() in place of accelerator.backward(loss), or use bf16")
        backward(self, loss * scales[0] if scales and scales[0] != 1 else loss, *args, **kwargs)

    save_state, load_state = cls.save_state, cls.load_state

    @functools.wraps(save_state)
    def with_moments(self: Any, *args: Any, **kwargs: Any) -> Any:
        def save(models: List[nn.Module], _: Any, directory: str) -> None:
            for i, model in enumerate(models):
                if "_forebay" in model.__dict__:
                    _save_in_checkpoint(model, os.path.join(directory, f"{STATE}_{i}"))
        hook = self.register_save_state_pre_hook(save)
        try:
            with moments_are_saved():
                return save_state(self, *args, **kwargs)
        finally:
            hook.remove()

    @functools.wraps(load_state)
    def moments_too(self: Any, *args: Any, **kwargs: Any) -> Any:
        found: List[Tuple[nn.Module, str]] = []
        hook = self.register_load_state_pre_hook(lambda models, directory: found.extend(
            (model, os.path.join(directory, f"{STATE}_{i}")) for i, model in enumerate(models)))
        try:
            result = load_state(self, *args, **kwargs)
        finally:
            hook.remove()
        for model, directory in found:
            if "_forebay" in model.__dict__:
                _restore(model, directory)
        return result

    cls.prepare_model, cls.prepare_optimizer = model_as_it_is, wrapped
    cls.backward, cls.save_state, cls.load_state = of_scaled, with_moments, moments_too


def _teach_trainer(module: ModuleType) -> None:
    cls = module.Trainer
    save_model, save_states, load_states = (cls.save_model, cls._save_optimizer_and_scheduler,
                                            cls._load_optimizer_and_scheduler)

    @functools.wraps(save_model)
    def saved_by_all(self: Any, *args: Any, **kwargs: Any) -> None:
        model = _sharded_in(self.model)
        with state.collected(model) if model is not None else contextlib.nullcontext():
            save_model(self, *args, **kwargs)

    @functools.wraps(save_states)
    def with_moments(self: Any, output_dir: str, *args: Any, **kwargs: Any) -> None:
        model = _sharded_in(self.model)
        with moments_are_saved():
            save_states(self, output_dir, *args, **kwargs)
        if model is not None:
            _save_in_checkpoint(model, os.path.join(output_dir, STATE))

    @functools.wraps(load_states)
    def moments_too(self: Any, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        load_states(self, checkpoint, *args, **kwargs)
        model = _sharded_in(self.model)
        if model is not None and checkpoint:
            _restore(model, os.path.join(checkpoint, STATE))

    cls.save_model, cls._save_optimizer_and_scheduler, cls._load_optimizer_and_scheduler = (saved_by_all, with_moments,
                                                                                            moments_too)


def _teach_trl(module: ModuleType) -> None:
    sync = getattr(getattr(module, "SyncRefModelCallback", None), "_sync_target_model", None)
    if sync is None:
        return

    @functools.wraps(sync)
    def gathered(model: nn.Module, target_model: nn.Module, alpha: float) -> None:
        source, target = _sharded_in(model), _sharded_in(target_model)
        with contextlib.ExitStack() as stack:
            if source is not None:
                stack.enter_context(state.gathered(source))
            if target is not None:
                stack.enter_context(state.gathered(target, write=True))
            sync(model, target_model, alpha)

    module.SyncRefModelCallback._sync_target_model = staticmethod(gathered)


@functools.lru_cache(maxsize=None)
def install() -> None:
    """Once; called by shard()."""
    after_import("trl.trainer.callbacks", _teach_trl)
    after_import("accelerate.accelerator", _teach_accelerate)
    after_import("transformers.trainer", _teach_trainer)
