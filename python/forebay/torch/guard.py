"""Finds operators that read parameters whose unit is not acquired."""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from forebay._library import InvalidArgument
from forebay.torch.uncompiled import is_in_compiled_code, uncompiled

if TYPE_CHECKING:
    from forebay.torch.sharded import Sharded


class _Mode(TorchDispatchMode):
    """Shows every operator of this thread to the guards that check. One for all of them: each mode costs every operator
    20 us, and torch calls one within the other."""

    def __init__(self) -> None:
        super().__init__()
        self.guards: Dict["Guard", None] = {}
        self.entered = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper loads torch._dynamo; __torch_dispatch__() has its own.

    def add(self, guard: "Guard") -> None:
        self.guards[guard] = None
        if not self.entered:
            self.entered = True
            self.__enter__()

    def remove(self, guard: "Guard") -> None:
        """The mode stays entered below one that was entered later, and then shows nothing."""
        self.guards.pop(guard, None)
        if not self.guards and self.entered and _get_current_dispatch_mode() is self:
            self.entered = False
            self.__exit__(None, None, None)

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.guards and not (_is_view(func) or _reads_no_values(func) or _copies_to_itself(func, args)):
            written = _written(func, args, kwargs or {})
            tensors = [t for t in tree_leaves((args, kwargs))
                       if isinstance(t, torch.Tensor) and type(t).__name__ != "Gradient"
                       and t.layout == torch.strided and not t.is_meta]
            for guard in list(self.guards):
                owner = guard.owner()
                if owner is None:  # The model is gone.
                    self.guards.pop(guard, None)
                    continue
                for t in tensors:
                    guard.check(owner, func, t, any(t is one for one in written))
        return func(*args, **(kwargs or {}))


class _Modes(threading.local):
    def __init__(self) -> None:
        self.mode = _Mode()


_modes = _Modes()


class Guard:
    """Checks the arguments of every operator: from the making of the optimizer to the end of the second step, in the
    first evaluation, at stage 3 between a step and the next pass, or always. It costs some 10 us an operator."""

    STEPS = 2  # Reads between the first step and the second are found, as those of averages of weights.

    def __init__(self, owner: "Sharded", always: bool) -> None:
        self.owner = weakref.ref(owner, lambda _: self.forget())  # A guard that checks keeps no model alive.
        self.checks_between = owner.stage == 3 and owner.given.get("check") is not False
        self.always, self.first, self.first_evaluation = always, True, True
        self.steps = 0
        self.in_evaluation = self.between = self.compiles = False
        self.mode: Optional[_Mode] = None  # While it checks.
        self.places: Dict[int, Tuple[str, List[int]]] = {}
        for p, places in owner.places.items():
            self.places[p.untyped_storage().data_ptr()] = (owner.names[p], [unit for unit, _ in places])

    def is_needed(self) -> bool:
        """Whether some pass is still to be checked."""
        return self.always or self.first or self.first_evaluation

    def begin_step(self) -> None:
        if self.first or self.always:
            self.enter()

    def end_step(self) -> None:
        self.steps += 1
        self.first = self.steps < self.STEPS
        if self.first or self.always:
            return
        # A read would find values of other units: callbacks that average weights come here, some after many steps.
        self.between = self.checks_between and not self.compiles
        if self.between:
            self.enter()
        else:
            self.leave()  # Not within a forward pass, which may be compiled.

    def begin_pass(self) -> None:
        if not self.between:
            return
        self.between = False
        self.compiles = is_in_compiled_code()
        if self.compiles:
            self.mode.guards.pop(self, None)  # The mode itself ends after the step.
        else:
            self.leave()

    def begin_evaluation(self) -> None:
        if (self.first_evaluation or self.always) and self.mode is None:
            self.in_evaluation = True
            self.enter()

    def end_evaluation(self) -> None:
        if self.in_evaluation:
            self.first_evaluation = self.in_evaluation = False
            if not self.always:
                self.leave()

    def enter(self) -> None:
        if self.mode is None:
            self.mode = _modes.mode
            self.mode.add(self)

    def leave(self) -> None:
        """Ends the checks."""
        mode, self.mode = self.mode, None
        if mode is not None:
            mode.remove(self)

    def forget(self) -> None:
        """The model is gone."""
        if not is_in_compiled_code():
            self.leave()

    def check(self, owner: "Sharded", func: Any, t: torch.Tensor, is_written: bool) -> None:
        name, indices = self.places.get(t.untyped_storage().data_ptr(), ("", []))
        units = [owner.units[i] for i in indices]
        if not units:
            return
        if not any(unit.held for unit in units):
            self.make_resident(owner, func, name, units[0])
        if is_written:
            raise InvalidArgument(f"{func} writes {name} within a pass; weights of a sharded model change in optimizer.step() "
                                  "only, so write them within forebay.gathered(model, write=True), after the step")

    @staticmethod
    def make_resident(owner: "Sharded", func: Any, name: str, unit: Any) -> None:
        if not owner.make_resident(unit):
            raise InvalidArgument(
                f"{func} reads {name} of unit {unit.name} outside of the forward and backward pass of its module; read "
                "it within forebay.gathered(model), or name the module that uses it in shard(units=[...]), or its owner in "
                "shard(resident=[...]). A program that reads or copies parameters before it trains does so before shard()")
        warnings.warn(f"{func} reads {name} outside of its module, so unit {unit.name} stays gathered for the "
                      f"whole pass of the model; shard(resident=[\"{unit.name}\"]) says the same")


def _written(func: Any, args: Any, kwargs: Any) -> List[Any]:
    """The arguments that the operator writes."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


def _is_view(func: Any) -> bool:
    """The operator only makes another view of its argument, so it reads no values."""
    infos = [r.alias_info for r in func._schema.returns]
    return bool(infos) and all(i is not None and not i.is_write for i in infos)


def _reads_no_values(func: Any) -> bool:
    """zeros_like(), new_empty() and their kin ask for the shape only."""
    name = func._schema.name[len("aten::"):]
    return name.endswith("_like") or name.startswith("new_")


def _copies_to_itself(func: Any, args: Any) -> bool:
    """load_state_dict() does, when the value has gone to the engine already."""
    return func is torch.ops.aten.copy_.default and args[0] is args[1]
