"""Values of a sharded model: state_dict(), load_state_dict(), safetensors, saved states; and refusals."""

from __future__ import annotations

import base64
import collections
import contextlib
import copy
import ctypes
import functools
import gc
import json
import math
import os
import stat
import struct
import threading
import warnings
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

import torch
from torch import nn

from forebay._library import InvalidArgument, Unsupported, open_to_read
from forebay.torch import describe
from forebay.torch.guard import unwatched
from forebay.torch.optimizer import sharded_of
from forebay.torch.sharded import SavingOutcome, Sharded, checksum

Path = Union[str, os.PathLike]


def install(sharded: Sharded) -> None:
    """Makes the methods of the model's modules right for parameters whose bytes come and go."""
    collect, take = _collect(sharded), _take(sharded)
    for name, module in sharded.model.named_modules():
        module.__dict__["__deepcopy__"] = _copier(module, name)
        module.__dict__["__reduce_ex__"] = _refusal(
            f"pickling the sharded module {name or 'itself'}; save state_dict(), or use forebay.save()")
        module.__dict__["_apply"] = _apply_to(sharded, module)
        if module._parameters:
            module._register_state_dict_hook(collect)
        if module._parameters or module._buffers:
            _take_last(module, take)
    sharded.model.__dict__["zero_grad"] = _zero_grad_of(sharded)
    object.__setattr__(sharded.model, "_ddp_params_and_buffers_to_ignore", _NotForDDP())
    for unit in sharded.units:  # One gather for all modules of a unit.
        _hold_while_collecting(sharded, unit)


class _NotForDDP:
    """DistributedDataParallel asks a module for the names to ignore; this answers with a reason."""

    def __iter__(self) -> Iterator[str]:
        raise Unsupported("DistributedDataParallel over a sharded model; leave it out: forebay averages the gradients")


def _refusal(what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Unsupported(what)
    return refuse


def _copier(module: nn.Module, name: str) -> Callable[..., nn.Module]:
    def copy_module(memo: Dict[int, Any]) -> nn.Module:
        if type(torch.overrides._get_current_function_mode()).__name__ != "FakeCopyMode":
            raise Unsupported(f"copy.deepcopy() of the sharded module {name or 'itself'}; copy before shard(), or copy "
                              "state_dict()")
        # torch.compile of PyTorch 2.4 copies modules to tensors without memory.
        made = type(module).__new__(type(module))
        memo[id(module)] = made
        for key, value in module.__dict__.items():
            made.__dict__[key] = copy.deepcopy(value, memo) if key in ("_parameters", "_buffers", "_modules") else value
        return made
    return copy_module


def _apply_to(sharded: Sharded, module: nn.Module) -> Callable[..., nn.Module]:
    """_apply() of to(), half(), cuda(): buffers follow, parameters stay where they are."""

    def apply(function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        for name, p in module._parameters.items():
            if p is None or p not in sharded.places and sharded.engine is not None:
                continue
            probe = function(torch.empty(0, dtype=p.dtype, device=p.device))
            if probe.dtype != p.dtype or probe.device != p.device:
                raise Unsupported(f"moving parameter {name} from {p.dtype} on {p.device} to {probe.dtype} on "
                                  f"{probe.device} after shard(); do it before, or give shard(dtype=...)")
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    return apply


def _zero_grad_of(sharded: Sharded) -> Callable[..., None]:
    """zero_grad() of the model. After an exception in a backward pass it drops the gradients so far, as the optimizer's does."""
    me = weakref.ref(sharded)

    def zero_grad(set_to_none: bool = True) -> None:
        owner = me()
        if owner.tasks:
            owner.recover()
        type(owner.model).zero_grad(owner.model, set_to_none)

    return zero_grad


# --- state_dict ---

def _hold_while_collecting(sharded: Sharded, unit: Any) -> None:
    def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        sharded.end_interrupted_collecting()
        stack = contextlib.ExitStack()
        sharded.collecting.append((module, threading.get_ident(), stack))
        if sharded.engine is not None and sharded.collected is None and not sharded.writing:
            stack.enter_context(sharded.reading([unit]))

    def after(module: nn.Module, state: Dict[str, Any], *_: Any) -> None:
        # Another thread may be in a state_dict() of its own.
        mine = (module, threading.get_ident())
        at = max(i for i, entry in enumerate(sharded.collecting) if entry[:2] == mine)
        with sharded.collecting.pop(at)[-1]:
            if sharded.stage == 3 and sharded.engine is not None and sharded.collected is None and not sharded.writing:
                # The program's code may have made views of weights, under whatever names.
                for key, value in list(state.items()):
                    state[key] = _out_of_slots(sharded, value)

    unit.plan.module.register_state_dict_pre_hook(before)
    unit.plan.module._register_state_dict_hook(after)


def _collect(sharded: Sharded) -> Callable[..., None]:
    uses = collections.Counter(p for module in sharded.model.modules() for p in module._parameters.values())
    copies: Dict[nn.Parameter, "weakref.ref[torch.Tensor]"] = {}  # Of tied parameters, so that they stay tied.

    def collect(module: nn.Module, state: Dict[str, Any], prefix: str, _: Any) -> None:
        if sharded.engine is None or sharded.writing or sharded.collected is not None and sharded.stage == 3:
            return  # The parameters are torch's still, or for now.
        for name, p in module._parameters.items():
            if p not in sharded.places or not _lies_in(state.get(prefix + name), p):
                continue  # The module, or a hook of it, made the entry.
            if sharded.collected is not None:
                state[prefix + name] = sharded.collected[p]
                continue
            units = [sharded.units[u] for u, _ in sharded.places[p]]
            tied = copies[p]() if p in copies else None
            if tied is not None and any(value is tied for value in state.values()):
                state[prefix + name] = tied
                continue
            with sharded.reading([] if any(unit.held for unit in units) else units[:1]), torch.no_grad():
                state[prefix + name] = made = p.detach().clone()
            sharded.note_copy_of(p, prefix + name, made)
            if uses[p] > 1:
                copies[p] = weakref.ref(made)

    return collect


def _lies_in(value: Any, p: nn.Parameter) -> bool:
    """Whether an entry of a state_dict() is the parameter itself, as torch puts it there."""
    return isinstance(value, torch.Tensor) and (
        value is p or value.untyped_storage()._cdata == p.untyped_storage()._cdata and value.dtype == p.dtype
        and value.shape == p.shape and value.stride() == p.stride() and value.storage_offset() == p.storage_offset())


def _out_of_slots(sharded: Sharded, value: Any) -> Any:
    """An entry of a state_dict(), with a copy for each tensor in memory that other weights take after it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if sharded.units_at(value) else value
    if isinstance(value, dict):
        changed = {key: part for key, part in ((key, _out_of_slots(sharded, old)) for key, old in value.items()) if part is not value[key]}
        if changed:
            value = copy.copy(value)
            value.update(changed)
        return value
    if isinstance(value, (list, tuple)):
        items = [_out_of_slots(sharded, part) for part in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    # An array of NumPy over the memory of a tensor.
    if type(value).__module__ == "numpy" and hasattr(value, "ctypes") and sharded.memory[0] <= value.ctypes.data < sharded.memory[1]:
        return value.copy()
    return value


@contextlib.contextmanager
def collected(model: nn.Module) -> Iterator[None]:
    """Within, state_dict() on rank 0 works alone: its values were copied to the host, unit by unit. Collective."""
    sharded = sharded_of(model)
    if sharded.collected_within or sharded.writing:  # All ranks have come here before, or each has all values.
        yield
        return
    communicator = sharded.engine.communicator if sharded.engine else None
    values: Dict[nn.Parameter, torch.Tensor] = {}
    for unit in sharded.units if communicator is not None else ():
        with sharded.reading([unit]), torch.no_grad():
            if communicator.rank == 0:
                values.update((p, p.detach().to("cpu", copy=True)) for p in unit.plan.own)
    sharded.collected = values if values else None
    moved = values if sharded.stage == 3 else {}  # So that code of the modules finds their weights.
    versions = sharded.read_versions()
    try:
        sharded.collected_within = True
        if values:
            sharded.guard.follow_all()
        for p, value in moved.items():
            p.data = value
        yield
    finally:
        for p in moved:
            p.data = sharded.homes[p]
        sharded.collected, sharded.collected_within = None, False
        sharded.drop_writes(versions)
        if values:
            sharded.guard.follow_all()


# --- load_state_dict ---

def _take_last(module: nn.Module, take: Callable[..., None]) -> None:
    """Lets `take` see what all other hooks before a load have made, those that are registered later too."""
    key = module._register_load_state_dict_pre_hook(take, with_module=True).id
    load = module.__dict__.get("_load_from_state_dict")

    def load_from(*arguments: Any) -> None:
        if key in module._load_state_dict_pre_hooks:
            module._load_state_dict_pre_hooks.move_to_end(key)
        (load or functools.partial(type(module)._load_from_state_dict, module))(*arguments)

    module.__dict__["_load_from_state_dict"] = load_from


def _take(sharded: Sharded) -> Callable[..., None]:
    def take(module: nn.Module, state: Dict[str, Any], prefix: str, metadata: Dict[str, Any], *_: Any) -> None:
        assigns = metadata.get("assign_to_params_buffers", False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and prefix + name in state:
                module._buffers[name] = torch.empty_like(state[prefix + name], dtype=buffer.dtype, device=sharded.device)
        for name, p in module._parameters.items():
            value = state.get(prefix + name)
            if p is None or value is None or getattr(p, "_forebay", None) is not sharded:
                continue
            sharded.copies.pop(p, None)
            if p.dim() == 0 and value.dim() == 1 and len(value):
                state[prefix + name] = value = value[0]  # As torch takes it.
            if value is p:
                if not assigns:
                    sharded.note_copy(p)
                continue
            if value.shape != p.shape:
                continue  # The module reports it.
            if sharded.writing:
                sharded.loaded.add(p)
                if assigns:
                    p.data.copy_(value)
                    state[prefix + name] = p  # Else torch exchanges the parameter.
                continue
            if sharded.engine is None and not p.is_meta:
                continue  # The parameter has its values, and torch changes them.
            sharded.between_steps()
            sharded.set_value(p, value)
            state[prefix + name] = p  # Copying a tensor to itself, or assigning it, does nothing.
            if not assigns:
                sharded.note_copy(p)
    return take


# --- all values at once ---

@contextlib.contextmanager
def gathered(model: nn.Module, write: bool = False) -> Iterator[nn.Module]:
    """All parameters of a sharded model have their values within. Collective.

    `write`: values that were changed within stay, by load_state_dict() and load() too; all ranks must write the same. Tensors that
    were assigned before, by p.data = tensor, are taken over. An element that is not changed, as its 16 bits show, keeps its fp32
    master, unless it was loaded.
    Errors: InvalidArgument for passes with gradients within, and at stage 3 or with `write` for step(), save(), restore() and digest();
    with `write`, while gradients wait for optimizer.step().
    """
    sharded = sharded_of(model)
    if sharded.writing:
        with torch.no_grad():
            yield model
        return
    if not write:
        with sharded.reading(sharded.units), torch.no_grad():
            yield model
        return
    sharded.between_steps()
    sharded.refuse_moved(sharded.parameters, adopts=True)
    values: Dict[nn.Parameter, torch.Tensor] = {}
    versions = sharded.read_versions()
    try:
        sharded.writing = True
        sharded.loaded.clear()
        sharded.guard.follow_all()
        for unit in sharded.units:
            with sharded.reading([unit]), torch.no_grad():
                values.update((p, p.detach().clone()) for p in unit.plan.own)
        sharded.end_evaluation()
        for p, value in values.items():
            p.data = value
        with torch.no_grad():
            yield model
        values = {p: p.data for p in values}
    finally:
        try:
            for p, home in sharded.homes.items():
                p.data = home
        finally:
            sharded.writing = False
        sharded.drop_writes(versions)  # Until the values are set below.
        sharded.guard.follow_all()
        sharded.end_evaluation()  # Passes and state_dict() within.
    sharded.refuse_replaced()
    for p, value in values.items():
        if value.shape != p.shape:
            raise InvalidArgument(f"parameter {sharded.names[p]} got shape {list(value.shape)} within gathered(), and has "
                                  f"{list(p.shape)} in the shards; change it, as by resize_token_embeddings(), before shard()")
    exact = bytes(p in sharded.loaded or p in sharded.without_values for p in values)
    communicator = sharded.engine.communicator
    everywhere = [exact] if communicator is None else communicator.exchange(exact)  # One rank may load and broadcast.
    for i, (p, value) in enumerate(values.items()):
        sharded.set_value(p, value, changed=not any(theirs[i] for theirs in everywhere))


_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16}


_HEADER_BYTES_MAX = 16 << 20
_SHOWN_MAX = 64


def _shown(name: Any) -> str:
    """A name of a file, for a message: printable, and not all of a long one."""
    text = repr(name)
    return text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "..."


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _open_file(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # A pipe without a writer does not wait.


def read_safetensors(path: Path) -> Iterator[Tuple[str, Union[torch.Tensor, str]]]:
    """Name and values of each tensor of a file, one at a time, or a type that is not read."""
    def refuse(finding: str) -> InvalidArgument:
        return InvalidArgument(f"{path} is no whole safetensors file: {finding}; export or download it again")

    def unique(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
        found: Dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise refuse(f"its header has {_shown(name)} twice")
            found[name] = value
        return found

    with open_to_read(path, "rb", opener=_open_file) as file:
        facts = os.fstat(file.fileno())
        size = facts.st_size
        if not stat.S_ISREG(facts.st_mode):
            raise refuse("it is no regular file")
        start = file.read(8)
        if start.startswith(b"PK"):
            raise InvalidArgument(f"{path} is no safetensors file, and seems to be one of torch.save(); give it to torch.load(), and its "
                                  "values to load_state_dict() before shard()")
        length = struct.unpack("<Q", start)[0] if size >= 8 else size
        if length > size - 8:
            raise refuse("its header is longer than the file")
        if length > _HEADER_BYTES_MAX:
            raise refuse(f"its header has {length} bytes, and at most {_HEADER_BYTES_MAX} are read")
        try:
            entries = json.loads(file.read(length), object_pairs_hook=unique)
        except InvalidArgument:
            raise
        except (ValueError, RecursionError):
            raise refuse("its header is not JSON") from None
        if not isinstance(entries, dict):
            raise refuse("its header is not a JSON object")
        yield from _tensors_of(file, entries, 8 + length, size, refuse)


def _tensors_of(file: Any, entries: Dict[str, Any], start: int, size: int,
                refuse: Callable[[str], InvalidArgument]) -> Iterator[Tuple[str, Union[torch.Tensor, str]]]:
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        shape, offsets = (entry.get("shape"), entry.get("data_offsets")) if isinstance(entry, dict) else (None, None)
        if not (isinstance(shape, list) and all(map(_is_count, shape)) and isinstance(offsets, list)
                and len(offsets) == 2 and all(type(offset) is int for offset in offsets)):
            raise refuse(f"tensor {_shown(name)} has no shape or no place")
        dtype = _TYPES.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
        if dtype is None:
            yield name, _shown(entry.get("dtype"))
            continue
        begin, end = offsets
        if not 0 <= begin <= end <= size - start or end - begin != math.prod(shape) * dtype.itemsize:
            raise refuse(f"tensor {_shown(name)} has not the bytes of its shape")
        if begin == end and math.prod(max(count, 1) for count in shape) >= 1 << 62:
            raise refuse(f"tensor {_shown(name)} has a shape beyond 64 bits")
        if begin == end:
            yield name, torch.empty(shape, dtype=dtype)
            continue
        # Not mapped: where another program shortens the file, a read is an error, and a look at a page ends the process.
        data = bytearray(end - begin)
        file.seek(start + begin)
        if file.readinto(data) != len(data):
            raise refuse("it was shortened while it was read")
        yield name, torch.frombuffer(data, dtype=dtype).view(shape)


def load(model: nn.Module, path: Path) -> List[str]:
    """Loads weights and buffers from a safetensors file, or from all such files of a directory, one tensor at a time.

    The model may have been on the meta device. The names in the files that the model does not have are returned.
    Errors: InvalidArgument for a shape that differs, for a name that two files have, and for parameters that no file has;
    InputOutputError for a file that cannot be read.
    """
    sharded = sharded_of(model)
    if not sharded.writing and (sharded.engine is not None or any(p.is_meta for p in sharded.parameters)):
        sharded.between_steps()
    files = ([os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(".safetensors")]
             if os.path.isdir(path) else [os.fspath(path)])
    if not files and os.path.exists(os.path.join(path, "latest")):
        raise InvalidArgument(f"{path} has no *.safetensors and is a saved state; give it to forebay.restore()")
    if not files:
        raise InvalidArgument(f"{path} has no *.safetensors; give a file or a directory with some")
    by_name = dict(model.named_parameters(remove_duplicate=False))
    buffers = {f"{prefix}.{name}" if prefix else name: (module, name)
               for prefix, module in model.named_modules() for name in module._buffers}
    left = set(sharded.parameters)
    unknown: List[str] = []
    file_of: Dict[str, str] = {}
    for file in files:
        for name, value in read_safetensors(file):
            if file_of.setdefault(name, file) != file:
                raise InvalidArgument(f"{_shown(name)} is in {file_of[name]} and in {file}; give one of the files, or a "
                                      "directory with one model")
            module, key = buffers.get(name, (None, ""))
            target = by_name.get(name, module._buffers[key] if module else None)
            if target is None:
                unknown.append(name)
                continue
            if isinstance(value, str):
                raise InvalidArgument(f"{_shown(name)} has type {value} in {file}, which is not read; write the file again with another type")
            if target.shape != value.shape:
                raise InvalidArgument(f"{name} has shape {list(value.shape)} in {file} and {list(target.shape)} in the "
                                      "model; give the file of this model")
            if module is not None and target.is_meta:
                module._buffers[key] = value.to(sharded.device, target.dtype, copy=True)
            elif target in sharded.places and not sharded.writing:
                sharded.set_value(target, value)
            else:
                sharded.loaded.add(target)
                target.data.copy_(value)
            left.discard(target)
    if left:
        names = sorted(sharded.names[p] for p in left)
        raise InvalidArgument(f"{path} lacks {len(names)} parameters, {names[0]} first; its names must be those of "
                              "model.named_parameters(); if it is a tied parameter, call model.tie_weights() before "
                              "forebay.shard()")
    return unknown


# --- saved states ---

class Saving:
    """A state that save(background=True) writes while training goes on."""

    def __init__(self, sharded: Sharded) -> None:
        self._sharded = sharded
        self._outcome = sharded.saving = SavingOutcome()

    def result(self) -> None:
        """Waits until the state is whole. Collective, between passes, in the thread that trains.

        Errors: InputOutputError; it was not saved.
        """
        self._sharded.between_steps(keeps_gradients=True)
        if self._sharded.saving is self._outcome:
            self._sharded.end_saving()
        if self._outcome.error is not None:
            raise self._outcome.error


_OTHERS_BYTES_MAX = 128 << 20


def _persistent_buffers(model: nn.Module) -> Iterator[Tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set and not buffer.is_meta:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _others(model: nn.Module) -> Dict[str, torch.Tensor]:
    """Buffers, and parameters of integers and complex numbers: state_dict() has them, and no engine holds them."""
    with unwatched():
        parameters = {name: p for name, p in model.named_parameters() if not describe.is_held(p) and p.numel() and not p.is_meta}
    return {**dict(_persistent_buffers(model)), **parameters}


def _encoded_others(model: nn.Module) -> Dict[str, Dict[str, Any]]:
    found = _others(model)
    size = sum(one.numel() * one.element_size() for one in found.values())
    if size > _OTHERS_BYTES_MAX:
        parameters = {name: one for name, one in found.items() if isinstance(one, nn.Parameter)}
        size -= sum(one.numel() * one.element_size() for one in parameters.values())
        if size > _OTHERS_BYTES_MAX:
            raise InvalidArgument(f"the buffers of the model have {size} bytes, and a state holds at most {_OTHERS_BYTES_MAX}; register "
                                  "large ones with persistent=False, or make them frozen parameters")
        warnings.warn(f"{len(parameters)} parameters that are no floating-point numbers, {next(iter(parameters))} first, are too large for "
                      "a saved state and are left out; load them before restore() as they were loaded now", stacklevel=3)
        found = {name: one for name, one in found.items() if name not in parameters}
    return {name: _encoded(name, one) for name, one in found.items()}


def _encoded(name: str, one: torch.Tensor) -> Dict[str, Any]:
    if one.layout != torch.strided:
        raise InvalidArgument(f"{name} has the layout {one.layout}, and a state holds dense tensors; make it dense, or register it with "
                              "persistent=False")
    values = one.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = ctypes.string_at(values.data_ptr(), values.numel() * values.element_size()) if values.numel() else b""
    return {"shape": list(one.shape), "dtype": str(one.dtype).replace("torch.", ""), "data": base64.b64encode(data).decode()}


def _decoded(entry: Dict[str, Any]) -> torch.Tensor:
    data = bytearray(base64.b64decode(entry["data"]))
    dtype = getattr(torch, entry["dtype"])
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).view(entry["shape"])


def _take_others(model: nn.Module, encoded: Dict[str, Dict[str, Any]]) -> None:
    for name, one in _others(model).items():
        entry = encoded.get(name)
        if entry is None or not one.numel():
            continue
        if list(one.shape) != entry["shape"]:  # copy_() would repeat the values.
            raise ValueError(f"{name} has shape {_shown(entry['shape'])}, and {list(one.shape)} in the model")
        with torch.no_grad():
            one.copy_(_decoded(entry))


def _extra_states(model: nn.Module) -> Dict[str, Any]:
    """The extra states of modules, as JSON; with a warning for those that JSON cannot hold."""
    encoded: Dict[str, Any] = {}
    sharded = sharded_of(model)
    # The smallest unit with a module, as in state_dict().
    units = {module: unit for unit in sorted(sharded.units, key=lambda unit: -len(list(unit.plan.module.modules())))
             for module in unit.plan.module.modules()}
    for name, module in model.named_modules():
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        with sharded.reading([units[module]] if module in units and sharded.engine is not None else []):
            value = module.get_extra_state()
            if isinstance(value, torch.Tensor):
                lies_in = sharded.units_at(value) if sharded.stage == 3 and sharded.engine is not None else []
                if lies_in and not any(unit.held for unit in lies_in):
                    raise Unsupported(f"the extra state of {name or 'the model'} is a view of weights of another module, which are "
                                      "released at stage 3; keep a copy that was made within forebay.gathered(model)")
                encoded[name] = _encoded(f"the extra state of {name or 'the model'}", value)
                continue
        try:
            is_held = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            is_held = False
        if is_held:
            encoded[name] = {"value": value}
        else:
            warnings.warn(f"the extra state of {name or 'the model'} is a {type(value).__name__} that JSON cannot hold, and is not saved; "
                          "keep it in a file of its own", stacklevel=3)
    if sharded.engine is not None:
        sharded.end_evaluation()
    return encoded


def _take_extra_states(model: nn.Module, encoded: Dict[str, Any]) -> None:
    for name, module in model.named_modules():
        if name in encoded and type(module).set_extra_state is not nn.Module.set_extra_state:
            entry = encoded[name]
            module.set_extra_state(_decoded(entry) if "data" in entry else entry["value"])


def _refuse_no_json(value: Any, place: str) -> None:
    """Names the first part of the trainer's state that JSON cannot hold."""
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise InvalidArgument(f"a key of {place} is of type {type(key).__name__}, and JSON has names alone, as str({_shown(key)})")
            _refuse_no_json(part, f"{place}[{_shown(key)}]")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            _refuse_no_json(part, f"{place}[{index}]")
    elif not isinstance(value, (str, int, float, bool, type(None))):
        raise InvalidArgument(f"{place} is of type {type(value).__name__}, which JSON cannot hold; give numbers, text, lists and dicts, as by "
                              "value.tolist(), or save it in a file of its own")


def save(model: nn.Module, directory: Path, state: Any = None, background: bool = False) -> Optional[Saving]:
    """Saves weights, moments, step counts, buffers and `state` (anything that JSON can hold) under `directory`.

    Buffers, integer and complex parameters, and the extra states of modules (a tensor, or what JSON can hold) are those of rank 0
    that state_dict() has, 128 MiB at most.

    While gradients wait for optimizer.step(), the state is that of the step before, without them. A kill at any moment
    leaves the last saved state whole. restore() takes it at any number of ranks and any stage.
    `background`: a thread writes a copy in host memory while training goes on; it needs shard(save_async=True). The state
    is whole when result() of the returned object has returned. The next save() raises its error, and restore() warns of it.
    Collective. Errors: InputOutputError, and InvalidArgument for a directory with the state of another model, or with a file
    `latest` of another tool; training may go on.
    """
    sharded = sharded_of(model)
    sharded.between_steps(keeps_gradients=True)
    sharded.refuse_replaced()
    sharded.refuse_written()
    error = sharded.end_saving()
    if error is not None:
        raise type(error)(f"the state that save(background=True) began to save before is not saved, and this save was not begun, so call "
                          f"it again: {error}") from error
    with unwatched():
        shapes = {sharded.names[p]: {"shape": list(p.shape), "dtype": str(p.dtype).replace("torch.", "")}
                  for p in sharded.parameters}
    saved = {"parameters": shapes, "buffers": _encoded_others(model), "extra": _extra_states(model), "state": state}
    try:
        text = json.dumps(saved).encode()
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, TypeError):
            _refuse_no_json(state, "state")
        raise InvalidArgument(f"JSON cannot hold `state`: {error}; give numbers, text, lists and dicts") from None
    _refuse_no_json(state, "state")  # Keys that are numbers would come back as text.
    if background and not sharded.options.get("save_async"):
        raise InvalidArgument("save(background=True) needs host memory for a copy; give shard(save_async=True), or leave out "
                              "background")
    save_here = sharded.engine.save_begin if background else sharded.engine.save
    _without_dropped_models(lambda: save_here(directory, text))
    return Saving(sharded) if background else None


_OTHER_ENGINE = "another engine of this process"


def _without_dropped_models(save_here: Callable[[], None]) -> None:
    """Saves, again where the directory is that of another model, which may have been dropped and be in a cycle still."""
    try:
        return save_here()
    except InvalidArgument as error:  # On all ranks.
        if _OTHER_ENGINE not in str(error):
            raise
    gc.collect()
    try:
        save_here()
    except InvalidArgument as error:
        raise InvalidArgument(str(error).replace(_OTHER_ENGINE, "another model of this program").replace(
            "destroy the other engine first", "drop the other one first")) from None


def restore(model: nn.Module, directory: Path) -> Any:
    """Takes the latest state of save(), and returns its `state`. Collective.

    Errors: InputOutputError where there is none, Corruption, InvalidArgument for another model.
    """
    sharded = sharded_of(model)
    sharded.between_steps()
    error = sharded.end_saving()
    if error is not None:
        warnings.warn(f"the state that save(background=True) began to save is not saved: {error}", stacklevel=2)
    try:
        text = sharded.engine.load(directory)
    except InvalidArgument as error:
        buffers = [name for name, _ in _persistent_buffers(model) if f"and {name} is not one of this model" in str(error)]
        if not buffers:
            raise
        raise InvalidArgument(f"the state in {directory} has {buffers[0]} as a frozen parameter, and it is a buffer of this model; import "
                              f"it with `forebay state import --leave-out {buffers[0]}`, and set the buffer in the program") from None
    sharded.without_values.clear()
    sharded.optimizer = None  # The moments are those of the state.
    try:
        saved = json.loads(text) if text else {}
        shapes = {name: entry["shape"] for name, entry in saved.get("parameters", {}).items()}
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
        raise InvalidArgument(f"the state in {directory} was not saved by forebay.save(); its weights are loaded, and its "
                              "text cannot be read; use the interface that saved it") from None
    for name, shape in shapes.items():
        p = dict(model.named_parameters()).get(name)
        if p is not None and list(p.shape) != shape:
            raise InvalidArgument(f"{name} has shape {_shown(shape)} in {directory} and {list(p.shape)} in the "
                                  "model; give the state of this model")
    try:
        _take_others(model, saved.get("buffers", {}))
        _take_extra_states(model, saved.get("extra", {}))
    except (ValueError, RuntimeError, AttributeError, TypeError, KeyError) as error:
        raise InvalidArgument(f"the weights of {directory} are loaded, and a buffer is not as in the model: {error}; give the state of "
                              "this model") from None
    return saved.get("state")


def _checksums(sharded: Sharded) -> List[int]:
    found = []
    for unit in sharded.units:
        with sharded.reading([unit]), torch.no_grad():
            found += [checksum(p) for p in unit.plan.own]
    return found


def restore_over_weights(model: nn.Module, directory: Path) -> None:
    """restore() of a checkpoint whose other files have given the weights. Warns where those differ. Collective."""
    sharded = sharded_of(model)
    sharded.commit()
    loaded = _checksums(sharded)
    restore(model, directory)
    if _checksums(sharded) != loaded:
        warnings.warn(f"the weights in {directory} differ from those in the other files of the checkpoint, and training goes on with "
                      "those in the directory. To use the others, as after an edit, remove the directory; then moments begin at "
                      "zero", stacklevel=2)


def report(model: nn.Module) -> core.Report:
    """The plan and the statistics of a sharded model: {"model", "options", "plan", "statistics"}. Collective.

    print() shows a summary of the memory.
    """
    sharded = sharded_of(model)
    sharded.commit()
    return sharded.engine.report()


def digest(model: nn.Module) -> str:
    """XXH3-128 over the fp32 masters of all parameters: equal for every stage and offload. Collective."""
    sharded = sharded_of(model)
    sharded.between_steps()
    sharded.refuse_replaced()
    sharded.refuse_written()
    return sharded.engine.digest()
