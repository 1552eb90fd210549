"""p.grad of a sharded model between its backward pass and the step."""

from __future__ import annotations

import math
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from forebay._library import Unsupported

if TYPE_CHECKING:
    from forebay.torch.sharded import Sharded


class Gradient(torch.Tensor):
    """A gradient that lies in shards. Shape and dtype are the parameter's; there is no memory.

    It answers norms and factors, so torch.nn.utils.clip_grad_norm_ and torch.amp.GradScaler work. The norm of all
    gradients is that of the first parameter's stand-in, and the others answer 0: the norm of the norms is right.
    """

    @staticmethod
    def __new__(cls, p: torch.nn.Parameter, owner: "weakref.ref[Sharded]") -> "Gradient":
        return torch.Tensor._make_wrapper_subclass(cls, p.shape, dtype=p.dtype, device=p.device)

    def __init__(self, p: torch.nn.Parameter, owner: "weakref.ref[Sharded]") -> None:
        self.owner, self.first = owner, False
        self.factor = 1.0  # The program scaled the gradient by this.
        self.is_zero = False  # The program cleared it by zero_().

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is not self:  # As behind p.grad.data /= 2.
            raise Unsupported("p.grad.data = tensor: gradients of a sharded model lie in shards of the ranks; change them by "
                              "Tensor.register_hook(), clear them by zero_(), or scale all of them by one number")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"forebay gradient of shape {tuple(self.shape)}"

    def norm_of(self, order: Any) -> torch.Tensor:
        if order != 2:
            raise Unsupported(f"the norm of order {order} of a sharded gradient; only order 2 is kept")
        if _is_clipping():
            self.owner().clipped.add(id(self))
        else:
            self.owner().warn_once("the norm of one gradient of a sharded model is not known: the first parameter answers "
                                 "the norm of all gradients, and the others answer 0; optimizer.grad_norm has it too")
        value = self.owner().gradient_norm() * self.factor if self.first else 0.0
        return torch.tensor(value, dtype=torch.float32, device=self.device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Unsupported("pickling or copying a gradient of a sharded model, which lies in shards of the ranks")

    def scale(self, factor: Any, divides: bool = False) -> "Gradient":
        if isinstance(factor, torch.Tensor) and factor.numel() != 1:
            raise Unsupported(f"a gradient of a sharded model was multiplied by a tensor of {factor.numel()} elements; gradients lie "
                              "in shards, so change them by Tensor.register_hook(), or scale all of them by one number")
        taken, count = len(self.owner().clipped), len(self.owner().stand_ins)
        if 0 < taken < count and _is_clipping():
            raise Unsupported(f"the norm of {taken} of {count} gradients of a sharded model; only the norm of all is known, so give "
                              "clip_grad_norm_() all trainable parameters")
        number = float(factor)
        self.factor *= number if not divides else 1.0 / number if number else math.inf
        return self

    def clear(self) -> "Gradient":
        self.is_zero = True
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "aten::linalg_vector_norm":
            if len(args) > 2 and args[2] is not None:
                raise Unsupported("the norm over a dimension of a sharded gradient; only that over all elements of all gradients is known")
            return args[0].norm_of(args[1] if len(args) > 1 else 2)
        if name == "aten::_foreach_norm":
            return [g.norm_of(args[1] if len(args) > 1 else 2) for g in args[0]]
        if name in ("aten::mul_", "aten::div_") and not kwargs:
            return args[0].scale(args[1], name == "aten::div_")
        if name in ("aten::_foreach_mul_", "aten::_foreach_div_"):
            factors = args[1] if isinstance(args[1], (list, tuple)) else [args[1]] * len(args[0])
            for gradient, factor in zip(args[0], factors):
                gradient.scale(factor, name == "aten::_foreach_div_")
            return None
        if name == "aten::_amp_foreach_non_finite_check_and_unscale_":  # GradScaler's.
            gradients, found_inf, inverse_scale = args
            if not math.isfinite(gradients[0].owner().gradient_norm()):
                found_inf.fill_(1.0)
            for gradient in gradients:
                gradient.scale(inverse_scale)
            return None
        if name == "aten::zero_":
            return args[0].clear()
        if name == "aten::_foreach_zero_":
            for gradient in args[0]:
                gradient.clear()
            return None
        if name in ("aten::detach", "aten::alias"):
            return args[0]
        raise Unsupported(f"{name} on a gradient: gradients of a sharded model lie in shards of the ranks, as sums. "
                          "Use torch.nn.utils.clip_grad_norm_() or optimizer.grad_norm")


def _is_clipping() -> bool:
    """A function that clips by the norm of all gradients asks, as torch.nn.utils.clip_grad_norm_() does."""
    frame = sys._getframe(1)
    while frame is not None:
        if "clip" in frame.f_code.co_name or "total_norm" in frame.f_code.co_name:
            return True
        frame = frame.f_back
    return False
