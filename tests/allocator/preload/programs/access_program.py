# The work of access_program.cc from Python, which reaches the driver by ctypes.
import ctypes
import sys

BYTES = 3 << 20
driver = ctypes.CDLL("libcuda.so.1")
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY = 0, 1, 2


def call(name, *arguments, expected=SUCCESS):
    result = getattr(driver, name)(*arguments)
    if result != expected:
        sys.exit(f"{name}: {result}")


context, stream = ctypes.c_void_p(), ctypes.c_void_p()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuStreamCreate", ctypes.byref(stream), 1)

plain, ordered, from_null = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
call("cuMemAlloc_v2", ctypes.byref(plain), ctypes.c_size_t(BYTES))
call("cuMemAllocAsync", ctypes.byref(ordered), ctypes.c_size_t(BYTES), stream)
call("cuMemAllocAsync", ctypes.byref(from_null), ctypes.c_size_t(1000), None)
call("cuMemsetD8Async", plain, ctypes.c_ubyte(0x5C), ctypes.c_size_t(BYTES), stream)
call("cuMemcpyAsync", ordered, plain, ctypes.c_size_t(BYTES), stream)
back = ctypes.create_string_buffer(BYTES)
call("cuMemcpyDtoHAsync_v2", back, ordered, ctypes.c_size_t(BYTES), stream)
call("cuStreamSynchronize", stream)
if back.raw != b"\x5c" * BYTES:
    sys.exit("the contents did not come back")

none = ctypes.c_uint64()
call("cuMemAlloc_v2", ctypes.byref(none), ctypes.c_size_t(1 << 50), expected=OUT_OF_MEMORY)
call("cuMemFreeAsync", ordered, stream)
call("cuMemFreeAsync", from_null, None)
call("cuMemFree_v2", plain)
call("cuMemFree_v2", plain, expected=INVALID_VALUE)
call("cuStreamSynchronize", stream)
call("cuStreamDestroy_v2", stream)
call("cuDevicePrimaryCtxRelease_v2", 0)
print("all well")
