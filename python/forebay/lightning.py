"""forebay under PyTorch Lightning.

    trainer = lightning.Trainer(strategy=forebay.lightning.Strategy(stage=3, offload="optimizer"), ...)

`import forebay.lightning`, after `lightning` or `pytorch_lightning` where both are installed. Start the program with
torchrun, or let the Trainer start its ranks.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any, Dict, List, Optional

import torch

# Where both packages are there, the one that the program has imported: each refuses the strategies of the other.
_IS_OLD_NAME = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
try:
    if _IS_OLD_NAME:
        raise ImportError
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy

import forebay
from forebay._library import Unsupported
from forebay.torch.huggingface import moments_are_saved
from forebay.torch.state import restore_over_weights


class Strategy(DDPStrategy):
    """forebay.shard() over the ranks that the Trainer starts. Options: those of forebay.shard().

    configure_optimizers() gives one optimizer that forebay.wrap() takes. A checkpoint holds the weights as always; the
    moments lie beside it in PATH.forebay, a directory that any number of ranks restores. Move both together. A kill
    while a checkpoint is saved leaves the one before it. Errors: those of shard() and wrap().
    """

    _STATE = "forebay_state"  # In a checkpoint: the directory of its moments within PATH.forebay.

    def __init__(self, process_group_backend: Optional[str] = None, **options: Any) -> None:
        super().__init__(process_group_backend=process_group_backend)
        self.options = options
        self.restored_path = ""

    def _is_sharded(self) -> bool:
        return hasattr(self.lightning_module, "_forebay")

    def setup(self, trainer: "pl.Trainer") -> None:
        is_fit = trainer.state.fn == "fit"
        if not is_fit and not self._is_sharded():
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        if not self._is_sharded():
            self.precision_plugin.convert_module(self.model)
            self.model_to_device()
            forebay.shard(self.lightning_module, **self.options)
        if is_fit:
            self.setup_optimizers(trainer)
            if len(self.optimizers) != 1:
                raise Unsupported(f"configure_optimizers() gave {len(self.optimizers)} optimizers; forebay updates by one, "
                                  "so give its parameters as groups of one")
            self.optimizers = [forebay.wrap(self.optimizers[0])]
            if getattr(self.precision_plugin, "scaler", None) is None:
                # Lightning clips no gradients of an optimizer that could unscale them, with bf16 either.
                self.optimizers[0]._step_supports_amp_scaling = False
        self.setup_precision_plugin()

    # --- forward passes, through the module's own hooks ---

    def _through_forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        return self._forward_redirection(self.model, self.lightning_module, step, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._through_forward("training_step", *args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        scale = self.optimizers[0].loss_scale if self._is_sharded() else 1
        return super().backward(closure_loss * scale, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._through_forward("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._through_forward("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._through_forward("predict_step", *args, **kwargs)

    # --- checkpoints ---

    def optimizer_state(self, optimizer: Any) -> Dict[str, Any]:
        with moments_are_saved():
            return optimizer.state_dict()  # The groups, as schedulers have changed them.

    def save_checkpoint(self, checkpoint: Dict[str, Any], filepath: Any, storage_options: Optional[Any] = None) -> None:
        if "optimizer_states" not in checkpoint or not self._is_sharded():
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        # The moments of the checkpoint that is replaced stay until it is.
        name, directory = self.broadcast(os.urandom(8).hex()), f"{filepath}.forebay"
        forebay.save(self.lightning_module, os.path.join(directory, name))
        super().save_checkpoint({**checkpoint, self._STATE: name}, filepath, storage_options=storage_options)
        if self.is_global_zero:
            for other in os.listdir(directory):
                path = os.path.join(directory, other)
                if other != name and os.path.isdir(path):
                    shutil.rmtree(path, ignore_errors=True)
                elif other != name:
                    os.remove(path)  # From before the moments had directories of their own.

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Dict[str, Any]:
        found = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        path = next((path for path in (checkpoint_path, os.path.realpath(checkpoint_path))  # It may be a link.
                     if os.path.isdir(f"{path}.forebay")), checkpoint_path)
        self.restored_path = os.path.join(f"{path}.forebay", found.get(self._STATE, ""))
        return found

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"]):
            if saved:
                optimizer.load_state_dict(saved)
        restore_over_weights(self.lightning_module, self.restored_path)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero and os.path.isdir(f"{filepath}.forebay"):
            shutil.rmtree(f"{filepath}.forebay")

    def teardown(self) -> None:  # Without the model's move to the CPU.
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


__all__: List[str] = ["Strategy"]
