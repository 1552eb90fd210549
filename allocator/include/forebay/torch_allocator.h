/* The functions that PyTorch's CUDAPluggableAllocator and MemPool call. They allocate from the arenas of this
   process, which are also those of the preload if it is loaded. They are C functions of libforebay-core.so,
   because PyTorch finds them by name. A Python program needs no header:

     allocator = torch.cuda.memory.CUDAPluggableAllocator(CORE, "forebay_torch_alloc", "forebay_torch_free")
     torch.cuda.memory.change_current_allocator(allocator)      # before anything is allocated

   or, for a part of the program only, with forebay_torch_pool_alloc in its place, and for the second line:

     pool = torch.cuda.MemPool(allocator.allocator())           # then: with torch.cuda.use_mem_pool(pool):
   ...

   CORE is the path of libforebay-core.so. A C++ extension that builds its own allocator object includes this
   header and passes the functions' addresses.

   A tensor that several streams use must be announced before it is freed: by Tensor.record_stream, if the
   allocator was given forebay_torch_record_stream (set_record_stream_fn), or by an event that the freeing
   stream has waited for.

   A block that was allocated or freed while its stream was captured stays taken until the process ends,
   because the graph may run at any time; only the same capture uses it again. PyTorch's MemPool knows its
   graphs and gives their memory back, if that is of forebay_torch_pool_alloc.

   A child made by fork has its parent's tensors. There the functions do nothing.

   Order:    memory is reused in the order of streams, as by Arena::free.
   Requires: a stream is not destroyed while memory is freed on it. The preload sees such a destruction and
             handles it; PyTorch's own streams are never destroyed.
   Threads:  any. */
#ifndef FOREBAY_TORCH_ALLOCATOR_H
#define FOREBAY_TORCH_ALLOCATOR_H

#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Allocates memory on the device (the driver's index) for work on `stream`, a cudaStream_t. Null for zero
   bytes; null with a line on standard error when there is no memory or no device. */
void* forebay_torch_alloc(ssize_t bytes, int device, void* stream);

/* The same for memory that any stream may use, as a CUDA graph may run on any: for PyTorch's MemPool, which
   keeps its blocks for one stream each by itself. */
void* forebay_torch_pool_alloc(ssize_t bytes, int device, void* stream);

/* Frees a block of either function. Its last use is queued on `stream`. For a block of
   forebay_torch_pool_alloc it waits for all work of the device. */
void forebay_torch_free(void* block, ssize_t bytes, int device, void* stream);

/* Says that `stream` uses the block too: its memory is reused only after that work. Beyond 64 streams with
   blocks or work, and for a stream of another device, the block's free waits for the devices; null and the
   thread's default stream are those of the current device. A thread's default stream cannot be named by other
   threads, so only its work that is queued by now counts: call this after that. */
void forebay_torch_record_stream(void* block, void* stream);

#ifdef __cplusplus
}
#endif

#endif
