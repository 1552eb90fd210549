"""The C interface (forebay.h) by ctypes: one table of functions, errors as exceptions, handles as objects.

The library is libforebay-c.so.1: the file that FOREBAY_LIBRARY names, else the wheel's, else the system's. It is
loaded at the first use.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import pathlib
import weakref
from typing import Any, Dict, Optional, Type

ABI = 1
FILE = "libforebay-c.so.1"


class Error(Exception):
    """A refused or failed call. `code` is its number in forebay.h; the text has the request, the finding and
    the advice."""

    code = 9


class InvalidArgument(Error, ValueError):
    """The caller asked for something that can never work."""

    code = 1


class OutOfMemory(Error, MemoryError):
    """Less memory than requested; retry after freeing some."""

    code = 2


class Unsupported(Error, NotImplementedError):
    """This build or this device cannot do it."""

    code = 3


class Unavailable(Error):
    """A driver, a peer or a library is missing now."""

    code = 4


class InputOutputError(Error, OSError):
    """A file or a socket failed."""

    code = 5


class NoSuchFile(InputOutputError, FileNotFoundError):
    """There is no file of that name."""


class Timeout(Error, TimeoutError):
    """A deadline passed."""

    code = 6


class PeerLost(Error, ConnectionError):
    """Another rank failed or left."""

    code = 7


class Corruption(Error):
    """Bytes are wrong: a checksum or a length."""

    code = 8


class Internal(Error):
    """A defect in forebay, or in functions and kernels that it runs."""

    code = 9


_BY_CODE: Dict[int, Type[Error]] = {
    kind.code: kind
    for kind in (InvalidArgument, OutOfMemory, Unsupported, Unavailable, InputOutputError, Timeout, PeerLost,
                 Corruption, Internal)
}

# Letters of the table below. A capital is the address of a result.
TYPES: Dict[str, Any] = {
    "h": ctypes.c_void_p,  # a handle
    "H": ctypes.POINTER(ctypes.c_void_p),
    "p": ctypes.c_void_p,  # an address
    "P": ctypes.POINTER(ctypes.c_void_p),
    "f": ctypes.c_void_p,  # a function
    "s": ctypes.c_char_p,  # a text
    "S": ctypes.POINTER(ctypes.c_char_p),
    "i": ctypes.c_int32,
    "I": ctypes.POINTER(ctypes.c_int32),
    "l": ctypes.c_uint32,
    "L": ctypes.POINTER(ctypes.c_uint32),
    "u": ctypes.c_uint64,
    "U": ctypes.POINTER(ctypes.c_uint64),
    "d": ctypes.c_double,
    "D": ctypes.POINTER(ctypes.c_double),
}

# Every function of forebay.h without its prefix: the letters of its parameters. A result that is no code comes
# before a colon; "-" is none. tests/python/library_test.py compares the table with the header.
FUNCTIONS: Dict[str, str] = {
    "abi": "i:",
    "version": "s:",
    "last_error": "s:",
    "code_name": "s:i",
    "options_create": "H",
    "options_set": "hss",
    "options_get": "hsS",
    "options_from_environment": "h",
    "options_report": "hS",
    "options_destroy": "-:h",
    "machine_report": "S",
    "device_open": "shH",
    "device_report": "hS",
    "device_close": "-:h",
    "stream_create": "hP",
    "stream_synchronize": "hp",
    "stream_wait": "hpp",
    "stream_call": "hpfp",
    "stream_destroy": "-:hp",
    "copy": "hppup",
    "fill": "hpiup",
    "arena_create": "hhH",
    "arena_allocate": "hupiiP",
    "arena_free": "hpp",
    "arena_record_stream": "hpp",
    "arena_retire_stream": "hp",
    "arena_block_bytes": "hpU",
    "arena_tag_create": "hsuiI",
    "arena_pause": "hii",
    "arena_resume": "hi",
    "arena_slot_create": "huiL",
    "arena_slot_destroy": "hl",
    "arena_alias_create": "hluP",
    "arena_alias_move": "hpl",
    "arena_alias_destroy": "hp",
    "arena_capture_begin": "hpL",
    "arena_capture_end": "hl",
    "arena_capture_release": "hl",
    "arena_trim": "hU",
    "arena_reset_peaks": "h",
    "arena_number": "hsU",
    "arena_report": "hS",
    "arena_snapshot": "hs",
    "arena_destroy": "-:h",
    "pinned_pool_create": "hhH",
    "pinned_pool_allocate": "huP",
    "pinned_pool_free": "hpp",
    "pinned_pool_prewarm": "huu",
    "pinned_pool_trim": "hU",
    "pinned_pool_block_bytes": "hpU",
    "pinned_pool_reset_peaks": "h",
    "pinned_pool_number": "hsU",
    "pinned_pool_report": "hS",
    "pinned_pool_destroy": "-:h",
    "communicator_create": "hhppH",
    "local_group_create": "ihH",
    "local_group_communicator": "hihH",
    "local_group_destroy": "-:h",
    "communicator_split": "hiiH",
    "communicator_rank": "hII",
    "communicator_barrier": "h",
    "communicator_exchange": "hpup",
    "communicator_all_gather": "hppuup",
    "communicator_reduce_scatter": "hpuuippip",
    "communicator_all_reduce": "hpuipup",
    "all_reduce_staging": "iuiU",
    "communicator_send": "hpuilp",
    "communicator_receive": "hpuilp",
    "communicator_register": "hpu",
    "communicator_deregister": "hp",
    "communicator_status": "h",
    "communicator_abort": "his",
    "communicator_report": "hS",
    "communicator_destroy": "-:h",
    "timeline_create": "H",
    "timeline_begin": "hs",
    "timeline_end": "hss",
    "timeline_report": "hS",
    "timeline_destroy": "-:h",
    "engine_create": "hhhhhH",
    "engine_plan": "hH",
    "engine_add_unit": "hsiI",
    "engine_add_parameter": "hisuiiI",
    "engine_declare_shape": "hiiUu",
    "engine_declare_split": "hiiUuiuuu",
    "engine_tie": "hiiiI",
    "engine_share": "hih",
    "engine_add_model": "hs",
    "engine_declare_activations": "hu",
    "engine_activation_room": "hU",
    "engine_commit": "h",
    "engine_address": "hiiP",
    "engine_activations": "hP",
    "engine_report": "hS",
    "engine_number": "hsU",
    "engine_destroy": "-:h",
    "engine_set": "hiiipuu",
    "engine_set_changed": "hiiipuu",
    "engine_get": "hiiipuu",
    "engine_visit": "hfp",
    "engine_digest": "hp",
    "engine_shard_digest": "hp",
    "hyperparameter": "hisd",
    "step_begin": "h",
    "micro_step_begin": "hi",
    "evaluation_begin": "h",
    "evaluation_end": "h",
    "acquire": "hiip",
    "parameter": "hiiP",
    "gradient": "hiiPI",
    "zeroed_gradient": "hiiP",
    "gradient_ready": "hii",
    "release": "hip",
    "skip": "hi",
    "loss_scale": "hD",
    "norm": "hD",
    "step": "hpu",
    "abandon": "hi",
    "lock": "hs",
    "save": "hspu",
    "save_begin": "hspui",
    "save_end": "h",
    "engine_freeze": "hiii",
    "engine_reset_moments": "h",
    "engine_swap_average": "h",
    "load": "hsPU",
    "spill": "hi",
    "fetch": "h",
    "checkpointer_create": "hhhhH",
    "checkpointer_declare": "hiiuh",
    "checkpointer_commit": "hp",
    "checkpointer_save": "hiiipupup",
    "checkpointer_load": "hiiipPUPU",
    "checkpointer_load_end": "hiii",
    "checkpointer_discard": "hiii",
    "checkpointer_discard_all": "h",
    "checkpointer_check": "h",
    "checkpointer_report": "hS",
    "checkpointer_number": "hsU",
    "checkpointer_destroy": "-:h",
    "file_store_create": "hH",
    "file_store_range": "hsuL",
    "file_store_read": "hlupuU",
    "file_store_write": "hlupuU",
    "file_store_wait": "huu",
    "file_store_report": "hS",
    "file_store_destroy": "-:h",
}


def signature(letters: str) -> tuple:
    """The result's letter ("" for a code) and the letters of the parameters of one row of FUNCTIONS."""
    result, colon, parameters = letters.partition(":")
    return (result, parameters) if colon else ("", letters)


# Part of a message: a sentence that the layer above adds, because it knows the program better.
ADVICE: Dict[str, str] = {}


# The whole numbers that fit: ctypes would cut the others off.
RANGES = {"i": range(-2**31, 2**31), "l": range(2**32), "u": range(2**64)}


def _with_checked_arguments(name: str, function: Any, parameters: str) -> Any:
    """The function, which refuses whole numbers that do not fit, and texts with a zero byte: C would end them there, and
    save under another name, say."""
    texts = [place for place, letter in enumerate(parameters) if letter == "s"]
    numbers = [(place, RANGES[letter]) for place, letter in enumerate(parameters) if letter in RANGES]

    def call(*arguments: Any) -> Any:
        for place in texts:
            if arguments[place] is not None and b"\0" in arguments[place]:
                raise InvalidArgument(f"{arguments[place][:80]!r} has a zero byte, which ends a text in C; leave it out")
        for place, numbers_that_fit in numbers:
            if type(arguments[place]) is int and arguments[place] not in numbers_that_fit:
                raise InvalidArgument(f"forebay_{name}: {arguments[place]} was given; use a whole number from "
                                      f"{numbers_that_fit[0]} to {numbers_that_fit[-1]}")
        return function(*arguments)

    return call if texts or numbers else function


class Library:
    """The loaded library; an attribute for each function, without its prefix.

    Functions that return a code raise the Error that belongs to it.
    """

    def __init__(self, path: str) -> None:
        loaded = ctypes.CDLL(path)
        self.path = path

        def check(code: int) -> None:
            if code:
                text = loaded.forebay_last_error().decode(errors="replace")
                text += "".join(f". {advice}" for phrase, advice in ADVICE.items() if phrase in text)
                raise _BY_CODE.get(code, Internal)(text)

        for name, letters in FUNCTIONS.items():
            result, parameters = signature(letters)
            try:
                function = getattr(loaded, "forebay_" + name)
            except AttributeError:
                raise Unavailable(f"{path} has no function forebay_{name}; it is older than this package, or "
                                  "another library. Install both from one version.") from None
            function.argtypes = [TYPES[letter] for letter in parameters]
            function.restype = check if not result else None if result == "-" else TYPES[result]
            setattr(self, name, _with_checked_arguments(name, function, parameters))
        if self.abi() != ABI:
            raise Unavailable(f"{path} has ABI {self.abi()}, and this package needs {ABI}. Install both from "
                              "one version.")


def open_to_read(path: Any, mode: str = "r", **options: Any) -> Any:
    """open(). Errors: InputOutputError; where there is no such file it is a FileNotFoundError too."""
    try:
        return open(path, mode, **options)
    except FileNotFoundError as error:
        raise NoSuchFile(f"cannot read {path}: {error.strerror}; give the path of a file that is there") from None
    except OSError as error:
        raise InputOutputError(f"cannot read {path}: {error.strerror}; give the path of a file that may be read") from None


def file_of_wheel(name: str, variable: str) -> str:
    """The path of a library or program: the one that the environment's variable names, else the wheel's, else
    `name`, which the system searches."""
    inside = pathlib.Path(__file__).with_name("lib") / name
    return os.environ.get(variable) or (str(inside) if inside.exists() else name)


def command() -> str:
    """The program `forebay`."""
    return file_of_wheel("forebay", "FOREBAY_COMMAND")


@functools.lru_cache(maxsize=None)
def library() -> Any:
    """Loads the library once.

    Errors: Unavailable, with the places that were searched.
    """
    path = file_of_wheel(FILE, "FOREBAY_LIBRARY")
    try:
        return Library(path)
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded: {error}. Build it with './dev build' and set "
                          "FOREBAY_LIBRARY to its path.") from None


def result(function: Any, kind: Any, *arguments: Any) -> Any:
    """Calls a function that stores its result at its last parameter, and returns that result."""
    value = kind()
    function(*arguments, ctypes.byref(value))
    return value.value


def report(function: Any, *arguments: Any) -> Any:
    """Calls a function that gives out JSON, and returns it parsed."""
    return json.loads(result(function, ctypes.c_char_p, *arguments).decode())


class Handle:
    """A C handle. close() gives it back; so do `with` and the garbage collector. Handles that were made from
    it keep working."""

    _destroy = ""

    def __init__(self, create: Any, *arguments: Any) -> None:
        self._hold(None)
        self._hold(result(create, ctypes.c_void_p, *arguments))
        _alive.add(self)

    def _hold(self, handle: Optional[int]) -> None:
        # ctypes reads it. Null after close(), which the library refuses. A property would run in ctypes, which gives a
        # KeyboardInterrupt that comes there another type.
        self._as_parameter_ = ctypes.c_void_p(handle)

    def close(self) -> None:
        """Gives the handle back. May be called twice."""
        held = getattr(self, "_as_parameter_", None)
        self._hold(None)
        if held:
            getattr(library(), self._destroy)(held)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # The interpreter is ending.
            pass


_alive: "weakref.WeakSet[Handle]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Communicators call back into Python from threads of their own, which must end before the interpreter."""
    for handle in list(_alive):
        handle.close()
