"""The units of a torch module: which parameters are gathered together."""

from __future__ import annotations

import collections
import difflib
import math
from typing import Any, Collection, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from forebay import core
from forebay._library import InvalidArgument, Unsupported
from forebay.torch import deepspeed

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
# The options of shard() that are its own. All others are those of the C interface.
OWN_OPTIONS = ("units", "resident", "check", "device", "store", "config")
# Options that have no effect on a sharded model, or groups of them by the beginning of their names, and where they have one.
_OPTIMIZERS = "give it to the optimizer, as in forebay.AdamW(model, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)"
_LAUNCHERS = ("the launcher gives it: start the ranks with torchrun, mpirun or srun; forebay.plan() has `ranks` for a "
              "number of them")
_ELSEWHERE = {
    **dict.fromkeys(("lr", "beta1", "beta2", "betas", "eps", "epsilon", "momentum", "weight_decay"), _OPTIMIZERS),
    **dict.fromkeys(("size", "rank"), _LAUNCHERS),
    "arena_": "it is one of forebay.Arena; `memory` bounds the device memory of a rank",
    "pinned_": "it is one of forebay.PinnedPool; the plan has the pinned memory, and offload_fraction and offload_staging change it",
    "activation_": "give it to forebay.offload_activations(model), where activation_tier is `tier`",
    "store_": "it is one of the C interface's file stores; the files of a model's states are offload_tier=\"nvme:DIR\"",
}
# Modules that read the parameters of their children without calling them, some in evaluation only.
FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
# Classes that do a part of shard()'s work.
WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


def is_held(p: nn.Parameter) -> bool:
    """Whether forebay holds the parameter: no optimizer updates any other."""
    return p.is_floating_point() and p.numel() > 0


class UnitPlan:
    """A unit before it has an engine: its module, its own parameters, and those that an earlier unit owns."""

    def __init__(self, name: str, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        self.name, self.module = name, module
        self.parameters = list(dict.fromkeys(p for p in parameters if is_held(p)))
        self.own: List[nn.Parameter] = []
        self.tied: List[nn.Parameter] = []
        # The backward pass of an embedding reads no weights.
        self.is_table = type(module) is nn.Embedding and set(module._parameters) == {"weight"}  # Not of weight_norm().


def refuse_wrappers(model: Any) -> None:
    """Errors: InvalidArgument for a model that is sharded already, or that another library divides over ranks."""
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"shard() of a {type(model).__name__}; give a torch.nn.Module")
    for name, module in model.named_modules():
        if "_forebay" in module.__dict__:
            raise InvalidArgument(f"the {f'module {name}' if name else 'model'} is sharded already; keep the first shard(), "
                                  "or make the model again")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise InvalidArgument(f"{name or 'the model'} has max_norm, by which a forward pass writes weights, and those of a "
                                  "sharded model change in optimizer.step() only; make it without, and normalise the weights "
                                  "within forebay.gathered(model, write=True)")
        if isinstance(module, torch.jit.ScriptModule):
            raise InvalidArgument(f"{name or 'the model'} is a ScriptModule, which takes no hooks; give the module that it was made of")
        if type(module).__name__ in WRAPPERS:
            raise InvalidArgument(f"{name or 'the model'} is a {type(module).__name__}; shard() takes its place, so give "
                                  "the module within it")
    for name, p in model.named_parameters():
        if hasattr(p, "_forebay"):
            raise InvalidArgument(f"parameter {name} belongs to another model, which is sharded already; call shard() once, on a "
                                  "module that holds both models, or give each model parameters of its own")
        if p.is_complex() and p.requires_grad:
            raise InvalidArgument(f"parameter {name} is {p.dtype}, which forebay does not train; make it two parameters and join "
                                  "them by torch.complex(), or freeze it")
        if hasattr(p, "device_mesh"):
            raise InvalidArgument(f"parameter {name} is a DTensor; shard() takes the place of fully_shard(), so leave that "
                                  "out")


def find_units(model: nn.Module, units: Optional[Sequence[Any]] = None,
               resident: Sequence[Any] = ()) -> List[UnitPlan]:
    """Divides all floating-point parameters of `model` into units.

    `units`: classes, names of classes or modules, or modules; None: the class that repeats most in a ModuleList.
    A unit covers all its submodules. Each other module with parameters of its own is a unit too. The parameters
    of modules in `resident` join the unit of the root, which is gathered for the whole pass.
    Errors: InvalidArgument for a name that the model does not have.
    """
    chosen = _default_units(model) if units is None else _match(model, units, "units")
    always = _match(model, resident, "resident")
    found: List[UnitPlan] = []
    seen = set()

    def walk(name: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        if module in always and module is not model:
            return
        if module in chosen:
            found.append(UnitPlan(name or "model", module, module.parameters()))
            return
        parameters = list(module.parameters(recurse=False))
        if module is model:
            parameters += [p for one in always for p in one.parameters()]
        if parameters:
            found.append(UnitPlan(name or "model", module, parameters))
        for child, one in module.named_children():
            walk(f"{name}.{child}" if name else child, one)

    walk("", model)
    owned = set()
    for unit in found:
        unit.own = [p for p in unit.parameters if p not in owned]
        unit.tied = [p for p in unit.parameters if p in owned]
        owned.update(unit.own)
    return [unit for unit in found if unit.parameters]


def _default_units(model: nn.Module) -> set:
    """Modules of the class that repeats most in a ModuleList; a list inside another list does not count."""
    counts: Dict[type, List[nn.Module]] = collections.defaultdict(list)

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList):
                counts[type(child)].append(child)
            else:
                walk(child)

    walk(model)
    repeated = max(counts.values(), key=len, default=[])
    return set(repeated) | {m for m in model.modules() if isinstance(m, FUSED)}


def _match(model: nn.Module, wanted: Sequence[Any], option: str) -> set:
    if isinstance(wanted, (str, type, nn.Module)):
        wanted = [wanted]
    if not isinstance(wanted, Iterable):
        raise InvalidArgument(f"{option} is {wanted!r}; give classes, names of classes or modules, or modules")
    modules = dict(model.named_modules())
    chosen = set()
    for one in wanted:
        if isinstance(one, nn.Module):
            matches = [m for m in modules.values() if m is one]
        elif isinstance(one, type):
            matches = [m for m in modules.values() if isinstance(m, one)]
        else:
            matches = [m for name, m in modules.items() if one in (name, type(m).__name__)]
        if not matches:
            names = sorted({type(m).__name__ for m in modules.values()} | set(modules))
            near = difflib.get_close_matches(str(one), names, 1)
            raise InvalidArgument(f"{option} names {one}, and the model has no such class, name or module; "
                                  + (f"did you mean {near[0]}?" if near else "print(model) shows them"))
        chosen.update(matches)
    return chosen


def refuse_overlap(parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
    """Errors: Unsupported for two parameters over the same elements: each would become one of its own.

    Cost: linear. Only parameters whose extents overlap, as those of interleaved columns, are looked at element by element.
    """
    extents = [(*_extent(p), p) for p in parameters if not p.is_meta and p.numel() and p.layout == torch.strided]
    together: List[Tuple[int, int, nn.Parameter]] = []  # Each begins before the end of the others before it.
    last = 0
    for one in sorted(extents, key=lambda extent: extent[0]):
        if one[0] >= last:
            _refuse_shared(together, names)
            together = []
        together.append(one)
        last = max(last, one[1])
    _refuse_shared(together, names)


def _extent(p: torch.Tensor) -> Tuple[int, int]:
    """The address of the first byte, and of the end."""
    steps = sum((count - 1) * stride for count, stride in zip(p.shape, p.stride()))
    return p.data_ptr(), p.data_ptr() + (steps + 1) * p.element_size()


def _refuse_shared(extents: Sequence[Tuple[int, int, nn.Parameter]], names: Mapping[nn.Parameter, str]) -> None:
    if len(extents) < 2:
        return
    begin = extents[0][0]
    grain = math.gcd(*(number for first, _, p in extents for number in (first - begin, p.element_size())))
    marks = torch.zeros((max(end for _, end, _ in extents) - begin) // grain, dtype=torch.bool, device="cpu")

    def marks_of(first: int, p: nn.Parameter) -> torch.Tensor:
        grains = p.element_size() // grain
        steps = [(count, stride * grains) for count, stride in zip(p.shape, p.stride()) if stride] + [(grains, 1)]
        return marks.as_strided([count for count, _ in steps], [stride for _, stride in steps], (first - begin) // grain)

    for i, (first, _, p) in enumerate(extents):
        mine = marks_of(first, p)
        if mine.any():
            marks.zero_()
            mine.fill_(True)
            other = next(one for at, _, one in extents[:i] if marks_of(at, one).any())
            raise Unsupported(f"parameters {names[other]} and {names[p]} share elements as views of one tensor, and would be trained "
                              "apart; use one nn.Parameter in both places, or clone() one of them")
        mine.fill_(True)


def model_dtype(model: nn.Module, dtype: Any = None) -> torch.dtype:
    """The type of parameters and gradients: `dtype`, else the one that all parameters have.

    Errors: InvalidArgument for a type that forebay does not train, and for parameters of two types.
    """
    if dtype is not None:
        made = BY_NAME.get(dtype, dtype) if isinstance(dtype, (str, torch.dtype)) else None
        if made not in DTYPES:
            raise InvalidArgument(f"dtype is {dtype}; use fp32, bf16 or fp16")
        return made
    first: Optional[Tuple[str, torch.dtype]] = None
    for name, p in model.named_parameters():
        if not p.is_floating_point() or not p.numel():
            continue
        if p.dtype not in DTYPES:
            raise InvalidArgument(f"parameter {name} is {p.dtype}; use fp32, bf16 or fp16")
        if first is not None and p.dtype != first[1]:
            raise InvalidArgument(f"parameter {name} is {p.dtype} and {first[0]} is {first[1]}; give "
                                  "dtype=\"bf16\" or another one for all (masters are fp32 anyway)")
        first = first or (name, p.dtype)
    if first is None:
        raise InvalidArgument("the model has no floating-point parameters; there is nothing to shard")
    return first[1]


def with_config(model: nn.Module, options: Dict[str, Any],
                ranks: int) -> Tuple[Dict[str, Any], Optional[deepspeed.Meaning]]:
    """The options with those of the DeepSpeed configuration `config`; options given by name win."""
    if options.get("config") is None:
        return options, None
    meaning = deepspeed.understand(options["config"], ranks, model)
    return {**meaning.options, **options}, meaning


def planned_options(model: nn.Module, options: Dict[str, Any]) -> Dict[str, Any]:
    """The options of an engine for this model: those of shard() without its own, with defaults.

    Errors: InvalidArgument for options without an effect on it, with the place where they have one.
    """
    if options.get("find_non_finite"):
        raise Unsupported("find_non_finite: its finding does not reach Python; use torch.autograd.set_detect_anomaly(True)")
    for option, value in options.items():
        name = option.replace("-", "_")
        remedy = next((text for begin, text in _ELSEWHERE.items()
                       if name == begin or begin.endswith("_") and name.startswith(begin)), None)
        if remedy is not None and value is not None and name != "store_prefix":
            raise InvalidArgument(f"{name} is no option of a sharded model; {remedy}")
    order = options.get("order_of_units")
    if order is not None and str(order).partition(":")[0] != "recorded":
        raise InvalidArgument(f"order_of_units is {order}, and a model's passes have any order and any number of micro-steps; leave the "
                              "option out")
    given = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    given["dtype"] = DTYPES[model_dtype(model, given.get("dtype"))]
    given.setdefault("order_of_units", "recorded")
    given.setdefault("average", "ranks")
    given.setdefault("micro_steps", MICRO_STEPS_MAX)
    return given


def engine_options(options: Dict[str, Any]) -> Dict[str, Any]:
    """Without the transport between ranks: an engine is given a communicator that has it."""
    return {name: value for name, value in options.items() if name != "communicator"}


def device_of(device: Any) -> torch.device:
    """Errors: InvalidArgument for a device that holds no values of a sharded model."""
    try:
        made = torch.device(device)
    except (RuntimeError, TypeError):
        made = None
    if made is None or made.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device is {device}; use cpu, or cuda:0 and the like, where the values are to be")
    return made


# Backward passes in one step, at most. A step ends after any smaller number.
MICRO_STEPS_MAX = 1024


def describe(engine: core.Engine, units: Sequence[UnitPlan], names: Optional[Dict[nn.Parameter, str]] = None,
             groups: Optional[Dict[nn.Parameter, int]] = None,
             elementwise: Collection[nn.Parameter] = ()) -> Dict[nn.Parameter, List[Tuple[int, int]]]:
    """Adds the units to an engine. The places of each parameter: (unit, index), the owner's first.

    `elementwise`: parameters that Muon updates by AdamW, though they may be matrices; tables are among them.
    """
    places: Dict[nn.Parameter, List[Tuple[int, int]]] = {}
    for unit in units:
        index = engine.add_unit(unit.name, core.BACKWARD_READS_NOTHING if unit.is_table else 0)
        for k, p in enumerate(unit.own):
            name = names[p] if names else f"{unit.name}.{k}"
            flags = 0 if p.requires_grad else core.FROZEN
            if p in elementwise or (not groups and unit.is_table):
                flags |= core.ELEMENTWISE
            at = engine.add_parameter(index, name, p.numel(), (groups or {}).get(p, 0), flags)
            if p.dim():
                engine.declare_shape(index, at, p.shape)
            places[p] = [(index, at)]
        for p in unit.tied:
            places[p].append((index, engine.tie(index, *places[p][0])))
    return places
