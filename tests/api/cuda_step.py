"""One step on a cuda device, over ctypes: the default stream is null, and handles end in any order.

Argument 1 is libforebay-c.so.1, argument 2 the communicator: auto, nccl, or adopted, an ncclComm_t of this program."""
import ctypes
import json
import os
import sys
from ctypes import byref, c_char_p, c_double, c_float, c_int32, c_uint64, c_void_p

library = ctypes.CDLL(sys.argv[1])
library.forebay_last_error.restype = c_char_p


def call(name, *arguments):
    if getattr(library, "forebay_" + name)(*arguments) != 0:
        sys.exit(f"{name}: {library.forebay_last_error().decode()}")


def make(kind, name, *arguments):
    result = kind()
    call(name, *arguments, byref(result))
    return result


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.18."""
    _fields_ = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", c_int32),
                ("choices", c_int32 * 3), ("net_name", c_char_p), ("split_share", c_int32)]


def own_nccl():
    """An ncclComm_t of one rank, as a trainer makes it."""
    cuda = ctypes.CDLL(os.environ["FOREBAY_LIBCUDA"])
    nccl = ctypes.CDLL(os.environ["FOREBAY_NCCL_LIBRARY"])
    context, unique, communicator, state = c_void_p(), UniqueId(), c_void_p(), c_int32(7)
    unset = -(2**31)
    config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21800, 0, (c_int32 * 3)(unset, unset, unset), None, unset)
    for code in (cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(byref(context), 0), cuda.cuCtxSetCurrent(context),
                 nccl.ncclGetUniqueId(byref(unique)),
                 nccl.ncclCommInitRankConfig(byref(communicator), 1, unique, 0, byref(config))):
        if code not in (0, 7):  # 7: in progress.
            sys.exit(f"the fake driver or the fake NCCL returned {code}")
    while state.value == 7:
        nccl.ncclCommGetAsyncError(communicator, byref(state))
    return communicator


adopted = own_nccl() if sys.argv[2] == "adopted" else None
options = make(c_void_p, "options_create")
for key, value in ((b"stage", b"3"), (b"communicator", b"auto" if adopted else sys.argv[2].encode())):
    call("options_set", options, key, value)
device = make(c_void_p, "device_open", b"cuda" if sys.argv[2] == "nccl" else b"cuda:0", options)
if library.forebay_device_open(b"cuda:99", None, byref(c_void_p())) == 0 or b"99" not in library.forebay_last_error():
    sys.exit(f"device 99 is not named: {library.forebay_last_error()}")
facts = json.loads(make(c_char_p, "device_report", device).value)
if facts["kind"] != "cuda" or facts["host_accessible"]:
    sys.exit(f"the report of the device says: {facts}")
ranks = make(c_void_p, "communicator_create", device, options, None, adopted)
engine = make(c_void_p, "engine_create", device, ranks, None, None, options)
unit = make(c_int32, "engine_add_unit", engine, b"unit", 0)
make(c_int32, "engine_add_parameter", engine, unit, b"weight", c_uint64(256), 0, 0)
call("engine_commit", engine)
call("engine_set", engine, unit, 0, 0, (c_float * 256)(*range(256)), c_uint64(0), c_uint64(256))
call("hyperparameter", engine, 0, b"lr", c_double(0.5))
call("step_begin", engine)
call("micro_step_begin", engine, 0)
call("acquire", engine, unit, 0, None)
call("release", engine, unit, None)
call("acquire", engine, unit, 1, None)
gradient, accumulate = c_void_p(), c_int32()
call("gradient", engine, unit, 0, byref(gradient), byref(accumulate))
call("copy", device, gradient, (c_float * 256)(*[1] * 256), c_uint64(1024), None)
call("release", engine, unit, None)
result = (c_double * 8)()
call("step", engine, result, c_uint64(64))
values = (c_float * 4)()
call("engine_get", engine, unit, 0, 0, values, c_uint64(0), c_uint64(4))
report = make(c_char_p, "communicator_report", ranks).value.decode()
print(result[0], list(values), report)
machine = json.loads(make(c_char_p, "machine_report").value)["devices"][0]
if not 0 < machine["free_bytes"] < machine["memory_bytes"]:
    sys.exit(f"while the engine holds memory, the machine's report says: {machine}")
for name, handle in (("device_close", device), ("engine_destroy", engine), ("communicator_destroy", ranks)):
    getattr(library, "forebay_" + name)(handle)
wanted = "local" if sys.argv[2] == "auto" else "nccl"
sys.exit(result[0] != 16 or list(values) != [-0.5, 0.5, 1.5, 2.5] or f'"name": "{wanted}"' not in report)
