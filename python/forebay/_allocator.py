"""forebay's arena under the CUDA tensors of PyTorch: torch.cuda.memory.CUDAPluggableAllocator over
libforebay-core.so, which has the three functions that PyTorch calls."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from forebay._library import InvalidArgument, Unavailable, library

CORE = "libforebay-core.so.0"
_enabled = False


@functools.lru_cache(maxsize=None)
def _allocator(allocate: str = "forebay_torch_alloc") -> Any:
    try:
        import torch
    except ImportError as error:
        raise Unavailable(f"forebay's allocator serves PyTorch's tensors on CUDA devices, and torch cannot be "
                          f"imported: {error}. Install torch.") from None
    if getattr(torch.version, "cuda", None) is None:
        raise Unavailable(f"forebay's allocator serves PyTorch's tensors on CUDA devices, and torch "
                          f"{torch.__version__} is built without CUDA. Install a build of torch with CUDA.")
    if not torch.cuda.is_available():
        raise Unavailable("forebay's allocator serves PyTorch's tensors on CUDA devices, and torch finds none here. "
                          "Run on a machine with an NVIDIA GPU and its driver; see CUDA_VISIBLE_DEVICES too.")
    # Beside the C library, so that both are of one build.
    path = os.path.join(os.path.dirname(library().path), CORE)
    try:
        core = ctypes.CDLL(path)
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded: {error}. It belongs beside {library().path}.") from None
    allocator = torch.cuda.memory.CUDAPluggableAllocator(path, allocate, "forebay_torch_free")
    # So that Tensor.record_stream() counts.
    record_stream = ctypes.cast(core.forebay_torch_record_stream, ctypes.c_void_p).value
    allocator.allocator().set_record_stream_fn(record_stream)
    return allocator


def enable_allocator() -> None:
    """All CUDA tensors of this process come from forebay's arena, which defragments by remapping.

    It is for programs that run out of memory because memory is fragmented; `forebay run -- python train.py` does
    the same without a line in the program. Calls after the first have no effect. PyTorch's own memory statistics
    stay empty. Memory that a CUDA graph was captured with stays taken until the process ends; memory_pool() gives it
    back.

    Requires: no CUDA tensor was made before.
    Errors:   Unavailable without torch, CUDA or a device; InvalidArgument after the first CUDA tensor.
    """
    global _enabled
    if _enabled:
        return
    allocator = _allocator()
    import torch
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except RuntimeError as error:
        raise InvalidArgument(f"enable_allocator() replaces PyTorch's allocator, which is in use already: {error}. "
                              "Call it before the first CUDA tensor, or use forebay.memory_pool().") from None
    _enabled = True


def memory_pool() -> Any:
    """A torch.cuda.MemPool over forebay's arena, for a part of a program: `with torch.cuda.use_mem_pool(pool):`.

    Errors: Unavailable without torch, CUDA or a device.
    """
    allocator = _allocator("forebay_torch_pool_alloc")
    import torch
    return torch.cuda.MemPool(allocator.allocator())
