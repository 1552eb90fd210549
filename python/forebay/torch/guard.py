"""Finds operators that read parameters whose unit is not acquired."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from forebay._library import InvalidArgument

if TYPE_CHECKING:
    from forebay.torch.sharded import Sharded, Unit


class Guard(TorchDispatchMode):
    """Checks the arguments of every operator, in the first step or always. It costs some 10 us an operator."""

    def __init__(self, owner: "Sharded", always: bool) -> None:
        super().__init__()
        self.always, self.first, self.entered = always, True, False
        self.units: Dict[int, List["Unit"]] = {}
        self.names: Dict[int, str] = {}
        for p, places in owner.places.items():
            at = p.untyped_storage().data_ptr()
            self.units[at] = [owner.units[u] for u, _ in places]
            self.names[at] = owner.names[p]

    def begin_step(self) -> None:
        if (self.first or self.always) and not self.entered:
            self.entered = True
            self.__enter__()

    def end_step(self) -> None:
        self.first = False
        if not self.always:
            self.leave()

    def leave(self) -> None:
        """Ends the checks. A mode of the program that was entered later keeps this one in place, without checks."""
        self.first = self.always = False
        if self.entered and _get_current_dispatch_mode() is self:
            self.entered = False
            self.__exit__(None, None, None)

    @torch.compiler.disable
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (self.first or self.always) and not _is_view(func):
            for t in tree_leaves((args, kwargs)):
                if isinstance(t, torch.Tensor) and type(t).__name__ != "Gradient":
                    self.check(func, t)
        return func(*args, **(kwargs or {}))

    def check(self, func: Any, t: torch.Tensor) -> None:
        if t.layout != torch.strided or t.is_meta:
            return
        at = t.untyped_storage().data_ptr()
        units = self.units.get(at)
        if units is not None and not any(unit.held for unit in units):
            raise InvalidArgument(
                f"{func} reads {self.names[at]} of unit {units[0].name} outside of the forward and backward pass of "
                "its module; read it within forebay.gathered(model), or name the module that uses it in "
                "shard(units=[...]), or its owner in shard(resident=[...])")


def _is_view(func: Any) -> bool:
    """The operator only makes another view of its argument, so it reads no values."""
    infos = [r.alias_info for r in func._schema.returns]
    return bool(infos) and all(i is not None and not i.is_write for i in infos)
