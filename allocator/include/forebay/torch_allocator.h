/* The functions that PyTorch's CUDAPluggableAllocator and MemPool call. They allocate from the arenas of this
   process, which are also those of the preload if it is loaded. They are C functions of libforebay-core.so,
   because PyTorch finds them by name. A Python program needs no header:

     allocator = torch.cuda.memory.CUDAPluggableAllocator(CORE, "forebay_torch_alloc", "forebay_torch_free")
     torch.cuda.memory.change_current_allocator(allocator)      # before anything is allocated

   or, for a part of the program only, in place of the second line:

     pool = torch.cuda.MemPool(allocator.allocator())           # then: with torch.cuda.use_mem_pool(pool):
   ...

   CORE is the path of libforebay-core.so. A C++ extension that builds its own allocator object includes this
   header and passes the functions' addresses.

   A tensor that several streams use must be announced before it is freed: by Tensor.record_stream, if the
   allocator was given forebay_torch_record_stream (set_record_stream_fn), or by an event that the freeing
   stream has waited for.

   A block that was allocated or freed while its stream was captured stays taken until the process ends,
   because the graph may run at any time; only the same capture uses it again. PyTorch's MemPool gives such
   memory back.

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

/* Frees a block. Its last use is queued on `stream`. */
void forebay_torch_free(void* block, ssize_t bytes, int device, void* stream);

/* Says that `stream` uses the block too: its memory is reused only after that work. A thread's default stream
   cannot be named by other threads, so only its work that is queued by now counts: call this after that. */
void forebay_torch_record_stream(void* block, void* stream);

#ifdef __cplusplus
}
#endif

#endif
