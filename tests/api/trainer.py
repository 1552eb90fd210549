"""The trainer of samples/01-first-trainer over ctypes: argument 1 is libforebay-c.so.1. Prints the digest of each stage."""
import ctypes
import os
import sys
import tempfile
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int32, c_uint64, c_void_p

RANKS, STEPS, INPUTS, HIDDEN, BATCH = 3, 200, 8, 32, 16
library = ctypes.CDLL(sys.argv[1])
math = ctypes.CDLL("libm.so.6")
for name in ("sinf", "tanhf"):
    getattr(math, name).restype = c_float
    getattr(math, name).argtypes = [c_float]
library.forebay_last_error.restype = c_char_p
library.forebay_code_name.restype = c_char_p


def call(name, *arguments):
    code = getattr(library, "forebay_" + name)(*arguments)
    if code != 0:
        sys.exit(f"{library.forebay_code_name(code).decode()}: {library.forebay_last_error().decode()}")


def make(kind, name, *arguments):
    result = kind()
    call(name, *arguments, byref(result))
    return result


def f(value):
    """A float32: one operation in double and this rounding give the result of one operation in float."""
    return c_float(value).value


def train(rank, stage, store):
    options = make(c_void_p, "options_create")
    for key, value in {"rank": rank, "size": RANKS, "stage": stage, "store": store}.items():
        call("options_set", options, key.encode(), str(value).encode())
    device = make(c_void_p, "device_open", b"host", options)
    ranks = make(c_void_p, "communicator_create", device, options, None, None)
    engine = make(c_void_p, "engine_create", device, ranks, None, None, options)
    first = make(c_int32, "engine_add_unit", engine, b"first", 1)
    second = make(c_int32, "engine_add_unit", engine, b"second", 0)
    w1 = make(c_int32, "engine_add_parameter", engine, first, b"w1", c_uint64(HIDDEN * INPUTS), 0, 0)
    w2 = make(c_int32, "engine_add_parameter", engine, second, b"w2", c_uint64(HIDDEN), 0, 0)
    call("engine_commit", engine)
    scale = f(0.3)
    values = (c_float * (HIDDEN * INPUTS))(*(scale * math.sinf(f(7.0 * i)) for i in range(HIDDEN * INPUTS)))
    call("engine_set", engine, first, w1, 0, values, c_uint64(0), c_uint64(HIDDEN * INPUTS))
    call("engine_set", engine, second, w2, 0, values, c_uint64(0), c_uint64(HIDDEN))
    call("hyperparameter", engine, 0, b"lr", c_double(0.02))
    call("hyperparameter", engine, -1, b"clip", c_double(1.0))

    def floats(address):
        return ctypes.cast(address, POINTER(c_float))

    def acquire(unit, backward):
        call("acquire", engine, unit, int(backward), None)
        call("stream_synchronize", device, None)

    def gradient(unit):
        address, accumulate = c_void_p(), c_int32()
        call("gradient", engine, unit, 0, byref(address), byref(accumulate))
        return floats(address)

    for step in range(STEPS):
        call("step_begin", engine)
        call("micro_step_begin", engine, 0)
        x = [[math.sinf(float(((step * RANKS + rank) * BATCH + b) * INPUTS + i)) for i in range(INPUTS)]
             for b in range(BATCH)]
        y, hidden, error, hidden_gradient = [0.0] * BATCH, [], [], []
        for b in range(BATCH):
            for i in range(INPUTS):
                y[b] = f(y[b] + f(x[b][i] * (i - 3)) / 4)
        acquire(first, False)
        weights = floats(make(c_void_p, "parameter", engine, first, 0))[:HIDDEN * INPUTS]
        for b in range(BATCH):
            row = []
            for h in range(HIDDEN):
                total = 0.0
                for i in range(INPUTS):
                    total = f(total + f(weights[h * INPUTS + i] * x[b][i]))
                row.append(math.tanhf(total))
            hidden.append(row)
        call("release", engine, first, None)
        acquire(second, False)
        weights = floats(make(c_void_p, "parameter", engine, second, 0))[:HIDDEN]
        for b in range(BATCH):
            total = 0.0
            for h in range(HIDDEN):
                total = f(total + f(weights[h] * hidden[b][h]))
            error.append(f(total - y[b]))
        call("release", engine, second, None)
        acquire(second, True)
        weights, place = floats(make(c_void_p, "parameter", engine, second, 0))[:HIDDEN], gradient(second)
        hidden_gradient = [[0.0] * HIDDEN for _ in range(BATCH)]
        for h in range(HIDDEN):
            total = 0.0
            for b in range(BATCH):
                slope, value = 2 * error[b] / BATCH, hidden[b][h]
                total = f(total + f(slope * value))
                hidden_gradient[b][h] = f(f(slope * weights[h]) * f(1 - f(value * value)))
            place[h] = total
        call("release", engine, second, None)
        acquire(first, True)
        place = gradient(first)
        for h in range(HIDDEN):
            for i in range(INPUTS):
                total = 0.0
                for b in range(BATCH):
                    total = f(total + f(hidden_gradient[b][h] * x[b][i]))
                place[h * INPUTS + i] = total
        call("release", engine, first, None)
        call("step", engine, ctypes.create_string_buffer(64), c_uint64(64))
    digest = ctypes.create_string_buffer(33)
    call("engine_digest", engine, digest)
    if rank == 0:
        print(f"stage {stage}: digest {digest.value.decode()}", flush=True)
    for name, handle in (("options_destroy", options), ("device_close", device), ("communicator_destroy", ranks),
                         ("engine_destroy", engine)):
        getattr(library, "forebay_" + name)(handle)


failed = 0
for stage in (0, 3):
    with tempfile.TemporaryDirectory() as store:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                train(rank, stage, store)
                os._exit(0)
            children.append(child)
        for child in children:
            failed |= os.waitpid(child, 0)[1]
sys.exit(1 if failed else 0)
