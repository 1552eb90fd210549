"""A sharded module: hooks that acquire and release units, and hand gradients over to the engine.

Parameters keep their object, shape, dtype and address. The bytes behind an address are valid while a unit that
has the parameter is acquired: in its forward pass, in its backward pass, and within forebay.gathered().
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import itertools
import math
import os
import sys
import threading
import warnings
import weakref
import zlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

import torch
from torch import nn

from forebay import _library, core
from forebay._library import InvalidArgument, Unsupported
from forebay.torch import deepspeed, describe, guard, memory, stand_in
from forebay.torch.activations import Hooks, Kept, keep, kept, program_hooks
from forebay.torch.uncompiled import calls_on_stack, is_in_state_dict, uncompiled


_library.ADVICE["every rank must issue the same operations in the same order"] = (
    "At stage 3 every forward pass gathers, so all ranks run the same number of them: give generate() synced_gpus=True "
    "(after torch.distributed.init_process_group()), call state_dict() and evaluations on all ranks, and let no rank alone go on "
    "after an exception in a forward pass")


_REPLACED = ("parameter {} was replaced or removed after shard(), as torch.func.functional_call() does, and the engine would go on with "
             "the old one; do that before shard(), and write values within forebay.gathered(model, write=True)")
_ADDRESS, _IS_DENSE, _VERSION = torch.Tensor.data_ptr, torch.Tensor.is_contiguous, torch.Tensor._version.__get__
_ANY_TASK = -2


class _InputsDone(torch.autograd.Function):
    """The identity over a unit's inputs. Its backward pass runs when the gradients of all of them are there."""

    @staticmethod
    def forward(ctx: Any, call: "_Call", *inputs: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Optional[torch.Tensor]) -> Any:
        ctx.call.inputs_done = True
        ctx.call.unit.settle(inputs_done=True)
        return (None, *gradients)


class _Weights(NamedTuple):
    """Weights that an operator saved."""

    packed: Any
    units: List["Unit"]


class _Call:
    """One forward pass through a unit, and its backward pass.

    Most often the backward pass begins with the gradient of an output. But the program may change an output that is a view, or
    take tensors out of the module otherwise, so operators that read weights which they saved acquire their unit too.
    """

    def __init__(self, unit: "Unit", again: bool = False) -> None:
        self.unit = unit
        self.again = again  # Activation checkpointing computes it again.
        self.has_inputs = False  # Some input wants a gradient.
        self.outputs = 0
        self.program: Optional[Tuple[Callable[..., Any], Callable[..., Any]]] = None  # Its hooks of saved tensors.
        self.hooks: Optional[Hooks] = None
        self.exchanged: List[Tuple[Any, Any, Any, Any]] = []  # In lists and dicts of the program: where, the old one, the new one.
        self.start(-1)

    def start(self, task: int) -> None:
        self.task, self.outputs_left, self.inputs_done = task, self.outputs, not self.has_inputs

    def output_gradient(self, _: torch.Tensor) -> None:
        self.unit.owner.refuse_double_backward()
        task = self.unit.owner.enter_backward()
        if self.task != task:
            self.start(task)
            self.unit.calls.add(self)
            self.unit.acquire_backward(task)
        self.outputs_left -= 1

    # --- weights that operators save ---

    def watch(self) -> None:
        """From now on to unwatch(). Not at stages where weights stay."""
        if self.unit.owner.stage != 3 or not torch.is_grad_enabled():
            return
        # Without program_hooks() no reads are seen in backward passes.
        if program_hooks is None or not torch._C._autograd._saved_tensors_hooks_is_enabled():
            self.unit.is_unwatched = True
            return
        self.hooks = Hooks(self.pack, self.unpack)
        outer = getattr(self.hooks.replaced[0], "func", None) if self.hooks.replaced else None
        outer = getattr(outer, "__self__", None)
        self.program = outer.program if isinstance(outer, _Call) else self.hooks.replaced

    def unwatch(self) -> None:
        if self.hooks is not None:
            self.hooks.leave()
        self.hooks = None

    def end_forward(self) -> None:
        """The program gets back what it had in its lists and dicts."""
        self.unwatch()
        for container, key, old, new in self.exchanged:
            there = container[key:key + 1] if isinstance(container, list) else [container.get(key)]
            if there and there[0] is new:
                container[key] = old
        self.exchanged.clear()

    def pack(self, t: torch.Tensor) -> Any:
        units = self.unit.owner.units_at(t)
        packed = self.program[0](t) if self.program else keep(t)
        return _Weights(packed, units) if units else packed

    def unpack(self, packed: Any) -> torch.Tensor:
        units = [] if self.unit.plan.is_table else [self.unit]  # A checkpoint within it may follow, which reads its weights again.
        if isinstance(packed, _Weights):
            packed, units = packed
        if units and _task() != -1:  # Else the program looks at the graph.
            self.need(units)
        if self.program:
            return self.program[1](packed)
        return kept(packed) if isinstance(packed, Kept) else packed

    @staticmethod
    def need(units: List["Unit"]) -> None:
        """An operator of a backward pass is about to read weights that these units have."""
        if not any(unit.has_values for unit in units):
            units[0].owner.refuse_double_backward()
            units[0].read_backward()


class _Backward:
    """A backward pass. autograd has the only strong reference, so an exception that ends the pass ends this object too."""

    def __init__(self, owner: "Sharded", task: int) -> None:
        self.owner, self.task, self.thread = owner, task, threading.get_ident()

    def __call__(self) -> None:  # By autograd, after the pass.
        self.owner.leave_backward(self.task)


class Unit:
    """Parameters that are gathered together, and the module that uses them."""

    def __init__(self, owner: "Sharded", index: int, plan: describe.UnitPlan) -> None:
        self.owner, self.index, self.plan, self.name = owner, index, plan, plan.name
        self.frozen: List[bool] = []  # Whether each of its own parameters has no gradient.
        self.trainable = 0  # The number of its own parameters that have gradients.
        self._held = 0
        self.calls: Set[_Call] = set()  # In their backward pass.
        self.in_backward = False
        self.forwards = 0  # Forward passes of this micro-step without a backward pass.
        self.backwards = 0  # Acquisitions of the last backward pass.
        self.task, self.pending = -1, 0
        self.is_read = False  # This backward pass has an acquisition besides its own, only to read weights.
        self.given: Set[nn.Parameter] = set()  # Their gradients came in the latest acquisition for a backward pass.
        self.frames: List[_Call] = []
        self.is_unwatched = False  # Operators of some forward pass saved its weights unseen.

    @property
    def held(self) -> int:
        """Acquisitions that are alive."""
        return self._held

    @held.setter
    def held(self, count: int) -> None:
        self._held = count
        if self.owner.guard is not None:
            self.owner.guard.follow(self)

    @property
    def has_values(self) -> bool:
        """Its weights are valid. The backward pass of an embedding reads none, so it gathers none."""
        return self._held > (self.in_backward and self.plan.is_table)

    @property
    def is_read_by_others(self) -> bool:
        """An embedding whose own backward pass reads no weights, and somebody else's does."""
        return self.plan.is_table and self in self.owner.residents

    # --- the module's forward pass ---

    @uncompiled
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = _Call(self, again=_task() != -1)
        if self.owner.needs_values:
            self.owner.check_values()
        if call.again:  # A backward pass follows.
            self.frames.append(call)
            self.compute_again(self.owner.enter_backward())
        else:
            self.owner.refuse_autocast()
            self.owner.acquire_forward(self)
            self.frames.append(call)
        changed = self.follow_inputs(call, args, kwargs) if torch.is_grad_enabled() else None
        call.watch()
        return changed

    def follow_inputs(self, call: _Call, args: Any, kwargs: Any) -> Any:
        """The arguments, with those that want a gradient behind _InputsDone. None: none does."""
        # A tensor that is given twice stays one: modules compare their inputs by `is`.
        wanting: Dict[int, torch.Tensor] = {}

        def find(t: torch.Tensor) -> torch.Tensor:
            if t.requires_grad:
                wanting[id(t)] = t
            return t

        given = (args, *kwargs.values())
        _exchange(given, find, [])
        if not wanting:
            return None
        call.has_inputs = True
        try:
            made = dict(zip(wanting, _InputsDone.apply(call, *wanting.values())))
        except RuntimeError as error:
            if "functorch" not in str(error):
                raise
            raise Unsupported("torch.func.grad(), vjp(), jacrev() and hessian() of a sharded model; use torch.autograd.grad() or "
                              "torch.autograd.functional.jacobian() on its inputs, or torch.func.jacfwd()") from error
        args, *values = _exchange(given, lambda t: made.get(id(t), t), call.exchanged)
        return args, dict(zip(kwargs, values))

    @uncompiled
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.frames or self.owner.is_elsewhere():  # before_forward() failed.
            return
        call = self.frames.pop()
        call.end_forward()
        if call.again:
            return
        self.owner.release(self)
        if torch.is_grad_enabled():
            outputs = {t for t in _tensors(output) if t.requires_grad}
            call.outputs = len(outputs)
            for t in outputs:
                t.register_hook(call.output_gradient)

    def drop_frames(self, again: bool = False) -> None:
        """After an exception for which torch calls no hook. `again`: those of activation checkpointing only."""
        for call in self.frames:
            if call.again or not again:
                call.end_forward()
        self.frames = [call for call in self.frames if again and not call.again]

    # --- its backward pass ---

    def compute_again(self, task: int) -> None:
        if not self.in_backward:
            self.acquire_backward(task)
            # With use_reentrant=True the gradients come in a pass within this one. Frozen weights are read after the last of them, until
            # the inputs have theirs.
            self.task, self.pending = _ANY_TASK, self.trainable + any(self.frozen)
        self.read_backward()

    def read_backward(self) -> None:
        """Its weights are valid from now on to the end of the whole backward pass."""
        if not self.has_values:
            self.owner.enter_backward()
            self.acquire_values()

    def acquire_values(self) -> None:
        if not self.is_read:
            self.owner.acquire(self, backward=False)
            self.is_read = True

    def acquire_backward(self, task: int) -> None:
        if self.task != task:
            self.task, self.pending = task, self.trainable
        elif self.given and self.pending <= 0 and not self.in_backward:
            # All its gradients came before that of an output, which does not depend on them.
            if self.owner.stage == 3:
                self.read_backward()
            return
        if self.in_backward:
            return
        if self.forwards == 0:  # The forward pass belonged to no step.
            self.owner.acquire_forward(self, counted=True)
            self.owner.release(self)
        self.forwards -= 1
        self.backwards += 1
        try:
            self.owner.acquire(self, backward=True)
        except InvalidArgument as error:
            if "was complete" not in str(error):
                raise
            raise InvalidArgument(f"{self.name} has more backward than forward passes since the last backward(); call backward() once "
                                  "on the sum of these losses, or optimizer.zero_grad() and the model again; a module that runs "
                                  "twice or shares weights needs checkpointing with use_reentrant=False, a penalty on weights is "
                                  "computed after the forward pass, requires_grad must not change between these forward passes, and "
                                  "with autograd.grad(create_graph=True) one pass takes all inputs, as "
                                  "model(torch.cat([real, fake]))") from error
        self.in_backward = True
        self.given.clear()

    def settle(self, inputs_done: bool = False) -> None:
        """Ends the calls of which all gradients have been handed over, and the acquisition after the last.

        A recomputation under reentrant checkpointing has no call here: its inputs end it.
        """
        done = {c for c in self.calls
                if c.inputs_done and (self.pending == 0 or (c.has_inputs and c.outputs_left <= 0))}
        self.calls -= done
        if not self.calls and (done or inputs_done or self.pending == 0):
            self.end_backward()

    def end_backward(self) -> None:
        self.calls.clear()
        if self.in_backward:
            self.in_backward = False
            self.owner.release(self)

    def end_reads(self) -> None:
        """After the whole backward pass: operators may have saved weights unseen, as those of a checkpoint within the unit."""
        if self.is_read:
            self.is_read = False
            self.owner.release(self)


def _exchange(value: Any, change: Callable[[torch.Tensor], torch.Tensor], noted: List[Tuple[Any, Any, Any, Any]]) -> Any:
    """`value` with other tensors. Lists and dicts are the program's, so they stay, and what is exchanged in them is noted."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        made = [_exchange(one, change, noted) for one in value]
        if all(new is old for new, old in zip(made, value)):
            return value
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, (list, dict)):
        for key, old in list(enumerate(value) if isinstance(value, list) else value.items()):
            new = _exchange(old, change, noted)
            if new is not old:
                value[key] = new
                noted.append((value, key, old, new))
    return value


def _task() -> int:
    """The number of the backward pass that this thread is in; -1: none."""
    return torch._C._current_graph_task_id()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name, None))


class SavingOutcome:
    """How a save in the background ended."""

    error: Optional[_library.Error] = None


class Sharded:
    """The engine of one model and the state of its pass. model._forebay is this object.

    The engine is committed when the optimizer is made, because it needs the parameter groups; without one, at the
    first use.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = model
        options, meaning = describe.with_config(model, options, _launched()[1])
        self.clip = meaning.clip if meaning else 0.0
        self.offloads_activations = bool(meaning and meaning.offload_activations)
        self.optimizer_defaults = meaning.optimizer if meaning else {}
        self.given = options
        self.dtype = describe.model_dtype(model, options.get("dtype"))
        self.options = describe.planned_options(model, options)
        with core.Options(**self.options) as parsed:  # So that mistakes are named now.
            for name in ("deadline", "join-deadline"):
                if 0 < int(parsed.get(name)) < 1000:
                    warnings.warn(f"{name.replace('-', '_')} is {parsed.get(name)} milliseconds, less than ranks take to meet; for seconds "
                                  "give a thousand times as much", stacklevel=4)
        self.stage = int(self.options.get("stage") or 0)
        self.plans = describe.find_units(model, options.get("units"), options.get("resident") or ())
        self.parameters: List[nn.Parameter] = [p for plan in self.plans for p in plan.own]
        self.names = {p: name for name, p in model.named_parameters()}
        devices = {p.device for p in self.parameters if not p.is_meta}
        if len(devices) > 1:
            raise InvalidArgument(f"parameters are on {', '.join(map(str, devices))}; move the model to one device "
                                  "before shard()")
        describe.refuse_overlap(self.parameters, self.names)
        self.device = describe.device_of(options.get("device") or next(iter(devices), "cpu"))
        self.engine: Optional[core.Engine] = None
        # A call into the engine that has not been noted here: of a unit, or True. See catch_up().
        self.calling: Union[Unit, bool, None] = None
        self.readers = 0  # Blocks of gathered() and the like that are open.
        # Modules in whose state_dict() a thread is, with what holds their values.
        self.collecting: List[Tuple[nn.Module, int, contextlib.ExitStack]] = []
        self.units: List[Unit] = [Unit(self, i, plan) for i, plan in enumerate(self.plans)]
        self.places: Dict[nn.Parameter, List[Tuple[int, int]]] = {}
        self.homes: Dict[nn.Parameter, torch.Tensor] = {}  # The engine's memory, where each parameter lies.
        self.addresses: List[int] = []  # Of `parameters`.
        self.versions: Dict[nn.Parameter, int] = {}  # As torch counts writes, after forebay's own.
        self.scale_is_known = False  # The program has asked for optimizer.loss_scale.
        self.update_runs = False  # Or may do so.
        self.memory = (0, 0)
        self.views: Dict[Tuple[nn.Parameter, int], torch.Tensor] = {}
        self.tasks: Set[int] = set()  # Backward passes that this thread is in.
        self.evaluating = self.in_step = self.backward_over = False
        self.interrupted = False  # An exception ended a backward pass of this micro-step.
        self.stepped = self.adds_to_last = False  # Without zero_grad() since the last step.
        self.micro_step = 0
        self.has_gradients = False
        self.norm: Optional[float] = None
        self.norm_taken = False  # By the engine, which takes no more micro-steps then.
        self.saving: Optional[SavingOutcome] = None  # A save in the background that nobody has waited for.
        self.said: Set[str] = set()  # Warnings.
        # The last copies that state_dict() gave since the last pass, with name and version.
        self.copies: Dict[nn.Parameter, Tuple[str, "weakref.ref[torch.Tensor]", int]] = {}
        self.optimizer: Any = None  # The one whose moments the engine has; None before a step, and after restore().
        self.switched: List[str] = []  # The parameters of which requires_grad was followed before this step.
        self.stand_ins: Dict[nn.Parameter, stand_in.Gradient] = {}
        self.clipped: Set[int] = set()  # A function that clips has asked for their norms.
        self.needs_values = any(t.is_meta for t in itertools.chain(model.parameters(), model.buffers()))
        self.without_values: Set[nn.Parameter] = set()  # From the meta device.
        self.collected: Optional[Dict[nn.Parameter, torch.Tensor]] = None  # Values for state_dict() on this rank alone.
        self.collected_within = False  # All ranks are in state.collected().
        self.pass_has_gradients = True  # Whether the model's latest forward pass began with gradients enabled.
        self.writing = False  # Within gathered(write=True).
        self.loaded: Set[nn.Parameter] = set()  # load_state_dict() or load() gave them their values within that.
        self.guard: Optional[guard.Guard] = None
        self.families = self._families()
        for p in self.parameters:
            self.mark(p)
        self.owners = [(m._parameters, name, p, p.shape) for m in model.modules() for name, p in m._parameters.items()
                       if p is not None and describe.is_held(p)]
        for unit in self.units:
            module = unit.plan.module
            module.register_forward_pre_hook(unit.before_forward, with_kwargs=True, prepend=True)
            module.register_forward_hook(unit.after_forward, always_call=True)
        self.residents: List[Unit] = []  # Read outside of their modules, so they are gathered for the whole pass.
        self.paused: List[Unit] = []  # Given back by pause(), once for each time that they were held.
        self.depth = 0  # Calls of the model that are running.
        self.passing: Dict[str, int] = {}  # "thread": the number of theirs. setdefault() is one operation for all threads.
        self.differentiating: Dict[str, weakref.ref[_Backward]] = {}  # "pass": the outermost backward pass.
        model.register_forward_pre_hook(self.before_model, with_kwargs=True, prepend=True)
        model.register_forward_hook(self.after_model, always_call=True)
        if meaning is not None:
            deepspeed.say(meaning.without_effect)

    def mark(self, p: nn.Parameter) -> None:
        p._forebay = self
        p.__reduce_ex__ = functools.partial(_reduce, p)

    def refuse_replaced(self) -> None:
        """Errors: InvalidArgument for a parameter that its module no longer has."""
        with guard.unwatched():
            changed = next(((p, shape) for _, _, p, shape in self.owners if p.shape != shape), None)
        if changed is not None:
            raise InvalidArgument(f"parameter {self.names[changed[0]]} has shape {list(changed[0].shape)}, and had {list(changed[1])} at "
                                  "shard(); change it, as by resize_token_embeddings(), before shard()")
        for parameters, name, p, _ in self.owners:
            if parameters.get(name) is not p:
                raise InvalidArgument(_REPLACED.format(self.names[p]))
        self.refuse_moved(self.parameters)

    def refuse_moved(self, parameters: Sequence[nn.Parameter], adopts: bool = False) -> None:
        """Errors: InvalidArgument for a parameter that lies in other memory than the engine's, as after p.data = tensor.

        `adopts`: the caller takes the values from there, so only objects that were exchanged are refused.
        """
        if self.writing or self.engine is None:
            return
        with guard.unwatched():
            if parameters is self.parameters and list(map(_ADDRESS, parameters)) == self.addresses and all(map(_IS_DENSE, parameters)):
                return
            moved = [p for p in parameters if p.data_ptr() != self.homes[p].data_ptr() or not p.is_contiguous()]
        for p in moved:
            if getattr(p, "_forebay", None) is not self:  # As after torch.utils.swap_tensors().
                raise InvalidArgument(_REPLACED.format(self.names[p]))
            if not adopts:
                raise InvalidArgument(f"parameter {self.names[p]} was given another tensor, as by p.data = ... or vector_to_parameters(), "
                                      "and the engine would not train it; write values by p.data.copy_() or by assignment within "
                                      "forebay.gathered(model, write=True). Such a block takes over the tensors assigned before, too")

    def refuse_written(self) -> None:
        """Errors: InvalidArgument for a weight that the program wrote in place, where that is lost."""
        has_masters = (self.options.get("offload") not in (None, "none")
                       or self.dtype != torch.float32 and self.options.get("master_weights") is not False)
        if self.stage != 3 and not has_masters:
            return
        with guard.unwatched():
            written = next((p for p in {**self.versions, **self.stand_ins} if self.versions.setdefault(p, _VERSION(p)) != _VERSION(p)), None)
        if written is None:
            return
        if self.stage == 3:
            raise InvalidArgument(f"{self.names[written]} was written in place, and that is lost, since at stage 3 the engine keeps the weights "
                                  "elsewhere between their uses; write within forebay.gathered(model, write=True), after the step")
        raise InvalidArgument(f"{self.names[written]} was written in place, and steps and saved states would lose that, since they are "
                              "of fp32 or offloaded master weights; write within forebay.gathered(model, write=True). An empty block of "
                              "that takes over what was written, and leaves the masters of other elements")

    def _families(self) -> List[Tuple[nn.Module, List[Optional[nn.Module]], int]]:
        """Each module, its children, and the number of its own parameters."""
        return [(m, list(m._modules.values()), len(m._parameters)) for m in self.model.modules()]

    def refuse_changed(self, trained: Optional[nn.Module] = None) -> None:
        """Errors: InvalidArgument for parameters that left the model after shard(), and on several ranks for trainable ones
        that joined it.

        `trained`: an optimizer is made for all parameters of this module, which is the model or wraps it; then none may have
        joined on one rank either.
        """
        if trained is None and all(list(m._modules.values()) == children and len(m._parameters) == count
                                   for m, children, count in self.families):
            return
        there = dict((self.model if trained is None else trained).named_parameters())
        present = set(map(id, there.values()))
        gone = next((name for p, name in self.names.items() if id(p) not in present), None)
        if gone is not None:
            raise InvalidArgument(f"the module of parameter {gone} was replaced or removed after shard(), and the engine would go on "
                                  "with the old one; do that before shard()")
        joined = next((name for name, p in there.items()
                       if p.requires_grad and describe.is_held(p) and getattr(p, "_forebay", None) is not self), None)
        if joined is not None:
            if trained is not None:
                raise InvalidArgument(f"parameter {joined} joined the model after shard(), so the engine cannot train it; add it, as by "
                                      "peft.get_peft_model(), before shard(), or name the parameters that the optimizer trains")
            if self.engine is not None and self.engine.communicator is not None and self.engine.communicator.size > 1:
                raise InvalidArgument(f"parameter {joined} joined the model after shard(), so its gradients would differ between "
                                      "ranks; add it, as by peft.get_peft_model(), before shard()")
            self.warn_once(f"parameter {joined} joined the model after shard(); it is not sharded, an optimizer of forebay "
                           "does not train it, and forebay.save() leaves it out; add it before shard()")
        self.families = self._families()

    # --- the engine ---

    def make_engine(self) -> core.Engine:
        name = "host" if self.device.type == "cpu" else f"cuda:{self.device.index or 0}"
        options = {**self.options, "optimizer": self.rule}
        device = core.Device(name, **options)
        communicator = _communicator(device, self.given.get("store"), options)
        return core.Engine(device, communicator, **describe.engine_options(options))

    def commit(self, groups: Optional[Sequence[Dict[str, Any]]] = None, rule: Optional[str] = None) -> None:
        """Makes the engine, moves all values there and binds the parameters to its memory. Collective.

        `rule`: that of the optimizer; None: the option `optimizer`.
        Errors: OutOfMemory; InvalidArgument naming a parameter that differs between ranks.
        """
        if self.engine is None:
            with torch.inference_mode(False), torch.no_grad():
                self._commit(groups, rule or self.options.get("optimizer", "adamw"))
        self.catch_up()

    def _commit(self, groups: Optional[Sequence[Dict[str, Any]]], rule: str) -> None:
        self.groups = {p: i for i, group in enumerate(groups or ()) for p in group["params"]}
        self.elementwise = {p for group in groups or () if not group.get("use_muon", True) for p in group["params"]}
        self.rule = rule
        engine = self.make_engine()
        self.places = describe.describe(engine, self.plans, self.names, self.groups, self.elementwise)
        self._compare_values(engine.communicator)
        engine.commit()
        self.engine = engine
        me = weakref.ref(self)  # The garbage collector does not see through torch's tensors to their hooks and gradients.
        for p in self.parameters:
            unit, index = self.places[p][0]
            if p.is_meta:
                self.without_values.add(p)
            else:
                self.set_value(p, p.detach())
            self.homes[p] = self.view(engine.address(unit, index), p.shape)
            self._bind(p, self.homes[p])
            if p.requires_grad:
                p.register_hook(lambda _: me().before_gradient())
                p.register_post_accumulate_grad_hook(lambda p: me().take_gradient(p))
        self.addresses = [p.data_ptr() for p in self.parameters]
        self.memory = min(self.addresses), max(p.data_ptr() + p.nbytes for p in self.parameters)  # They lie within.
        self.updated = {p for p in self.parameters if p.requires_grad}
        self._note_frozen()
        self.versions = {p: p._version for p in (self.parameters if self.stage == 3 else self.stand_ins)}
        self.guard = guard.Guard(self, always=bool(self.given.get("check")))
        memory.watch(self)
        if self.device.type == "cpu":
            memory.trim_heap()  # The values were on the heap.

    def _note_frozen(self) -> None:
        """Takes over requires_grad: the parameters that have gradients."""
        self.frozen = [not p.requires_grad for p in self.parameters]
        self.stand_ins = {p: self.stand_ins[p] if p in self.stand_ins else stand_in.Gradient(p, weakref.ref(self))
                          for p in self.parameters if p.requires_grad}
        for i, gradient in enumerate(self.stand_ins.values()):
            gradient.first = i == 0
        for unit in self.units:
            unit.frozen = [not p.requires_grad for p in unit.plan.own]
            unit.trainable = unit.frozen.count(False)

    def _bind(self, p: nn.Parameter, view: torch.Tensor) -> None:
        if p.is_meta:
            torch.utils.swap_tensors(p, nn.Parameter(view, p.requires_grad))
            self.mark(p)
        else:
            p.data = view

    def _compare_values(self, communicator: Optional[core.Communicator]) -> None:
        if communicator is None or communicator.size == 1:
            return
        mine = b"".join(checksum(p).to_bytes(4, "little") for p in self.parameters)
        for rank, theirs in enumerate(communicator.exchange(mine)):
            for i, p in enumerate(self.parameters):
                if theirs[4 * i:4 * i + 4] != mine[4 * i:4 * i + 4]:
                    raise InvalidArgument(
                        f"parameter {self.names[p]} has other values on rank {rank} than on rank "
                        f"{communicator.rank}; call torch.manual_seed() with one number on all ranks before the "
                        "model is made, or load the same file")

    def view(self, address: int, shape: torch.Size) -> torch.Tensor:
        """A tensor over memory of the engine, which lives as long as it. Shape: `shape`, of the engine's dtype."""
        count = shape.numel()
        if self.device.type == "cpu":
            memory = (ctypes.c_char * (count * self.dtype.itemsize)).from_address(address)
            memory.engine = self.engine
            return torch.frombuffer(memory, dtype=self.dtype, count=count).view(shape)
        words = {4: "<i4", 2: "<i2"}[self.dtype.itemsize]  # There is no word for bfloat16.
        array = type("Array", (), {"__cuda_array_interface__": {
            "shape": (count,), "typestr": words, "data": (address, False), "version": 3}})()
        array.engine = self.engine
        return torch.as_tensor(array, device=self.device).view(self.dtype).view(shape)

    def units_at(self, t: torch.Tensor) -> List[Unit]:
        """The units of the parameter in whose memory a tensor lies; none for others."""
        try:
            if not self.memory[0] <= t.data_ptr() < self.memory[1]:
                return []
        except RuntimeError:  # It has no memory of its own.
            return []
        return (self.guard.place(t) or ("", []))[1]

    def stream(self) -> Optional[int]:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None

    def set_value(self, p: nn.Parameter, value: torch.Tensor, changed: bool = False) -> None:
        """Gives a parameter a value, the same on all ranks. Shape: as the parameter's. `changed`: as for core.Engine.set()."""
        source = getattr(value, "_forebay", None)  # The value may be a parameter of some sharded model, or a view of one.
        units = source.units_at(value) if source is not None and source.guard is not None else []
        if units and source.stage == 3 and not any(unit.held for unit in units):
            with source.reading(units[:1]):
                value = value.detach().clone()
            source.end_evaluation()
        if value.dtype not in describe.DTYPES:
            value = value.float()
        value = value.detach().cpu().contiguous()
        self.engine.set(*self.places[p][0], describe.DTYPES[value.dtype], value.data_ptr(), value.numel(), changed=changed)
        self.note_changed([p])
        self.without_values.discard(p)

    def check_values(self) -> None:
        """Errors: InvalidArgument for parameters and buffers from the meta device that nothing has set yet."""
        self.commit()
        names = sorted(self.names[p] for p in self.without_values)
        if names:
            raise InvalidArgument(
                f"{len(names)} parameters were on the meta device and have no values yet, {names[0]} first; call "
                "forebay.load(model, path), model.load_state_dict() or forebay.restore(), or set them within "
                "forebay.gathered(model, write=True)")
        names = sorted(name for name, buffer in self.model.named_buffers() if buffer.is_meta)
        if names:
            raise InvalidArgument(
                f"{len(names)} buffers are on the meta device and have no values, {names[0]} first; set them, as in "
                f"model.{names[0]} = torch..., or make the model under accelerate.init_empty_weights(), which keeps "
                "buffers on the CPU")
        self.needs_values = False

    # --- the model's forward pass ---

    @uncompiled
    def before_model(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.passing.setdefault("thread", threading.get_ident())
        self.refuse_other_thread()
        self.catch_up()
        self.end_interrupted(lambda: calls_on_stack(module) - 1)
        self.passing["thread"] = threading.get_ident()
        self.depth += 1
        if self.depth == 1:
            self.warn_of_written_copies()
            self.pass_has_gradients = torch.is_grad_enabled()
            if self.guard is not None:
                self.guard.follow_pass()
            self.refuse_replaced()
            if self.pass_has_gradients:
                if self.readers:
                    raise InvalidArgument("a forward pass with gradients began within forebay.gathered(model), which is for reading; end "
                                          "that block first, or leave out torch.enable_grad() in it")
                self.give_up_void_step()
                self.refuse_changed()
        if not self.residents and self.guard is not None and not self.guard.is_needed():
            return None
        self.commit()
        if not torch.is_grad_enabled():
            self.guard.begin_evaluation()
        changed = None
        for unit in self.residents:
            changed = unit.before_forward(module, *(changed or (args, kwargs))) or changed
        return changed

    @uncompiled
    def after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.is_elsewhere():  # before_model() refused the pass.
            return
        self.depth = max(0, self.depth - 1)  # before_model() may have failed before it counted.
        memory.explain(self, sys.exc_info()[1])  # The hook runs after an exception too.
        for unit in reversed(self.residents):
            unit.after_forward(module, args, output)
        if self.depth == 0:
            self.passing.clear()
            self.paused.clear()
            if self.guard is not None:
                self.guard.end_evaluation()
                self.guard.follow_pass()

    def is_elsewhere(self) -> bool:
        """The model is being called, and not in this thread. The threads of autograd belong to the one that waits for them."""
        thread = self.passing.get("thread")
        return thread is not None and thread != threading.get_ident() and _task() == -1

    def refuse_other_thread(self) -> None:
        """Errors: InvalidArgument while another thread calls the model. An exception may have ended its call."""
        if self.differentiating:
            self.refuse_other_backward()
        if not self.is_elsewhere():
            return
        if calls_on_stack(self.model, self.passing.get("thread", 0)):
            raise InvalidArgument("the model is being called in another thread; let one thread at a time use it, as by a threading.Lock")
        self.passing.clear()

    def refuse_other_backward(self) -> None:
        """Errors: InvalidArgument while another thread runs a backward pass of this model.

        Only on the CPU, where autograd runs all of a pass, and those within it, in the thread that called it. On other devices
        one thread of autograd runs the passes of all.
        """
        running = self.differentiating.get("pass", lambda: None)()
        if running is not None and running.thread != threading.get_ident() and self.device.type == "cpu":
            raise InvalidArgument("a backward pass of this model runs in another thread, and they run one at a time; let one thread at a "
                                  "time use the model, as by a threading.Lock, or call backward() once on the sum of the losses")

    # --- after KeyboardInterrupt, or another exception of a signal handler ---

    def catch_up(self) -> None:
        """Follows the engine where the exception came before a call was noted here."""
        self.refuse_other_thread()
        if self.calling is None:
            return
        number = self.engine.number
        if isinstance(self.calling, Unit):
            self.calling.held += number("open_acquisitions") - sum(unit.held for unit in self.units)
        is_open, begun = bool(number("open_steps")), number("begun_micro_steps")
        known = self.micro_step + 1 if self.in_step else 0
        if self.in_step and not is_open:
            self.forget_step()
        if is_open and (begun != known or not self.in_step):
            self.backward_over = begun < known or begun == 0  # The next pass begins a micro-step.
            self.micro_step = begun - 1
        self.in_step = is_open
        self.evaluating = bool(number("open_evaluations"))
        self.calling = None

    def end_interrupted(self, calls: Callable[[], int]) -> None:
        """Ends forward passes that the exception ended: torch calls no hook then. `calls`: those of the model that are on
        the stack."""
        self.end_interrupted_collecting()
        if self.depth:
            if self.depth <= calls():
                return
        elif self.readers or self.tasks or not any(unit.held for unit in self.units) or calls():
            return
        self.depth = 0
        self.passing.clear()
        self.paused.clear()
        for unit in self.units:
            while unit.held:
                self.release(unit)
            unit.drop_frames()
            unit.in_backward = unit.is_read = False

    def end_interrupted_collecting(self) -> None:
        """Gives back the values that a state_dict() held which an exception ended: torch calls no hook then."""
        while self.collecting and not is_in_state_dict(*self.collecting[-1][:2]):
            self.collecting.pop()[-1].close()

    def pause(self) -> None:
        """Gives back the units whose forward pass goes on around this call; begin_pass() takes them again.

        A forward pass may hold the whole loop, as training_step() of Lightning's manual optimization does.
        """
        if self.tasks:
            return
        if not self.depth or not calls_on_stack(self.model):
            self.end_interrupted(lambda: 0)
            return
        for unit in self.units:
            while unit.held:
                self.paused.append(unit)
                self.release(unit)

    def make_resident(self, unit: Unit) -> bool:
        """Gathers a unit now, and from now on for the whole pass of the model. False outside of a forward pass."""
        if self.depth != 1 or _task() != -1 or unit in self.residents:
            return False
        self.residents.append(unit)
        with torch.set_grad_enabled(self.pass_has_gradients):  # The read may be under no_grad().
            self.acquire_forward(unit)
        unit.frames.append(_Call(unit))
        return True

    # --- acquiring and releasing ---

    def acquire(self, unit: Unit, backward: bool) -> None:
        self.calling = unit
        self.engine.acquire(unit.index, backward, self.stream())
        unit.held += 1
        self.calling = None
        if backward and unit.is_read_by_others:
            unit.acquire_values()

    def release(self, unit: Unit) -> None:
        if unit.held:
            self.calling = unit
            unit.held -= 1
            self.engine.release(unit.index, self.stream())
            self.calling = None

    def acquire_forward(self, unit: Unit, counted: Optional[bool] = None) -> None:
        """Acquires a unit for a forward pass: of the step with gradients, else of an evaluation."""
        self.commit()
        if counted is None:
            counted = torch.is_grad_enabled()
            if self.tasks:
                self.recover()
            if self.interrupted:
                self.give_up_interrupted_step()
            if counted and not self.depth:
                self.give_up_void_step(unit)
            if self.in_step and self.norm_taken:
                joins = False  # In case that its backward pass comes after zero_grad(), it is counted.
            elif counted:
                self.begin_pass()
                joins = True
            else:  # A forward pass without gradients between a forward and its backward pass joins the step.
                joins = counted = self.in_step and not self.backward_over
            if not joins and not self.evaluating:
                self.calling = True
                self.engine.evaluation_begin()
                self.evaluating = True
                self.calling = None
        unit.forwards += counted
        self.acquire(unit, backward=False)

    def give_up_void_step(self, unit: Optional[Unit] = None) -> None:
        """Before a forward pass with gradients, of the model or of a unit: ends a step without gradients that cannot take it.

        The engine has taken the norm, or requires_grad of one of the parameters has changed since the step began.
        """
        if not self.in_step or self.tasks or self.readers or any(one.held for one in self.units):
            return
        if self.norm_taken:
            if not self.has_gradients or self.gradients_were_cleared():
                self.abandon()
        elif not self.has_gradients:
            parameters, all_frozen = (unit.plan.own, unit.frozen) if unit else (self.parameters, self.frozen)
            if any(p.requires_grad == frozen for p, frozen in zip(parameters, all_frozen)):
                self.abandon()

    def give_up_interrupted_step(self) -> None:
        """Before a forward pass: ends a step that has no gradients to keep after an exception in its backward pass.

        The engine takes no evaluation, as of a checkpointed block, between the forward and the backward pass of a step, and
        the exception may have come before it saw the backward pass.
        """
        if not self.in_step or self.evaluating or self.readers or any(unit.held for unit in self.units):
            return
        if not self.has_gradients or self.gradients_were_cleared():
            self.abandon()

    def begin_pass(self) -> bool:
        """A forward pass with gradients: it opens a step, and after a backward pass the next micro-step.

        True if it opened a micro-step.
        """
        self.refuse_writing()
        self.end_evaluation()
        if self.in_step and not self.backward_over:
            return False
        if self.in_step and (self.gradients_were_cleared() or not self.stand_ins
                             or not self.has_gradients and self.freezing()):
            self.abandon()
        if self.in_step and self.micro_step + 1 >= self.options["micro_steps"]:
            raise InvalidArgument(f"this is backward pass {self.micro_step + 2} since optimizer.step(), and a step has at most "
                                  f"{self.options['micro_steps']}; call optimizer.step() before, or give shard(micro_steps=...)")
        if not self.in_step:
            self.freeze()
            self.guard.begin_step()
        self.pause()
        self.calling = True
        if not self.in_step:
            self.engine.step_begin()
            self.in_step, self.micro_step = True, -1
        self.micro_step += 1
        self.backward_over = self.interrupted = False
        for unit in self.units:
            unit.forwards = 0
        self.engine.micro_step_begin(self.micro_step)
        self.calling = None
        paused, self.paused = self.paused, []
        for unit in paused:
            unit.forwards += 1
            self.acquire(unit, backward=False)
        return True

    def freezing(self) -> List[nn.Parameter]:
        """The parameters of which requires_grad differs from the engine's."""
        with guard.unwatched():
            return [p for p, frozen in zip(self.parameters, self.frozen) if p.requires_grad == frozen]

    def freeze(self) -> None:
        """Follows requires_grad, between steps. Collective."""
        changed = self.freezing()
        self.switched = [self.names[p] for p in changed]
        for p in changed:
            if p not in self.updated:
                raise Unsupported(f"{self.names[p]} was frozen when the optimizer was made, so it has no optimizer states; "
                                  "make it trainable before that, and freeze it afterwards")
            self.engine.freeze(*self.places[p][0], not p.requires_grad)
            p.grad = None
        if changed:
            self._note_frozen()

    def gradients_were_cleared(self) -> bool:
        """The program set the gradients of this step to None or to zero, as zero_grad() does.

        Errors: Unsupported where it did so for a part of them, or replaced one.
        """
        with guard.unwatched():
            changed = [p for p, gradient in self.stand_ins.items() if p.grad is not gradient or gradient.is_zero]
        if not changed:
            return False
        replaced = next((p for p in changed if p.grad is not None and p.grad is not self.stand_ins[p]), None)
        if replaced is not None:
            raise Unsupported(f"the program gave {self.names[replaced]} another gradient; gradients of a sharded model "
                              "lie in shards, so change them by Tensor.register_hook(), or scale all of them together")
        if len(changed) < len(self.stand_ins):
            raise Unsupported(f"the gradient of {self.names[changed[0]]} was cleared, and others were not; forebay "
                              "updates all parameters of a step, so clear all of them, or freeze it before shard()")
        return True

    def recover(self) -> None:
        """A backward pass ended by an exception: its acquisitions end."""
        self.interrupted = True
        self.catch_up()
        self.tasks.clear()
        for unit in self.units:
            unit.drop_frames(again=True)
        self.end_backward()

    # --- backward passes ---

    def refuse_double_backward(self) -> None:
        """Errors: Unsupported where the backward pass makes a graph: its own backward pass would read released weights."""
        if self.stage == 3 and torch.is_grad_enabled():
            raise Unsupported("this backward pass makes a graph of its own (create_graph=True), and at stage 3 the weights that its "
                              "backward pass reads are released by then; use shard(stage=2), where weights stay, or leave "
                              "create_graph=True out")

    def enter_backward(self) -> int:
        """Notes that the engine of autograd runs; the number of its pass."""
        task = _task()
        if task not in self.tasks:
            one = _Backward(self, task)
            torch.autograd.Variable._execution_engine.queue_callback(one)
            if self.differentiating.setdefault("pass", weakref.ref(one))() is None:  # An exception ended that one.
                self.differentiating["pass"] = weakref.ref(one)
            self.refuse_other_backward()
            if not self.tasks:
                self.begin_backward()
            self.tasks.add(task)
        return task

    def begin_backward(self) -> None:
        self.commit()
        if self.stepped:
            with guard.unwatched():
                self.adds_to_last = any(p.grad is not None for p in self.stand_ins)
        self.stepped = False
        # The most forward passes that this graph has, if it is of an earlier micro-step: those that no backward pass has used, or,
        # if the graph was retained, as many as its last backward pass used.
        passes = [max(1, unit.forwards, unit.backwards) for unit in self.units]
        if self.in_step and (self.has_gradients and self.gradients_were_cleared() or self.norm_taken and not self.has_gradients):
            self.abandon()  # zero_grad() came after this forward pass.
        if self.in_step and self.has_gradients and (
                self.norm_taken or any(gradient.factor != 1.0 for gradient in self.stand_ins.values())):
            raise Unsupported("gradients were scaled or clipped, or their norm was taken, between two backward passes of a step, and the "
                              "next one adds to them in shards; do it after the last backward pass, or scale the loss. To go on, call "
                              "optimizer.step() or optimizer.zero_grad()")
        if self.begin_pass():  # The graph is of an earlier micro-step, and the engine counts passes within one.
            for unit, count in zip(self.units, passes):
                for _ in range(count):
                    self.acquire_forward(unit, counted=True)
                    self.release(unit)
        for unit in self.units:
            unit.backwards = 0
        self.clear_stand_ins()
        self.norm = None

    def leave_backward(self, task: int) -> None:
        self.tasks.discard(task)
        if not self.tasks:
            self.differentiating.clear()
            self.end_backward()

    def end_backward(self) -> None:
        for unit in self.units:
            unit.end_backward()
            unit.end_reads()
        self.backward_over = True
        self.norm = None
        with guard.unwatched():
            for p, gradient in self.stand_ins.items():
                gradient.factor, gradient.is_zero = 1.0, False
                p.grad = gradient

    def clear_stand_ins(self) -> None:
        self.clipped.clear()
        with guard.unwatched():
            for p in self.stand_ins:
                p.grad = None

    def before_gradient(self) -> None:
        """autograd is about to add a gradient to p.grad, which must not be that of the last pass any more."""
        self.enter_backward()

    def take_gradient(self, p: nn.Parameter) -> None:
        """Copies a gradient of autograd to the engine."""
        gradient, p.grad = p.grad, None
        if gradient is None:  # It was frozen after the forward pass, so autograd gives it none.
            self.note_gradient(p)
            return
        if gradient.requires_grad:
            raise Unsupported(f"the gradient of {self.names[p]} has a graph of its own (create_graph=True), and gradients of a sharded "
                              "model lie in shards; leave create_graph=True out of backward(). For a penalty on gradients of inputs "
                              "give shard(stage=2) and use torch.autograd.grad(loss, inputs, create_graph=True)")
        if gradient.layout != torch.strided:
            raise Unsupported(f"the gradient of {self.names[p]} is sparse; make the embedding with sparse=False")
        task = self.enter_backward()
        if p not in self.stand_ins:
            raise Unsupported(f"requires_grad of {self.names[p]} was switched on between the backward passes of a step; "
                              "switch it after optimizer.step()")
        places = [(self.units[u], i) for u, i in self.places[p]]
        unit, index = next((at for at in places if at[0].in_backward), places[0])
        if not unit.in_backward:  # Its backward pass has read no weights, or unseen.
            if self.stage == 3 and unit.is_unwatched:
                self.refuse_unseen(unit, p)
            unit.acquire_backward(task)
        address, adds = self.engine.gradient(unit.index, index)
        key = (p, address)
        if key not in self.views:
            self.views[key] = self.view(address, p.shape)
        with torch.no_grad():
            if adds or p in unit.given:
                self.views[key].add_(gradient)
            else:
                self.views[key].copy_(gradient)
        unit.given.add(p)
        self.has_gradients = True
        self.note_gradient(p)

    @staticmethod
    def refuse_unseen(unit: Unit, p: nn.Parameter) -> None:
        """Errors: Unsupported where operators may have read released weights before this gradient."""
        if unit.plan.is_table or program_hooks is None and unit.plan.own == [p] and p.dim() < 2:  # As a scale or a bias.
            return
        reason = ("PyTorch before 2.8 does not show the weights that operators save" if program_hooks is None else
                  "disable_saved_tensors_hooks() hid the weights that operators saved")
        raise Unsupported(f"{unit.name} got a gradient before the tensors that it returned, as under torch.vmap(), and {reason}, so the "
                          "pass has read released ones; return the tensors of the loss in a tuple, list, dict or dataclass, or use "
                          "shard(stage=2)")

    def note_gradient(self, p: nn.Parameter) -> None:
        """Its unit waits for one gradient less."""
        owner = self.units[self.places[p][0][0]]
        if owner.task == _ANY_TASK:
            owner.task = _task()
        if owner.task == _task() and p in self.stand_ins:
            owner.pending -= 1
        owner.settle()

    # --- steps ---

    def gradient_norm(self) -> float:
        """The norm of all gradients of this step, averaged over ranks. Collective."""
        if self.norm is None:
            self.pause()
            self.end_evaluation()
            self.norm_taken = True
            self.norm = self.engine.norm()
        return self.norm

    def step(self, groups: Sequence[Mapping[str, Any]]) -> Optional[core.StepResult]:
        """Updates all parameters; None where there was no backward pass. Collective."""
        self.refuse_writing()
        self.warn_of_written_copies()
        self.refuse_replaced()
        self.refuse_changed()
        self.commit(groups)
        self.refuse_written()
        if self.tasks:
            self.recover()
        self.pause()
        if not self.in_step or not self.has_gradients:
            if any(p.grad is not None and p.grad is not gradient for p, gradient in self.stand_ins.items()):
                raise Unsupported("the program set gradients itself, as after torch.autograd.grad(); gradients of a sharded "
                                  "model come from backward()")
            self.between_steps()
            return None
        if self.gradients_were_cleared():
            self.abandon()
            return None
        if self.adds_to_last:  # And nothing has cleared them since.
            self.warn_once("optimizer.zero_grad() was not called after optimizer.step(); plain torch would add the "
                           "gradients of the last step to these, and forebay does not")
        # Each NaN differs from each other, so a text stands for it.
        factors = {gradient.factor if gradient.factor == gradient.factor else "nan" for gradient in self.stand_ins.values()}
        if len(factors) > 1:
            raise Unsupported("some gradients were scaled by other factors than the rest; scale or clip all of them "
                              "together")
        self.end_evaluation()
        factor = float(factors.pop())
        if factor < 0:
            raise Unsupported(f"the gradients were multiplied by {factor}; only factors from 0 on are known, so negate the loss")
        if not math.isfinite(factor):
            if math.isfinite(self.gradient_norm()):
                raise InvalidArgument(f"the gradients were scaled by {factor}, and their norm is finite; scale them by a number")
            factor = 1.0  # As clip_grad_norm_() scales where a gradient is not finite. The engine skips the step.
        self.engine.hyperparameter("gradient-factor", factor)
        self.engine.hyperparameter("clip", self.clip)
        for i, group in enumerate(groups):
            if not group["params"]:  # As the Trainer's group without weight decay, over LoRA's matrices.
                continue
            values = {"lr": group["lr"], "weight-decay": group["weight_decay"]}
            if "betas" in group:
                values["beta1"], values["beta2"] = group["betas"]
            is_muon = self.rule == "muon" and group["use_muon"]
            if "eps" in group and self.rule != "adafactor" and not is_muon:
                values["epsilon"] = group["eps"]
            if self.rule == "sgd" or is_muon:
                values["beta1"] = group["momentum"]
            for name, value in values.items():
                self.engine.hyperparameter(name, float(value), i)
        self.calling, ran_before, self.update_runs = True, self.update_runs, True
        try:
            result = self.engine.step()
        except InvalidArgument as error:
            if "gave other values" not in str(error):
                raise
            raise InvalidArgument(f"{error}; so must requires_grad, which this rank switched for "
                                  f"{', '.join(self.switched[:4]) or 'no parameter'} before this step") from error
        self.in_step = self.has_gradients = self.norm_taken = False
        self.stepped = True
        self.calling = None
        if result.abandoned:
            self.update_runs = ran_before
            self.guard.end_step()
            raise InvalidArgument("another rank gave this step up, so no rank has made it: there zero_grad() came before step(), or "
                                  "backward() was left out, or an exception ended a pass; let all ranks do so alike, as by an "
                                  "all_reduce of whether the loss is finite")
        self.norm = result.grad_norm / factor if factor else None  # The norm before clip_grad_norm_().
        if not result.skipped:
            self.note_changed(self.stand_ins)
        self.guard.end_step()
        if self.stage != 3 and self.given.get("check") is not False:
            with self.reading(self.units):  # The program may read and write weights from now on, and the update is only queued.
                pass
            self.update_runs = False
        return result

    def note_changed(self, parameters: Iterable[nn.Parameter]) -> None:
        """The engine has written their values. torch then refuses the backward pass of a forward pass that read the old ones."""
        with guard.unwatched():
            for p in parameters:
                self.versions.pop(p, None)  # After an interrupt here the version that the next look finds is taken for forebay's.
                torch.autograd.graph.increment_version(p)
                self.versions[p] = _VERSION(p)

    def read_versions(self) -> Dict[nn.Parameter, int]:
        with guard.unwatched():
            return {p: _VERSION(p) for p in self.versions}

    def drop_writes(self, since: Dict[nn.Parameter, int]) -> None:
        """Writes since read_versions() went to tensors that are dropped."""
        for p, version in self.read_versions().items():
            self.versions[p] += version - since.get(p, version)

    def note_copy(self, p: nn.Parameter) -> None:
        """torch is about to copy the parameter to itself, which it counts as a write."""
        if p in self.versions:
            self.versions[p] = _VERSION(p) + 1

    def warn_once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            warnings.warn(text, stacklevel=2)

    def note_copy_of(self, p: nn.Parameter, name: str, value: torch.Tensor) -> None:
        if not value.is_inference():
            self.copies[p] = (name, weakref.ref(value), _VERSION(value))

    def warn_of_written_copies(self) -> None:
        """torch's state_dict() has the parameters themselves, and programs write them there."""
        if not self.copies:
            return
        with guard.unwatched():
            written = next((name for name, reference, version in self.copies.values()
                            if (value := reference()) is not None and _VERSION(value) != version), None)
        self.copies.clear()
        if written is not None:
            self.warn_once(f"{written} was written in what state_dict() gave, which is a copy: the model does not change by that. Give it "
                           "to load_state_dict(), or write within forebay.gathered(model, write=True)")

    def end_evaluation(self) -> None:
        if self.evaluating:
            if self.readers and any(unit.held for unit in self.units):
                raise InvalidArgument("steps, saves and writes need the weights in their shards, and forebay.gathered(model) holds them; do "
                                      "this after that block, or give it write=True to change values")
            self.calling = True
            self.engine.evaluation_end()
            self.evaluating = False
            self.calling = None

    def abandon(self) -> None:
        """Drops the gradients of this step. Collective."""
        self.end_evaluation()
        if self.in_step:
            self.calling = True
            self.engine.abandon(self.micro_step + 1)
        self.forget_step()
        self.calling = None

    def forget_step(self) -> None:
        for unit in self.units:
            unit.calls.clear()
            unit.held, unit.in_backward, unit.is_read, unit.forwards = 0, False, False, 0
        self.in_step = self.has_gradients = self.adds_to_last = self.norm_taken = self.interrupted = False
        self.tasks.clear()
        self.clear_stand_ins()

    def between_steps(self, keeps_gradients: bool = False) -> None:
        """Makes sure that no step is open. Errors: InvalidArgument while gradients wait for the optimizer.

        `keeps_gradients`: they may wait, and go on to; then no pass is open.
        """
        self.refuse_writing()
        self.refuse_changed()
        self.commit()
        self.end_interrupted(lambda: calls_on_stack(self.model))
        self.end_evaluation()
        if not self.in_step:
            return
        if not self.has_gradients or self.gradients_were_cleared():
            self.abandon()
        elif not keeps_gradients:
            raise InvalidArgument("gradients wait for optimizer.step(); call it, or optimizer.zero_grad(), before this")
        elif self.depth or self.tasks or not self.backward_over:
            raise InvalidArgument("a forward pass waits for its backward pass; do this after backward()")

    def refuse_writing(self) -> None:
        if self.writing:
            raise InvalidArgument("the values are being written by gathered(model, write=True) and are not in the shards yet; do "
                                  "this after it")

    def end_saving(self) -> Optional[_library.Error]:
        """Waits for the save in the background, and gives its error. Collective."""
        outcome = self.saving
        if outcome is None:
            return None
        try:
            self.engine.save_end()
        except _library.Error as error:
            if "is in another call" in str(error):  # Another thread uses the engine; the save goes on.
                raise
            outcome.error = error
        self.saving = None
        return outcome.error

    @contextlib.contextmanager
    def reading(self, units: Sequence[Unit]) -> Iterator[None]:
        """The values of these units are valid within. Collective, except where all weights lie in place."""
        self.commit()
        self.end_interrupted(lambda: calls_on_stack(self.model))
        self.refuse_moved([p for unit in units for p in unit.plan.own])
        taken: List[Unit] = []
        in_place = self.stage != 3 and not self.update_runs and "parameters" not in (self.options.get("offload") or "")
        self.readers += 1
        try:
            with torch.no_grad():
                for unit in units:
                    if not unit.held and not in_place:
                        taken.append(unit)
                        self.acquire_forward(unit)
            yield
        finally:
            self.readers -= 1
            self.catch_up()  # Where an interrupt came before the latest acquisition was noted.
            for unit in reversed(taken):
                self.release(unit)

    def refuse_autocast(self) -> None:
        if (self.stage == 3 and self.dtype == torch.float32 and torch.is_grad_enabled()
                and torch.is_autocast_enabled(self.device.type)):
            raise Unsupported("autocast over fp32 parameters keeps a copy of every weight for the backward pass, so "
                              "stage 3 would save nothing; use shard(..., dtype=\"bf16\"), under autocast or without "
                              "(masters are fp32)")


def _reduce(p: nn.Parameter, protocol: Any) -> Any:
    """__reduce_ex__() of a parameter: it is pickled as a plain one, without its model.

    Errors: Unsupported while it is released.
    """
    owner = p._forebay
    if owner.stage == 3 and owner.engine is not None and not any(owner.units[unit].held for unit, _ in owner.places[p]):
        raise Unsupported(f"pickling parameter {owner.names[p]} while its values are released; do it within "
                          "forebay.gathered(model), or save state_dict()")
    with guard.unwatched():
        plain = nn.Parameter(p.detach(), p.requires_grad)
        plain.__dict__.update((name, value) for name, value in p.__dict__.items() if name not in ("_forebay", "__reduce_ex__"))
        return plain.__reduce_ex__(protocol)


def checksum(p: nn.Parameter) -> int:
    if p.is_meta:
        return 0
    value = p.detach().cpu().contiguous()
    size = value.numel() * value.element_size()
    return zlib.crc32((ctypes.c_char * size).from_address(value.data_ptr()))


def _launched() -> Tuple[int, int]:
    """Rank and number of ranks: those of torch's process group, else of the launcher."""
    if _has_process_group():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if "WORLD_SIZE" in os.environ and not {"FOREBAY_RANK", "FOREBAY_SIZE"} & os.environ.keys():
        return int(os.environ.get("RANK", "0")), int(os.environ["WORLD_SIZE"])
    with core.Options() as found:
        found.read_environment()
        return int(found.get("rank")), int(found.get("size"))


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


_meetings = 0


def _communicator(device: core.Device, store: Any, options: Dict[str, Any]) -> core.Communicator:
    """Ranks meet in torch's own store, that of the process group or of torchrun; under other launchers in forebay's."""
    global _meetings
    rank, size = _launched()
    is_torchrun = (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == (str(rank), str(size))
    _meetings += 1
    prefix = f"forebay/{_meetings}/"
    if size > 1 and store is None:
        if _has_process_group():
            store = torch.distributed.distributed_c10d._get_default_store()
        elif is_torchrun:
            with core.Options(**options) as given:
                patience = int(given.get("join-deadline")) or int(given.get("deadline"))
            store = next(torch.distributed.rendezvous("env://", timeout=datetime.timedelta(milliseconds=patience)))[0]
        else:
            return _meet_by_launcher(device, options)
    return core.Communicator(device, store if size > 1 else None, prefix=prefix, **{**options, "rank": rank, "size": size})


_met_by_launcher = False


def _meet_by_launcher(device: core.Device, options: Dict[str, Any]) -> core.Communicator:
    """A run has one store of forebay's, in which its ranks meet once."""
    global _met_by_launcher
    if _met_by_launcher:
        raise Unsupported("this process has sharded a model already, and the ranks of mpirun, srun or FOREBAY_RANK meet once without a "
                          "process group; call torch.distributed.init_process_group() before the first shard(), or start the ranks "
                          "with torchrun")
    made = core.Communicator(device, **options)
    _met_by_launcher = True
    return made
