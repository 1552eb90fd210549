"""Finds operators that read parameters whose unit is not acquired, and in checked passes those that write one.

A watched parameter has a subclass of its class, by which torch shows the calls that it is given to. Nothing is entered
or left between two calls, so no context of the program, as torch.inference_mode(), can come in between, and calls without
such a parameter cost nothing.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Set, Tuple, Type

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forebay._library import InvalidArgument
from forebay.torch.uncompiled import is_in_compiled_code, left_alone, uncompiled

if TYPE_CHECKING:
    from forebay.torch.sharded import Sharded, Unit

unwatched = torch._C.DisableTorchFunctionSubclass  # Within, calls are not shown: attributes of many parameters are read at once.

# They read values, and no operator does it for them.
_READS = ("numpy", "tolist", "__array__", "__dlpack__", "__reduce_ex__")
# They read no values of their arguments; some run code of the program, which is not to be checked as one call.
_NO_OPERATORS = ("__set__", "backward", "grad", "register_hook")


class _Mode(TorchDispatchMode):
    """Shows the operators of one call to the guards of the models of its arguments."""

    def __init__(self, owners: Set["Sharded"]) -> None:
        super().__init__()
        self.owners = owners

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper loads torch._dynamo; _checked() has its own.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (_is_view(func) or _reads_no_values(func) or _copies_to_itself(func, args)):
            written = _written(func, args, kwargs or {})
            for t in tree_leaves((args, kwargs)):
                if (isinstance(t, torch.Tensor) and type(t).__name__ != "Gradient" and t.layout == torch.strided
                        and not t.is_meta):
                    for owner in self.owners:
                        owner.guard.check(func, t, any(t is one for one in written))
        return func(*args, **(kwargs or {}))


@left_alone
def _watch(cls: Type[torch.Tensor], func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """__torch_function__() of watched tensors."""
    name = getattr(func, "__name__", "")
    with unwatched():
        if name == "__get__":
            result = func(*args)
            return _watch_views(result, {args[0]._forebay}) if type(result) is torch.Tensor else result
        if name in ("__repr__", "__format__") and (text := _text_of_released(args[0])):
            return text
        if name in _NO_OPERATORS:
            return func(*args, **(kwargs or {}))
        return _checked(func, name, args, kwargs or {})


def _text_of_released(t: torch.Tensor) -> str:
    """For print() and debuggers; empty for a tensor whose values are there."""
    name, units = t._forebay.guard.place(t) or ("", [])
    if not units or t._forebay.stage != 3 or any(unit.held for unit in units):
        return ""
    return (f"<{name}, shape {list(t.shape)}, {t.dtype}: its values lie in shards, and are here in passes of {units[0].name} and within "
            "forebay.gathered(model)>")


@uncompiled
def _checked(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    owners = {t._forebay for t in tree_leaves((args, kwargs)) if _is_watched(t)}
    if name in _READS:
        for owner in owners:
            owner.guard.check(name, args[0], False)
    if name in ("__reduce_ex__", "__deepcopy__") and type(args[0]) is _View:
        args = (args[0].view_as(args[0]), *args[1:])  # The copy, or the file, gets a tensor of torch's own class.
    with _Mode(owners):
        result = func(*args, **kwargs)
    return _watch_views(result, owners)


class _View(torch.Tensor):
    """A view of a watched parameter, as detach() and .data make it."""

    __torch_function__ = classmethod(_watch)


def _get_gradient(p: nn.Parameter) -> Any:
    with unwatched():
        return torch._C.TensorBase.grad.__get__(p)


def _set_gradient(p: nn.Parameter, gradient: Any) -> None:
    with unwatched():
        torch._C.TensorBase.grad.__set__(p, gradient)


# Optimizers, and functions that clip, ask all parameters in each step. This takes a quarter of the time of _watch().
_gradient = property(_get_gradient, _set_gradient, lambda p: _set_gradient(p, None))


@functools.lru_cache(maxsize=None)
def _watched(plain: Type[nn.Parameter]) -> Type[nn.Parameter]:
    """The class that a parameter of class `plain` has while it is watched."""
    facts = {"__torch_function__": classmethod(_watch), "__module__": plain.__module__, "__qualname__": plain.__qualname__,
             "grad": _gradient}
    return type(plain)(plain.__name__, (plain,), facts)


def _is_watched(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and getattr(type(t).__torch_function__, "__func__", None) is _watch


def _watch_views(result: Any, owners: Set["Sharded"]) -> Any:
    for t in result if isinstance(result, (tuple, list)) else (result,):
        if type(t) is torch.Tensor and any(owner.guard.place(t) is not None for owner in owners):
            t.__class__ = _View
            t._forebay = next(owner for owner in owners if owner.guard.place(t) is not None)
    return result


class Guard:
    """Decides which parameters are watched, and checks the operators that get one.

    At stage 3 a released parameter is watched, at all times. Passes are checked from the making of the optimizer to the end
    of the second step and in the first evaluation, or always: acquired parameters are watched in them too, because they may
    not be written, and released ones at every stage. Between passes only stage 3 and `always` are checked.
    """

    STEPS = 2  # Steps that are checked unless all are.

    def __init__(self, owner: "Sharded", always: bool) -> None:
        self.owner = weakref.ref(owner)
        self.always = always
        self.watches_released = always or owner.stage == 3 and owner.given.get("check") is not False
        self.steps = 0
        self.in_training = self.in_evaluation = False
        self.first_evaluation = True
        self.places: Dict[int, Tuple[str, List[Unit]]] = {}
        self.members: Dict[Unit, List[Tuple[nn.Parameter, type, type, List[Unit]]]] = {unit: [] for unit in owner.units}
        self.watched: Set[Unit] = set()
        # torch's transformer layers, and the encoder before it calls them, choose other kernels for a subclass.
        self.plain_in_passes = [unit for unit in owner.units if any(
            isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) for module in unit.plan.module.modules())]
        for p, places in owner.places.items():
            units = [owner.units[unit] for unit, _ in places]
            self.places[p.untyped_storage().data_ptr()] = (owner.names[p], units)
            if type(p).__torch_function__ is nn.Parameter.__torch_function__:  # Else its class watches it already.
                for unit in units:
                    self.members[unit].append((p, type(p), _watched(type(p)), units))
        self.follow_all()

    # --- when ---

    @property
    def checks(self) -> bool:
        """Whether this pass is checked."""
        return self.always or self.in_evaluation or self.in_training and self.steps < self.STEPS

    def is_needed(self) -> bool:
        """Whether some pass is still to be checked."""
        return self.always or self.first_evaluation or self.steps < self.STEPS

    def follow_pass(self) -> None:
        """A pass of the model begins or ends."""
        for unit in self.plain_in_passes:
            self.follow(unit)

    def begin_step(self) -> None:
        if not self.in_training:
            self.in_training = True
            self.follow_all()

    def end_step(self) -> None:
        self.steps += 1
        if self.steps == self.STEPS:
            self.follow_all()

    def begin_evaluation(self) -> None:
        if self.first_evaluation and not self.in_evaluation:
            self.in_evaluation = True
            self.follow_all()

    def end_evaluation(self) -> None:
        if self.in_evaluation:
            self.first_evaluation = self.in_evaluation = False
            self.follow_all()

    # --- which ---

    def follow_all(self) -> None:
        for unit in self.members:
            self.follow(unit)

    def follow(self, unit: "Unit") -> None:
        """Watches the parameters of a unit, or ends it, after it was acquired or released."""
        if self.wants(unit) == (unit in self.watched):
            return
        if unit in self.watched:
            self.watched.discard(unit)
            for p, plain, _, _ in self.members[unit]:
                p.__class__ = plain
            return
        self.watched.add(unit)
        for p, _, watched, units in self.members[unit]:
            if len(units) == 1 or self.watched.issuperset(units):
                p.__class__ = watched

    def wants(self, unit: "Unit") -> bool:
        owner = self.owner()
        if owner.writing or owner.collected is not None or owner.depth and unit in self.plain_in_passes:
            return False
        if not unit.held:
            return self.watches_released or self.checks
        # The compiler takes no graph of watched parameters.
        return (self.checks and (self.always or not owner.readers) and torch._C._current_graph_task_id() == -1
                and not ("torch._dynamo" in sys.modules and is_in_compiled_code()))

    # --- the check ---

    def place(self, t: torch.Tensor) -> Optional[Tuple[str, List["Unit"]]]:
        """Name and units of the parameter whose memory the tensor has."""
        try:
            return self.places.get(t.untyped_storage().data_ptr())
        except (NotImplementedError, RuntimeError):  # Tensors of vmap() and the like have none.
            return None

    def check(self, func: Any, t: torch.Tensor, is_written: bool) -> None:
        name, units = self.place(t) or ("", [])
        if not units:
            return
        if not any(unit.held for unit in units):
            if torch._C._current_graph_task_id() == -1:
                is_there = self.owner().stage != 3 and not self.owner().depth  # Between passes.
                if is_there and not self.always:
                    return  # step() finds a write that it would undo.
                if not (is_there and self.owner().readers):
                    self.make_resident(func, name, units[0])
            elif self.owner().stage == 3:  # As where a part of the unit is computed again.
                units[0].read_backward()
        if is_written:
            where = "gathered(model)" if self.owner().readers else "a pass"
            raise InvalidArgument(f"{func} writes {name} within {where}; weights of a sharded model change in optimizer.step() "
                                  "only, so write them within forebay.gathered(model, write=True), after the step")

    def make_resident(self, func: Any, name: str, unit: "Unit") -> None:
        if not self.owner().make_resident(unit):
            raise InvalidArgument(
                f"{func} reads {name} of unit {unit.name} outside of the forward and backward pass of its module; read "
                "it within forebay.gathered(model), or name the module that uses it in shard(units=[...]), or its owner in "
                "shard(resident=[...]). A program that reads or copies parameters before it trains does so before shard()")
        warnings.warn(f"{func} reads {name} outside of its module, so unit {unit.name} stays gathered for the "
                      f"whole pass of the model; shard(resident=[\"{unit.name}\"]) says the same")


def _written(func: Any, args: Any, kwargs: Any) -> Sequence[Any]:
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
