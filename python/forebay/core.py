"""The objects of the C interface: options, devices, arenas, pinned pools, ranks, engines, checkpointers.

Sizes are bytes and addresses are integers. A stream is 0 (the device's default), an integer, or an object with
`cuda_stream` or `__cuda_stream__`. Every function may raise forebay.Error; where a docstring has a line
"Errors", it names the usual ones. forebay.h says more about each call.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import numbers
import os
import re
import subprocess
import sys
import tempfile
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Type, Union

from forebay import _library
from forebay._library import Error, Handle, InvalidArgument, OutOfMemory, Unavailable, library, report, result

NO_STREAM = ctypes.c_void_p(-1).value  # Blocks that only the host uses.
PERSISTENT, FIXED, PAUSABLE = 1, 2, 4
BACKWARD_READS_NOTHING = 1
FROZEN, REPLICATED, OPTIONAL, ELEMENTWISE = 1, 2, 4, 8
WHOLE_STEP = -1
DTYPES = {"fp32": 0, "bf16": 1, "fp16": 2}

Stream = Any


def _stream(stream: Stream) -> Optional[int]:
    if stream is None or isinstance(stream, int):
        return stream
    if hasattr(stream, "cuda_stream"):
        return stream.cuda_stream
    if hasattr(stream, "__cuda_stream__"):
        return stream.__cuda_stream__()[1]
    raise InvalidArgument(f"stream is {type(stream).__name__}; give 0, an address or an object with __cuda_stream__")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return ",".join(os.fspath(part) if isinstance(part, os.PathLike) else str(part) for part in value)
    return str(value)


def _option_name(name: str) -> str:
    return name if name.startswith("agree.") else name.replace("_", "-")


def version() -> str:
    """The version of the loaded library."""
    return library().version().decode()


class Options(Handle):
    """Named values, as on the command lines: Options(stage=3, offload_tier="nvme:/mnt/a").

    Python names have underscores where the command line has dashes. True and False are "on" and "off".
    Errors: InvalidArgument with the allowed values, or with the nearest name.
    """

    _destroy = "options_destroy"

    def __init__(self, **options: Any) -> None:
        super().__init__(library().options_create)
        for name, value in options.items():
            if value is not None:
                self.set(name, value)

    def set(self, name: str, value: Any) -> None:
        """Sets one option. `value` is a text, a number, a bool or a list of paths."""
        try:
            library().options_set(self, _option_name(name).encode(), _text(value).encode(errors="surrogateescape"))
        except InvalidArgument as error:
            raise InvalidArgument(str(error).replace("forebay_options_report()", "forebay.Options().list()")) from None

    def get(self, name: str) -> str:
        """The value of one option as text."""
        value = result(library().options_get, ctypes.c_char_p, self, _option_name(name).encode())
        return value.decode(errors="surrogateescape")

    def read_environment(self) -> None:
        """Sets rank, size, local-rank, store and interface from the launcher's environment."""
        library().options_from_environment(self)

    def list(self) -> List[Dict[str, str]]:
        """All options: {"name", "value", "values", "help"} each."""
        return report(library().options_report, self)


class _Reported(Handle):
    """A handle with a report in JSON."""

    _prefix = ""

    def report(self) -> Dict[str, Any]:
        """Facts and statistics; the keys are those of forebay.h."""
        return report(getattr(library(), self._prefix + "_report"), self)


class _Numbered(_Reported):
    """The same, and numbers by path."""

    def number(self, name: str) -> int:
        """One number of report() by its path, "plan.bytes.parameters"."""
        return result(getattr(library(), self._prefix + "_number"), ctypes.c_uint64, self, name.encode())


class Device(_Reported):
    """A place where bytes lie and work is queued: "host", "cuda:N", or "model" (books without bytes).

    Options: device_memory, granularity. Errors: Unavailable without a driver or such a device.
    """

    _destroy, _prefix = "device_close", "device"

    def __init__(self, name: str = "host", **options: Any) -> None:
        self.name = name
        with Options(**options) as given:
            super().__init__(library().device_open, name.encode(), given)

    def stream_create(self) -> int:
        """Makes a stream. Destroy it before the device is closed."""
        return result(library().stream_create, ctypes.c_void_p, self)

    def stream_destroy(self, stream: int) -> None:
        """Waits for the stream's work, then ends it."""
        library().stream_destroy(self, stream)

    def synchronize(self, stream: Stream = None) -> None:
        """The host waits until the work that is queued on the stream has run."""
        library().stream_synchronize(self, _stream(stream))

    def wait(self, stream: Stream, other: Stream) -> None:
        """Later work on `stream` waits for the work that is queued on `other` now."""
        library().stream_wait(self, _stream(stream), _stream(other))

    def copy(self, target: int, source: int, size: int, stream: Stream = None) -> None:
        """Queues a copy of `size` bytes between any two memories of device and host."""
        library().copy(self, target, source, size, _stream(stream))

    def fill(self, target: int, value: int, size: int, stream: Stream = None) -> None:
        """Queues the fill of `size` bytes with a byte."""
        library().fill(self, target, value, size, _stream(stream))


class Arena(_Numbered):
    """Device memory in stream order, from one address range; it does not fragment.

    Options: arena_limit, arena_reserve, arena_chunk, arena_growth, arena_largest_chunk, arena_history.
    """

    _destroy, _prefix = "arena_destroy", "arena"

    def __init__(self, device: Device, **options: Any) -> None:
        with Options(**options) as given:
            super().__init__(library().arena_create, device, given)

    def allocate(self, size: int, stream: Stream = None, tag: int = 0, flags: int = 0) -> int:
        """The address of a block of `size` bytes, aligned to 512, that `stream` uses first.

        Errors: OutOfMemory, with the free memory and the tags that hold memory.
        """
        return result(library().arena_allocate, ctypes.c_void_p, self, size, _stream(stream), tag, flags)

    def free(self, block: int, stream: Stream = None) -> None:
        """Frees a block; its last use is queued on `stream`."""
        library().arena_free(self, block, _stream(stream))

    def record_stream(self, block: int, stream: Stream) -> None:
        """Says that `stream` uses the block too."""
        library().arena_record_stream(self, block, _stream(stream))

    def tag(self, name: str, limit: int = 0, flags: int = 0) -> int:
        """Makes an account to which blocks are charged, with a limit in bytes; 0: none."""
        return result(library().arena_tag_create, ctypes.c_int32, self, name.encode(), limit, flags)

    def pause(self, tag: int, keep: bool = True) -> None:
        """Gives the memory of a PAUSABLE tag back to the device; addresses stay. `keep`: contents return."""
        library().arena_pause(self, tag, keep)

    def resume(self, tag: int) -> None:
        """Takes the memory of a paused tag again. Errors: OutOfMemory; the tag stays paused."""
        library().arena_resume(self, tag)

    def trim(self) -> int:
        """Gives wholly free chunks back to the device; the bytes given back."""
        return result(library().arena_trim, ctypes.c_uint64, self)

    def reset_peaks(self) -> None:
        """Sets the peaks to the present values."""
        library().arena_reset_peaks(self)

    def snapshot(self, path: Union[str, os.PathLike]) -> None:
        """Writes a file for PyTorch's memory viewer and forebay.explain()."""
        library().arena_snapshot(self, os.fsencode(path))


class PinnedPool(_Numbered):
    """Pinned host memory in exact sizes.

    Options: pinned_limit, pinned_slab, pinned_numa_node, pinned_huge_pages.
    """

    _destroy, _prefix = "pinned_pool_destroy", "pinned_pool"

    def __init__(self, device: Device, **options: Any) -> None:
        with Options(**options) as given:
            super().__init__(library().pinned_pool_create, device, given)

    def allocate(self, size: int) -> int:
        """The address of a block of `size` bytes, aligned to a page. Errors: OutOfMemory."""
        return result(library().pinned_pool_allocate, ctypes.c_void_p, self, size)

    def free(self, block: int, stream: Stream = NO_STREAM) -> None:
        """Frees a block once the work queued on `stream` has run; with NO_STREAM at once."""
        library().pinned_pool_free(self, block, _stream(stream))

    def prewarm(self, size: int, block: int = 0) -> None:
        """Takes memory until `size` bytes are held. `block`: the size of blocks to come; 0: they differ."""
        library().pinned_pool_prewarm(self, size, block)

    def trim(self) -> int:
        """Gives slabs without a block back to the system; the bytes given back."""
        return result(library().pinned_pool_trim, ctypes.c_uint64, self)


class _StoreCalls(ctypes.Structure):
    """forebay_store_calls over an object with the methods of torch.distributed.Store."""

    SET = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64)
    GET = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64,
                           ctypes.POINTER(ctypes.c_uint64))
    REMOVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)
    RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    _fields_ = [("size", ctypes.c_uint64), ("user", ctypes.c_void_p), ("set", SET), ("get", GET),
                ("set_if_absent", SET), ("remove", REMOVE), ("release", RELEASE)]
    ABSENT = 2**64 - 1

    def __init__(self, store: Any) -> None:
        def guarded(body: Callable[..., None]) -> Callable[..., int]:
            def call(*arguments: Any) -> int:
                try:
                    body(*arguments)
                    return 0
                except Exception:
                    return Unavailable.code
            return call

        def get(_: Any, name: bytes, text: int, capacity: int, size: Any) -> None:
            # Store.get() waits for the name, so it is asked for only when it is there.
            value = store.get(name.decode()) if store.check([name.decode()]) else None
            size[0] = self.ABSENT if value is None else len(value)
            if value is not None and len(value) <= capacity:
                ctypes.memmove(text, value, len(value))

        super().__init__(
            ctypes.sizeof(type(self)), None,
            self.SET(guarded(lambda _, name, text, size: store.set(name.decode(), ctypes.string_at(text, size)))),
            self.GET(guarded(get)),
            self.SET(guarded(lambda _, name, text, size: store.compare_set(
                name.decode(), "", ctypes.string_at(text, size)))),
            self.REMOVE(guarded(lambda _, name: store.delete_key(name.decode()))))


@contextlib.contextmanager
def _ctrl_c_in_callbacks() -> Iterator[None]:
    """KeyboardInterrupt that comes in a callback is raised at the end. ctypes would only print it."""
    came, before = [], sys.unraisablehook

    def hook(found: Any) -> None:
        if issubclass(found.exc_type, KeyboardInterrupt):
            came.append(found.exc_value)
        else:
            before(found)

    sys.unraisablehook = hook
    try:
        yield
    except Error as error:
        if came:
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = before
    if came:
        raise KeyboardInterrupt


class Communicator(_Reported):
    """A set of ranks and the operations that they do together; collective.

    `store`: an object with set, get, check, compare_set and delete_key, such as a torch.distributed.Store;
    None: the option store. `nccl`: the address of the trainer's ncclComm_t.
    Options: rank, size, store, interface, configuration, deadline, join_deadline, communicator, nccl_library,
    nccl_order. Without rank and size the launcher's environment counts.
    Errors: Timeout names the ranks that did not come, PeerLost a rank that ended.
    """

    _destroy, _prefix = "communicator_destroy", "communicator"

    def __init__(self, device: Device, store: Any = None, nccl: Optional[int] = None, prefix: str = "",
                 **options: Any) -> None:
        self._calls = None if isinstance(store, (str, os.PathLike)) or store is None else _StoreCalls(store)
        options["store"] = (prefix or None) if self._calls is not None else store
        calls = None if self._calls is None else ctypes.addressof(self._calls)
        with Options(**options) as given, _ctrl_c_in_callbacks():
            super().__init__(library().communicator_create, device, given, calls, nccl)
        self._read_rank(device)

    def _read_rank(self, device: Device) -> None:
        self.device = device
        rank, size = ctypes.c_int32(), ctypes.c_int32()
        library().communicator_rank(self, ctypes.byref(rank), ctypes.byref(size))
        self.rank, self.size = rank.value, size.value

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        library().communicator_barrier(self)

    def exchange(self, mine: bytes) -> List[bytes]:
        """Every rank gives the same number of bytes; the pieces of all ranks in rank order."""
        everything = ctypes.create_string_buffer(max(1, len(mine) * self.size))
        library().communicator_exchange(self, mine, len(mine), ctypes.addressof(everything))
        return [everything.raw[r * len(mine):(r + 1) * len(mine)] for r in range(self.size)]

    def abort(self, code: int, text: str) -> None:
        """Fails this communicator on every rank."""
        library().communicator_abort(self, code, text.encode())


class LocalGroup(Handle):
    """Ranks as threads of this process. Options: deadline."""

    _destroy = "local_group_destroy"

    def __init__(self, size: int, **options: Any) -> None:
        with Options(**options) as given:
            super().__init__(library().local_group_create, size, given)

    def communicator(self, rank: int, device: Device) -> Communicator:
        """The communicator of one rank on that rank's own device. Once per rank."""
        made = Communicator.__new__(Communicator)
        Handle.__init__(made, library().local_group_communicator, self, rank, device)
        made._read_rank(device)
        return made


class StepResult(ctypes.Structure):
    """The result of Engine.step(), the same on every rank."""

    _fields_ = [("grad_norm", ctypes.c_double), ("loss_scale", ctypes.c_double), ("metric_sum", ctypes.c_double),
                ("skipped", ctypes.c_int32), ("stop", ctypes.c_int32), ("abandoned", ctypes.c_int32),
                ("reserved", ctypes.c_int32)]


class Report(Dict[str, Any]):
    """The report of an engine, as a dictionary; str() is a summary of its memory."""

    def __str__(self) -> str:
        options, planned, measured = self["options"], self["plan"], self.get("statistics")
        counts = {False: 0, True: 0}
        for parameter in (one for unit in self["model"]["units"] for one in unit["parameters"]):
            counts[parameter["frozen"]] += parameter["count"]
        element, states = (4, 8) if options["dtype"] == "fp32" else (2, 12)
        states -= 0 if options["optimizer"] in ("adamw", "adam") else 4
        rows = [("without sharding", counts[False] * (2 * element + states) + counts[True] * element, None)]
        for place, bytes_planned, bytes_measured in (
                ("device", planned["bytes"]["total"], measured and measured["peak"]["total"]),
                ("host", planned["host"]["total"], measured and measured["host_bytes"]),
                ("files", planned["files"]["total"], measured and measured["file_bytes"])):
            if bytes_planned:
                rows.append((place, bytes_planned, bytes_measured))
        lines = [f"{sum(counts.values()):,} parameters in {options['dtype']}, ranks: {planned['ranks']}, "
                 f"ZeRO stage {options['stage']}, offload {options['offload']}",
                 f"{'memory of a rank, MiB':<22}{'planned':>10}" + (f"{'measured':>10}" if measured else "")]
        for place, *sizes in rows:
            lines.append(f"  {place:<20}" + "".join(f"{size / (1 << 20):>10.1f}" for size in sizes if size is not None))
        return "\n".join(lines)


class Engine(_Numbered):
    """The units of a model, their placement under a ZeRO stage, and the training step.

    Describe (add_unit, add_parameter, tie), commit, set values, then train; forebay.h has the order.
    Options: stage, dtype, micro_steps, offload, ..., order_of_units, average, beta1, beta2, epsilon.
    Without a device it only plans; the option size is the number of ranks then.
    """

    _destroy, _prefix = "engine_destroy", "engine"

    def __init__(self, device: Optional[Device] = None, communicator: Optional[Communicator] = None,
                 **options: Any) -> None:
        self.device, self.communicator = device, communicator
        with Options(**options) as given:
            if device is None:
                super().__init__(library().engine_plan, given)
            else:
                super().__init__(library().engine_create, device, communicator, None, None, given)

    def report(self) -> Report:
        """The options, the model, the plan and, once committed, the statistics; the keys are those of forebay.h."""
        return Report(super().report())

    def add_unit(self, name: str, flags: int = 0) -> int:
        """Adds parameters that are gathered together; the unit's index."""
        return result(library().engine_add_unit, ctypes.c_int32, self, name.encode(), flags)

    def add_parameter(self, unit: int, name: str, count: int, group: int = 0, flags: int = 0) -> int:
        """Adds a parameter of `count` elements; its index within the unit."""
        return result(library().engine_add_parameter, ctypes.c_int32, self, unit, name.encode(), count, group, flags)

    def declare_shape(self, unit: int, index: int, shape: Sequence[int]) -> None:
        """Declares the dimensions of a parameter, which saved state keeps for the tools that read it."""
        library().engine_declare_shape(self, unit, index, (ctypes.c_uint64 * len(shape))(*shape), len(shape))

    def declare_split(
        self, unit: int, index: int, shape: Sequence[int], dimension: int, part: int, parts: int, sections: int = 1
    ) -> None:
        """Declares a parameter as part `part` of `parts` of a tensor of dimensions `shape`, for saved state."""
        library().engine_declare_split(
            self, unit, index, (ctypes.c_uint64 * len(shape))(*shape), len(shape), dimension, sections, part, parts
        )

    def freeze(self, unit: int, index: int, frozen: bool = True) -> None:
        """Freezes a parameter from the next step on, or unfreezes it. Every rank makes the same calls."""
        library().engine_freeze(self, unit, index, frozen)

    def reset_moments(self) -> None:
        """Sets all m and v to zero, and "applied_steps": the next step is the first of another optimizer. All ranks."""
        library().engine_reset_moments(self)

    def swap_average(self) -> None:
        """Exchanges the weights and their moving average (option "ema"); the next call exchanges them again."""
        library().engine_swap_average(self)

    def tie(self, unit: int, of_unit: int, of_index: int) -> int:
        """`unit` uses a parameter of an earlier unit too; its index within `unit`."""
        return result(library().engine_tie, ctypes.c_int32, self, unit, of_unit, of_index)

    def add_model(self, config: str) -> None:
        """Adds the units of a Hugging Face config.json (its text), gpt2 or llama."""
        library().engine_add_model(self, config.encode())

    def commit(self) -> None:
        """Compares the ranks' plans and takes all memory; parameters are zero. Collective.

        Errors: OutOfMemory names the largest pool, InvalidArgument a difference and its ranks.
        """
        library().engine_commit(self)

    def address(self, unit: int, index: int) -> int:
        """The address of a parameter in the engine's dtype. It never changes."""
        return result(library().engine_address, ctypes.c_void_p, self, unit, index)

    def set(self, unit: int, index: int, dtype: str, values: int, count: int, first: int = 0, changed: bool = False) -> None:
        """Sets elements of a parameter from host memory at `values`; all ranks give the same.

        `changed`: the values were read in the engine's dtype and changed, and an element that has its value already keeps its master.
        """
        call = library().engine_set_changed if changed else library().engine_set
        call(self, unit, index, DTYPES[dtype], values, first, count)

    def get(self, unit: int, index: int, dtype: str, values: int, count: int, first: int = 0) -> None:
        """Reads elements of a parameter's master into host memory at `values`. Collective."""
        library().engine_get(self, unit, index, DTYPES[dtype], values, first, count)

    def digest(self) -> str:
        """XXH3-128 over the masters of all parameters. Collective."""
        text = ctypes.create_string_buffer(33)
        library().engine_digest(self, ctypes.addressof(text))
        return text.value.decode()

    def hyperparameter(self, name: str, value: float, group: int = WHOLE_STEP) -> None:
        """Sets lr, weight-decay, beta1, ... of a parameter group, or clip, gradient-factor, ... of the step."""
        library().hyperparameter(self, group, name.encode(), value)

    def step_begin(self) -> None:
        """Begins a step."""
        library().step_begin(self)

    def micro_step_begin(self, index: int) -> None:
        """Begins micro-step 0, 1, ... of the step."""
        library().micro_step_begin(self, index)

    def evaluation_begin(self) -> None:
        """Opens forward passes that belong to no step, until evaluation_end()."""
        library().evaluation_begin(self)

    def evaluation_end(self) -> None:
        """Closes the passes of evaluation_begin()."""
        library().evaluation_end(self)

    def acquire(self, unit: int, backward: bool = False, stream: Stream = None) -> None:
        """Gathers a unit; the stream waits for it. On a host device this call waits itself."""
        library().acquire(self, unit, backward, _stream(stream))
        if self.device is not None and self.device.name == "host":
            library().stream_synchronize(self.device, _stream(stream))

    def parameter(self, unit: int, index: int) -> int:
        """The address of a parameter of an acquired unit."""
        return result(library().parameter, ctypes.c_void_p, self, unit, index)

    def gradient(self, unit: int, index: int) -> Tuple[int, bool]:
        """The address for a gradient of a unit acquired backward, and whether to add there."""
        address, adds = ctypes.c_void_p(), ctypes.c_int32()
        library().gradient(self, unit, index, ctypes.byref(address), ctypes.byref(adds))
        return address.value or 0, bool(adds.value)

    def zeroed_gradient(self, unit: int, index: int, stream: Stream = None) -> int:
        """The same for a trainer that only adds: the memory is zeroed, on the stream, where it holds no value.

        On a host device this call waits itself.
        """
        address = result(library().zeroed_gradient, ctypes.c_void_p, self, unit, index) or 0
        if self.device is not None and self.device.name == "host":
            library().stream_synchronize(self.device, _stream(stream))
        return address

    def release(self, unit: int, stream: Stream = None) -> None:
        """Ends the latest acquisition of the unit."""
        library().release(self, unit, _stream(stream))

    def loss_scale(self) -> float:
        """The trainer multiplies its loss by this: 1 except for fp16."""
        return result(library().loss_scale, ctypes.c_double, self)

    def norm(self) -> float:
        """The global norm of the gradients before step(). Collective."""
        return result(library().norm, ctypes.c_double, self)

    def step(self) -> StepResult:
        """Decides about the step and queues the update. Collective."""
        done = StepResult()
        library().step(self, ctypes.addressof(done), ctypes.sizeof(done))
        return done

    def abandon(self, micro_steps: int = 0) -> None:
        """Gives the step up: gradients are dropped, acquisitions end. Collective with abandon() or step().

        `micro_steps`: the number that the other ranks run; 0: the option micro_steps.
        """
        library().abandon(self, micro_steps)

    def lock(self, directory: Union[str, os.PathLike]) -> None:
        """Keeps other jobs from saving in a directory until the engine is closed. Collective.

        Errors: Unavailable names the process that holds it.
        """
        library().lock(self, os.fsencode(directory))

    def save(self, directory: Union[str, os.PathLike], state: bytes = b"") -> None:
        """Saves weights, optimizer states and `state` under a directory. Collective.

        Errors: InputOutputError on all ranks; the last saved state stays whole.
        """
        library().save(self, os.fsencode(directory), state, len(state))

    def save_begin(self, directory: Union[str, os.PathLike], state: bytes = b"", keep: int = 1) -> None:
        """The same as save() while training goes on. Needs the option save_async. Collective.

        Errors: InputOutputError on all ranks, also for a save that was begun earlier.
        """
        library().save_begin(self, os.fsencode(directory), state, len(state), keep)

    def save_end(self) -> None:
        """Waits until the state of save_begin() is whole under its name. Collective."""
        library().save_end(self)

    def load(self, directory: Union[str, os.PathLike]) -> bytes:
        """Loads the latest saved state, of any number of ranks and any stage; the `state` given to save().

        Errors: InputOutputError, Corruption, InvalidArgument for another model.
        """
        state, size = ctypes.c_void_p(), ctypes.c_uint64()
        library().load(self, os.fsencode(directory), ctypes.byref(state), ctypes.byref(size))
        return ctypes.string_at(state.value, size.value) if size.value else b""

    def spill(self, states: int = 15) -> None:
        """Gives the device memory of states back until fetch(). Needs the option spillable."""
        library().spill(self, states)

    def fetch(self) -> None:
        """Takes back all spilled states. Errors: OutOfMemory; it may be repeated."""
        library().fetch(self)


class Checkpointer(_Numbered):
    """Keeps activations that a recomputation starts from: whole, partitioned over ranks, or offloaded.

    Options: activation_micro_batches, activation_tier, activation_device_memory, ...
    """

    _destroy, _prefix = "checkpointer_destroy", "checkpointer"

    def __init__(self, device: Device, communicator: Communicator, **options: Any) -> None:
        with Options(**options) as given:
            super().__init__(library().checkpointer_create, device, communicator, None, given)

    def declare(self, unit: int, slot: int, size: int, **options: Any) -> None:
        """Declares an activation of `size` bytes that each micro-batch saves, in forward order."""
        with Options(**options) as given:
            library().checkpointer_declare(self, unit, slot, size, given)

    def commit(self, region: Optional[int] = None) -> None:
        """Takes all memory, or uses `region` of number("plan.device_bytes") bytes. Collective."""
        library().checkpointer_commit(self, region)

    def save(self, unit: int, slot: int, micro_batch: int, source: int, size: int, record: bytes = b"",
             stream: Stream = None) -> None:
        """Saves an activation with a small record."""
        library().checkpointer_save(self, unit, slot, micro_batch, source, size, record, len(record),
                                    _stream(stream))

    def load(self, unit: int, slot: int, micro_batch: int, stream: Stream = None) -> Tuple[int, int, bytes]:
        """Address, size and record of a saved activation, valid until load_end()."""
        data, size, record, record_size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_uint64()
        library().checkpointer_load(self, unit, slot, micro_batch, _stream(stream), ctypes.byref(data),
                                    ctypes.byref(size), ctypes.byref(record), ctypes.byref(record_size))
        text = ctypes.string_at(record.value, record_size.value) if record_size.value else b""
        return data.value or 0, size.value, text

    def load_end(self, unit: int, slot: int, micro_batch: int) -> None:
        """Ends a load, and with it the saved activation."""
        library().checkpointer_load_end(self, unit, slot, micro_batch)

    def discard(self, unit: int, slot: int, micro_batch: int) -> None:
        """Drops a saved activation that will not be loaded."""
        library().checkpointer_discard(self, unit, slot, micro_batch)

    def discard_all(self) -> None:
        """Drops all saved activations."""
        library().checkpointer_discard_all(self)

    def check(self) -> None:
        """Raises the first failure of queued work on any rank. Collective."""
        library().checkpointer_check(self)


def devices() -> List[Dict[str, Any]]:
    """The cuda devices of this machine: {"name", "memory_bytes", ...} each; empty without a driver."""
    try:
        return report(library().machine_report)["devices"]
    except Unavailable:
        return []


def plan(model: Any, ranks: int = 1, **options: Any) -> Report:
    """The memory and traffic of a training, without a device: {"model", "options", "plan"}; print() shows a summary.

    `model`: a torch.nn.Module (on the meta device too), or a Hugging Face config as a dict, an object with
    to_dict(), a JSON text or the path of config.json or of its directory. `options` are those of shard().
    """
    if not isinstance(ranks, numbers.Integral) or ranks < 1:
        raise InvalidArgument(f"ranks is {ranks!r}; use a whole number of 1 or more")
    if "size" in options:
        raise InvalidArgument("plan() has `ranks` for the number of ranks; give it in place of size")
    if hasattr(model, "named_parameters"):
        from forebay.torch import describe
        options = describe.with_config(model, options, ranks)[0]
        with Engine(size=ranks, **describe.engine_options(describe.planned_options(model, options))) as engine:
            describe.describe(engine, describe.find_units(model, options.get("units"), options.get("resident") or ()))
            return engine.report()
    with Engine(size=ranks, **options) as engine:
        engine.add_model(_config_text(model))
        return engine.report()


def _config_text(config: Any) -> str:
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if isinstance(config, dict):
        return json.dumps(config)
    if isinstance(config, str) and config.lstrip().startswith("{"):
        return config
    config = os.fspath(config)
    path = os.path.join(config, "config.json") if os.path.isdir(config) else config
    if os.path.exists(path) and not os.path.isfile(path):
        raise InvalidArgument(f"{path} is no regular file; give config.json or the directory that has it")
    with _library.open_to_read(path, encoding="utf-8") as file:
        return file.read()


def explain(snapshot: Union[str, os.PathLike], command: Iterable[str] = ()) -> str:
    """The text of `forebay explain SNAPSHOT`: who holds the memory of a snapshot.

    `command`: the program with its first arguments; empty: FOREBAY_COMMAND, else the wheel's, else `forebay` on
    PATH.
    Errors: Unavailable without the program; Error with its message where it fails.
    """
    return _text_of_command("explain", [os.fspath(snapshot)], command)


class Simulation(Dict[str, Any]):
    """The figures of simulate(), as a dictionary; str() is a summary."""

    def __str__(self) -> str:
        memory = self["memory"]
        rows = [("step", f"{self['step_seconds']:.4g} s"),
                ("tokens/s", f"{self['tokens_per_second']:.4g}"),
                ("model FLOPs utilisation", f"{100 * self['model_flops_utilisation']:.1f} %"),
                ("most time", self["bottleneck"]),
                ("device memory, GiB", f"{memory['reserved'] / 2**30:.2f} of {memory['device'] / 2**30:.2f}")]
        rows += [(f"{place}, GiB", f"{memory[key] / 2**30:.2f}")
                 for place, key in (("pinned host memory", "host"), ("files", "files")) if memory[key]]
        changes = sorted(self.get("changes", ()), key=lambda change: change["step_seconds"])
        rows += [("would help", f"{change['change']}: {change['step_seconds']:.4g} s") for change in changes[:1]]
        lines = [f"{self['ranks']} ranks of {self['cluster']}, {self['device']}, simulated"]
        return "\n".join(lines + [f"  {name:<26}{value}" for name, value in rows])


def simulate(model: Any, ranks: Optional[int] = None, cluster: str = "dgx-h100", **options: Any) -> Simulation:
    """The time and memory of a training step on a cluster that is not here; print() shows a summary.

    `model`: a Hugging Face config as for plan(), gpt2 or llama, or a module that has one. `ranks`: all devices;
    None: those of one host. `cluster`: dgx-2, dgx-a100, dgx-h100 or the path of a JSON file. `options` are those of
    `forebay simulate`: batch, sequence, stage, dtype, offload, recompute="block", tensor_parallel,
    timeline="step.json", no_changes=True (faster), ... The result has step_seconds, tokens_per_second,
    model_flops_utilisation, seconds by cause, memory in bytes, and changes of the machine that would help.
    Errors: InvalidArgument, and OutOfMemory where the plan does not fit into a device.
    """
    if hasattr(model, "named_parameters"):
        if not hasattr(getattr(model, "config", None), "to_dict"):
            raise InvalidArgument(f"simulate() of a {type(model).__name__} without a config; give a Hugging Face config, "
                                  "as a dict or a file")
        model = model.config
    words = ["--cluster", os.fspath(cluster), "--json"]
    for name, value in {"ranks": ranks, **options}.items():
        if value is not None and value is not False:
            words += ["--" + name.replace("_", "-"), *([] if value is True else [_text(value)])]
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(_config_text(model))
        file.flush()
        try:
            text = _text_of_command("simulate", ["--config", file.name, *words], (), {1: OutOfMemory, 2: InvalidArgument})
        except Error as error:
            raise type(error)(str(error).replace(file.name, "the config")) from None
        return Simulation(json.loads(text))


def _text_of_command(name: str, words: List[str], command: Iterable[str] = (),
                     errors: Optional[Dict[int, Type[Error]]] = None) -> str:
    """The output of `forebay NAME WORDS...`. `errors`: the exceptions of exit codes; their texts name options of Python."""
    program = list(command) or [_library.command()]
    try:
        done = subprocess.run([*program, name, *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unavailable(f"{program[0]} cannot be started: {error}. Set FOREBAY_COMMAND to its path.") from None
    if done.returncode != 0:
        text = done.stderr.strip() or f"{program[0]} {name} ended with {done.returncode}"
        if errors:
            text = re.sub(r"--(?!help)([a-z][a-z-]*)", lambda option: option[1].replace("-", "_"), text)
        raise (errors or {}).get(done.returncode, Error)(text)
    return done.stdout
