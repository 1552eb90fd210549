/* The functions that PyTorch's CUDAPluggableAllocator and MemPool call, on the arenas of this process: the
   same ones that the preload serves from, when it is there. In libforebay-core.so, in C, because PyTorch
   finds them by name:

     allocator = torch.cuda.memory.CUDAPluggableAllocator(CORE, "forebay_torch_alloc", "forebay_torch_free")
     torch.cuda.memory.change_current_allocator(allocator)      # before anything is allocated

   or, for a part of the program alone, in place of the second line:

     pool = torch.cuda.MemPool(allocator.allocator())           # then: with torch.cuda.use_mem_pool(pool):
   ...

   CORE is the path of libforebay-core.so. A tensor that several streams use needs, before it is freed,
   Tensor.record_stream and forebay_torch_record_stream, which PyTorch is given by the allocator's
   set_record_stream_fn; or an event that the freeing stream has waited for.

   Order:   memory is handed out again in the order of streams, as the arena does it. Streams must not be
   destroyed while memory is freed on them, unless the preload is there to see it; PyTorch's own never are.
   Threads: from any thread. */
#ifndef FOREBAY_TORCH_ALLOCATOR_H
#define FOREBAY_TORCH_ALLOCATOR_H

#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Memory on the device (counted as the driver does) for work on `stream`, a cudaStream_t. Null for no bytes,
   and when there is no memory or no device, which is said on standard error. */
void* forebay_torch_alloc(ssize_t bytes, int device, void* stream);

/* `stream` has the block's last use queued. */
void forebay_torch_free(void* block, ssize_t bytes, int device, void* stream);

/* `stream` uses the block too: it is not handed out again before that has run. */
void forebay_torch_record_stream(void* block, void* stream);

#ifdef __cplusplus
}
#endif

#endif
