"""A stand-in for PyTorch that behaves as its test says, for the checks of `forebay run --check`.

FAKE_TORCH is a list of orders "FEATURE[@MODE]=ACTION" divided by ";". FEATURE: import, device, allocation,
statistics, history, mempool, graphs, compiled, ipc, memory. MODE: cache, tensors, pluggable; without one, all.
ACTION: "raise:WORDS", "crash", "hang", "exit:N", "leave:N" (end with N after all went well), "child" (leave a
process that holds the pipe FAKE_TORCH_HELD), "none" (do nothing where something is promised).

Memory comes from the CUDA driver, as it would, so that the preload sees it; values are kept here. All elements of
a tensor are equal.
"""
import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import types

__version__ = "9.9.0+fake"
version = types.SimpleNamespace(cuda="13.0")
int32, uint8, float32 = "int32", "uint8", "float32"
_SIZES = {int32: 4, uint8: 1, float32: 4}
_TOTAL = 64 << 20

_orders = dict(order.split("=", 1) for order in os.environ.get("FAKE_TORCH", "").split(";") if order)
_mode = "cache"
if "cudaMallocAsync" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
    _mode = "tensors"


def _order(feature):
    """Carries out the orders for the feature. True: it is to do nothing."""
    action = _orders.get(feature + "@" + _mode, _orders.get(feature, ""))
    if action.startswith("raise:"):
        raise RuntimeError(action[6:].replace("\\n", "\n"))
    if action == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if action == "hang":
        if "FAKE_TORCH_HANGS" in os.environ:  # A pipe, for a waiting parent.
            open(os.environ["FAKE_TORCH_HANGS"], "w").close()
        while True:
            signal.pause()
    if action.startswith("exit:"):
        print("the last words\n")
        os._exit(int(action[5:]))
    if action.startswith("leave:"):
        atexit.register(os._exit, int(action[6:]))
    if action == "child":
        pipe = os.open(os.environ["FAKE_TORCH_HELD"], os.O_WRONLY)
        subprocess.Popen(["sleep", "100"], pass_fds=[pipe])
        os.close(pipe)
    return action == "none"


try:
    _order("import")
except RuntimeError as error:
    raise ImportError(str(error))


# --- memory, from the driver ---

_driver = None


def _start():
    global _driver
    if _driver is not None:
        return
    _order("device")
    _driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    for code in (_driver.cuInit(0), _driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
                 _driver.cuCtxSetCurrent(context)):
        if code != 0:
            raise RuntimeError("CUDA error %d" % code)


class _Memory:
    def __init__(self, size):
        _start()
        self.address = ctypes.c_ulonglong(0)
        self.free = None
        if _pluggable is not None:
            library, allocate, free = _pluggable
            getattr(library, allocate).restype = ctypes.c_void_p
            got = getattr(library, allocate)(ctypes.c_ssize_t(size), 0, None)
            self.address.value = got or 0
            self.free = lambda: getattr(library, free)(ctypes.c_void_p(got), ctypes.c_ssize_t(size), 0, None)
        elif _mode == "tensors":
            code = _driver.cuMemAllocAsync(ctypes.byref(self.address), ctypes.c_size_t(size), None)
            if code == 0:
                self.free = lambda: _driver.cuMemFreeAsync(self.address, None)
        else:
            code = _driver.cuMemAlloc_v2(ctypes.byref(self.address), ctypes.c_size_t(size))
            if code == 0:
                self.free = lambda: _driver.cuMemFree_v2(self.address)
        if self.address.value == 0 and not _order("memory"):
            raise cuda.OutOfMemoryError("CUDA out of memory.")

    def __del__(self):
        if getattr(self, "free", None) is not None and self.address.value != 0:
            self.free()


_captured = None


class Tensor:
    def __init__(self, count, dtype, value=0, compute=None):
        self.count, self.dtype, self.value, self.compute = count, dtype, value, compute
        self.memory = _Memory(count * _SIZES[dtype])
        if compute is not None:
            self.value = compute()
            if _captured is not None:
                _captured.append(self)

    def data_ptr(self):
        return self.memory.address.value

    def sum(self):
        return self.value * self.count

    def fill_(self, value):
        self.value = value

    def __mul__(self, factor):
        return Tensor(self.count, self.dtype, compute=lambda: self.value * factor)

    def __add__(self, term):
        return Tensor(self.count, self.dtype, compute=lambda: self.value + term)

    def __reduce__(self):
        _order("ipc")
        return _received, (self.count, self.dtype, self.value)


def _received(count, dtype, value):
    _order("received")
    tensor = Tensor.__new__(Tensor)
    tensor.count, tensor.dtype, tensor.value = count, dtype, value
    return tensor


def full(shape, value, dtype=float32, device=None):
    _order("allocation")
    return Tensor(shape[0], dtype, value)


def ones(count, dtype=float32, device=None):
    return Tensor(count, dtype, 1)


def empty(count, dtype=float32, device=None):
    return Tensor(count, dtype)


# --- torch.cuda ---

_pluggable = None


class _Allocator:
    def __init__(self, path, allocate, free):
        self.parts = (ctypes.CDLL(path), allocate, free)

    def allocator(self):
        return self

    def set_record_stream_fn(self, address):
        self.record_stream = address


def _change_current_allocator(allocator):
    global _pluggable, _mode
    if _driver is not None:
        raise RuntimeError("Can't swap an already initialized allocator")
    _pluggable, _mode = allocator.parts, "pluggable"


class _MemPool:
    def __init__(self, allocator=None):
        self.allocator_, self.tensors = allocator, 0

    def snapshot(self):
        return [] if _order("mempool") else [{}]


@contextlib.contextmanager
def _use_mem_pool(pool):
    global _pluggable, _mode
    before = (_pluggable, _mode)
    if pool.allocator_ is not None:
        _pluggable, _mode = pool.allocator_.parts, "pluggable"
    try:
        yield
    finally:
        _pluggable, _mode = before


class _Stream:
    def wait_stream(self, other):
        pass


class _Graph:
    def replay(self):
        for tensor in self.tensors:
            tensor.value = tensor.compute()


@contextlib.contextmanager
def _capture(graph):
    global _captured
    _captured = graph.tensors = []
    try:
        yield
    finally:
        _captured = None
    if _order("graphs"):
        graph.tensors = []


class _OutOfMemoryError(RuntimeError):
    pass


def _memory_stats():
    return {} if _order("statistics") else {"allocated_bytes.all.current": 8 << 20}


cuda = types.SimpleNamespace(
    CUDAGraph=_Graph,
    MemPool=_MemPool,
    OutOfMemoryError=_OutOfMemoryError,
    Stream=_Stream,
    current_device=lambda: 0,
    current_stream=_Stream,
    get_device_name=lambda device: "the fake device",
    graph=_capture,
    init=_start,
    is_available=lambda: True,
    mem_get_info=lambda: (_TOTAL, _TOTAL),
    memory_stats=_memory_stats,
    stream=lambda stream: contextlib.nullcontext(),
    synchronize=lambda: None,
    use_mem_pool=_use_mem_pool,
    memory=types.SimpleNamespace(
        CUDAPluggableAllocator=_Allocator,
        change_current_allocator=_change_current_allocator,
        _record_memory_history=lambda max_entries: _order("history"),
        _snapshot=lambda: {"device_traces": [[] if _order("history") else [{}]]},
    ),
)


def compile(function, backend):
    from ._dynamo.utils import counters

    def compiled(*arguments):
        if _order("compiled"):
            counters["inductor"]["cudagraph_skips"] += 1
        return function(*arguments)

    return compiled


from . import multiprocessing  # noqa: E402,F401
