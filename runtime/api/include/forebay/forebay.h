/* The C interface of forebay: one C99 header over the whole library, for C, C++17, Python, Rust and every
 * language that can call C. samples/08-from-c is a whole trainer on one page; docs/c-api.md is a tour.
 *
 * Rules that hold for every function:
 *
 * Errors.    A function returns 0 (FOREBAY_OK) or a code below. forebay_last_error() is then the text: the
 *            request, the finding, the advice. A refused call (FOREBAY_INVALID_ARGUMENT) changes nothing,
 *            and results that it would have written are not written. If a rank, a device or a file fails,
 *            or ranks differ within a step, the engine is failed: its calls return that error, and only its
 *            reports, forebay_engine_shard_digest() and forebay_engine_destroy() work. Null where a
 *            parameter does not say "or null", a handle that was destroyed and a handle of another kind
 *            give FOREBAY_INVALID_ARGUMENT. Functions that give something back return nothing and accept
 *            null.
 * Handles.   Pointers to incomplete types. A function that makes a handle writes it to its last parameter.
 *            A handle is never dereferenced outside of the library, and its value is never used again.
 * Ownership. The creator destroys. A handle keeps the handles it was made from alive, so any order of
 *            destruction is right. Texts that are passed in are copied. A text that is passed out belongs
 *            to the handle it came from and is valid until the next call with that handle that gives out a
 *            text.
 * Threads.   Any thread may use any handle, one thread at a time per handle. While a call
 *            runs, one by a second thread is refused with FOREBAY_INVALID_ARGUMENT. Where a section says
 *            "Threads: any", several may use the handle at once. pthread_cancel() takes effect after the
 *            call that the thread is in.
 * Callbacks. They return: none ends by longjmp(), an exception or pthread_exit().
 * Processes. After fork() the child makes handles of its own. A handle of the parent is refused there, unless
 *            it is of options or of a timeline.
 * Streams.   A stream is a void*: on a cuda device a cudaStream_t. Null is the device's default stream: the
 *            legacy default stream of CUDA; on a host device a stream of its own.
 * Notices.   Warnings go to stderr, one line each. The environment variable FOREBAY_LOG says which: off,
 *            error, warning (the default), info or debug.
 * Units.     Sizes are bytes, times are milliseconds, counts are elements, where nothing else is said.
 *            Texts are UTF-8.
 * Growth.    Functions are added and never changed or taken away while FOREBAY_ABI stays. Options, numbers
 *            and reports go by name, so they grow without a new ABI. A struct travels with its size.
 */
#ifndef FOREBAY_FOREBAY_H
#define FOREBAY_FOREBAY_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FOREBAY_API __attribute__((visibility("default")))
#else
#define FOREBAY_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The binary interface that this header describes. */
#define FOREBAY_ABI 1

/* Codes. */
#define FOREBAY_OK 0
#define FOREBAY_INVALID_ARGUMENT 1 /* The caller asked for something that can never work. */
#define FOREBAY_OUT_OF_MEMORY 2    /* Less memory than requested; retry after freeing some. */
#define FOREBAY_UNSUPPORTED 3      /* This build or this device cannot do it. */
#define FOREBAY_UNAVAILABLE 4      /* Something it needs is missing now: a driver, a peer. */
#define FOREBAY_IO_ERROR 5         /* A file or a socket failed. */
#define FOREBAY_TIMEOUT 6          /* A deadline passed. */
#define FOREBAY_PEER_LOST 7        /* Another rank failed or left. */
#define FOREBAY_CORRUPTION 8       /* Bytes are wrong: checksum, truncation. */
#define FOREBAY_INTERNAL 9         /* A defect in forebay, or in functions and kernels it runs. */

/* Types of elements. */
#define FOREBAY_FP32 0
#define FOREBAY_BF16 1
#define FOREBAY_FP16 2

typedef struct forebay_options forebay_options;
typedef struct forebay_device forebay_device;
typedef struct forebay_arena forebay_arena;
typedef struct forebay_pinned_pool forebay_pinned_pool;
typedef struct forebay_local_group forebay_local_group;
typedef struct forebay_communicator forebay_communicator;
typedef struct forebay_timeline forebay_timeline;
typedef struct forebay_engine forebay_engine;
typedef struct forebay_checkpointer forebay_checkpointer;
typedef struct forebay_file_store forebay_file_store;

/* == Library ==
 * Threads: any.
 * Since: 1.
 */

/* The ABI of the loaded library. A program compares it with FOREBAY_ABI. */
FOREBAY_API int32_t forebay_abi(void);

/* The version of the loaded library, "0.1.0".
 * Ownership: the library's, for ever. */
FOREBAY_API const char* forebay_version(void);

/* The text of the calling thread's last failed call; empty if none failed.
 * Ownership: the library's, until the thread's next failing call. */
FOREBAY_API const char* forebay_last_error(void);

/* The name of a code, "FOREBAY_OUT_OF_MEMORY"; "FOREBAY_UNKNOWN" for a number that is no code.
 * Ownership: the library's, for ever. */
FOREBAY_API const char* forebay_code_name(int32_t code);

/* == Options ==
 * Named values for the functions that make a handle. Each function reads the options that concern it and
 * ignores the others, so one set serves them all. Options of sharding have the names and values of the
 * command line of `forebay plan`, without dashes: "stage" "3", "offload-tier" "nvme:/mnt/a". The others are
 * of this interface alone. forebay_options_report() lists every name. Values that may change at each step,
 * such as lr and clip, are no options: see forebay_hyperparameter().
 * Threads: one at a time.
 * Since: 1.
 */

/* Makes a set in which every option has its default. */
FOREBAY_API int32_t forebay_options_create(forebay_options** options);

/* Sets one option from text. An option named "agree.WORD" takes any text: all ranks of an engine must have
 * the same one.
 * Errors: FOREBAY_INVALID_ARGUMENT, with the allowed values, or with the nearest name where there is no
 * such option. */
FOREBAY_API int32_t forebay_options_set(forebay_options* options, const char* name, const char* value);

/* The value of one option, as forebay_options_set() reads it. */
FOREBAY_API int32_t forebay_options_get(forebay_options* options, const char* name, const char** value);

/* Sets rank, size, local-rank, store and interface from the environment of the launcher that started this
 * process: torchrun, Open MPI, PMIx, MPICH, Slurm or forebay itself. Without one this is the only rank.
 * Errors: FOREBAY_INVALID_ARGUMENT for a variable that is out of range, or a pair of which one is missing. */
FOREBAY_API int32_t forebay_options_from_environment(forebay_options* options);

/* All options as a JSON array of {"name", "value", "values", "help"}. */
FOREBAY_API int32_t forebay_options_report(forebay_options* options, const char** json);

/* Ends a set of options. Handles that were made from it keep their values. */
FOREBAY_API void forebay_options_destroy(forebay_options* options);

/* == Devices ==
 * A place where bytes lie and where work is queued on streams.
 * Threads: any.
 * Since: 1.
 */

/* All cuda devices of this machine, as JSON: {"driver_version", "devices": [{"name", "memory_bytes",
 * ...}]}.
 * Ownership: the library's, until the thread's next call of this function.
 * Errors: FOREBAY_UNAVAILABLE without a driver. */
FOREBAY_API int32_t forebay_machine_report(const char** json);

/* Opens a device. `name`: "host", ordinary memory and threads as streams; "cuda" or "cuda:N"; "model",
 * books without bytes, on which an arena can be planned and no memory may be touched.
 * Options: device-memory, granularity, guard.
 * Errors: FOREBAY_UNAVAILABLE (no driver, no such device), FOREBAY_UNSUPPORTED. */
FOREBAY_API int32_t forebay_device_open(const char* name, forebay_options* options /* or null */,
                                        forebay_device** device);

/* Facts as JSON: "kind", "name", "granularity", "memory_bytes", "free_bytes", "host_accessible",
 * "numa_node". */
FOREBAY_API int32_t forebay_device_report(forebay_device* device, const char** json);

/* Ends the handle; the device ends with the last handle that was made from it. */
FOREBAY_API void forebay_device_close(forebay_device* device);

/* Makes a stream.
 * Ownership: destroy it before the device is closed. */
FOREBAY_API int32_t forebay_stream_create(forebay_device* device, void** stream);

/* The host waits until all work queued on the stream has run.
 * Errors: the first failure of queued work, each time it is asked. */
FOREBAY_API int32_t forebay_stream_synchronize(forebay_device* device, void* stream /* or null */);

/* Later work on `stream` waits for the work that is queued on `other` now. The host does not wait. */
FOREBAY_API int32_t forebay_stream_wait(forebay_device* device, void* stream /* or null */,
                                        void* other /* or null */);

/* Runs function(user) on a host thread, in the order of the stream. The function must not call forebay. */
FOREBAY_API int32_t forebay_stream_call(forebay_device* device, void* stream /* or null */,
                                        void (*function)(void* user), void* user /* or null */);

/* Waits for the stream's work, then ends it. Only for streams of forebay_stream_create(). */
FOREBAY_API void forebay_stream_destroy(forebay_device* device, void* stream);

/* Queues a copy. Either side may be memory of the device or of the host; both stay valid until the copy has
 * run. Copies to and from pinned memory do not make the host wait. */
FOREBAY_API int32_t forebay_copy(forebay_device* device, void* target, const void* source, uint64_t bytes,
                                 void* stream /* or null */);

/* Queues a fill: sets each byte of device memory to `value`, 0 to 255. */
FOREBAY_API int32_t forebay_fill(forebay_device* device, void* target, int32_t value, uint64_t bytes,
                                 void* stream /* or null */);

/* == Arena ==
 * Device memory in stream order, from one reserved address range; it does not fragment.
 * Threads: any.
 * Since: 1.
 */

/* The stream argument for blocks that only the host uses. */
#define FOREBAY_NO_STREAM ((void*)(intptr_t)-1)

/* The slot of an alias that has none. */
#define FOREBAY_NO_SLOT UINT32_MAX

#define FOREBAY_PERSISTENT 1 /* Allocated once and kept, such as weights. */
#define FOREBAY_FIXED 2      /* One chunk of its own, mapped once: can be registered or exported. */
#define FOREBAY_PAUSABLE 4   /* A tag: forebay_arena_pause() works. */

/* Makes an arena.
 * Options: arena-limit, arena-reserve, arena-chunk, arena-growth, arena-largest-chunk, arena-history.
 * Errors: FOREBAY_OUT_OF_MEMORY, FOREBAY_INVALID_ARGUMENT for chunks that the device cannot map, or a limit
 * below one. A limit beyond the device's memory is no error. */
FOREBAY_API int32_t forebay_arena_create(forebay_device* device, forebay_options* options /* or null */,
                                         forebay_arena** arena);

/* Allocates a block, aligned to 512 bytes. `stream` uses it first. `tag`: 0, or one of
 * forebay_arena_tag_create(). `flags`: 0, or FOREBAY_PERSISTENT and FOREBAY_FIXED combined. Waits 30 us
 * at most for other streams' events before it takes new memory, 2 ms before it takes much more than was ever
 * live or refuses, and never for their work.
 * Errors: FOREBAY_OUT_OF_MEMORY, with the free memory and the tags that hold memory. */
FOREBAY_API int32_t forebay_arena_allocate(forebay_arena* arena, uint64_t bytes, void* stream /* or null */,
                                           int32_t tag, int32_t flags, void** block);

/* Frees a block; its last use is queued on `stream`. Work that is queued there later may use the memory at
 * once.
 * Errors: FOREBAY_INVALID_ARGUMENT for an address that is not the start of a live block. */
FOREBAY_API int32_t forebay_arena_free(forebay_arena* arena, void* block, void* stream /* or null */);

/* Says that `stream` uses the block too. */
FOREBAY_API int32_t forebay_arena_record_stream(forebay_arena* arena, void* block,
                                                void* stream /* or null */);

/* Forgets a stream. Call it before the stream is destroyed, after its work has run. */
FOREBAY_API int32_t forebay_arena_retire_stream(forebay_arena* arena, void* stream /* or null */);

/* The rounded size of a live block; 0 if `block` is not the start of one. */
FOREBAY_API int32_t forebay_arena_block_bytes(forebay_arena* arena, void* block, uint64_t* bytes);

/* Makes an account to which blocks are charged, with a limit in bytes; 0: none. `flags`: 0 or
 * FOREBAY_PAUSABLE. */
FOREBAY_API int32_t forebay_arena_tag_create(forebay_arena* arena, const char* name, uint64_t limit_bytes,
                                             int32_t flags, int32_t* tag);

/* Gives the memory of a pausable tag's blocks back to the device; the addresses stay. `keep` not 0: the
 * contents go to pinned host memory and return with forebay_arena_resume(). No queued work may use the
 * blocks. */
FOREBAY_API int32_t forebay_arena_pause(forebay_arena* arena, int32_t tag, int32_t keep);

/* Takes the memory again, at the same addresses.
 * Errors: FOREBAY_OUT_OF_MEMORY; the tag stays paused and nothing is lost. */
FOREBAY_API int32_t forebay_arena_resume(forebay_arena* arena, int32_t tag);

/* Takes physical memory that no block shares; forebay_arena_alias_create() maps it. */
FOREBAY_API int32_t forebay_arena_slot_create(forebay_arena* arena, uint64_t bytes, int32_t tag,
                                              uint32_t* slot);

/* Gives the memory of a slot back.
 * Errors: FOREBAY_INVALID_ARGUMENT for a slot that has an alias or was destroyed. */
FOREBAY_API int32_t forebay_arena_slot_destroy(forebay_arena* arena, uint32_t slot);

/* Maps a slot's first bytes at new addresses. All aliases of a slot show the same bytes. */
FOREBAY_API int32_t forebay_arena_alias_create(forebay_arena* arena, uint32_t slot, uint64_t bytes,
                                               void** alias);

/* Maps an alias onto another slot; its address stays. `slot` FOREBAY_NO_SLOT: onto none, and the address is
 * inaccessible until the next call. No queued work may use the alias. */
FOREBAY_API int32_t forebay_arena_alias_move(forebay_arena* arena, void* alias, uint32_t slot);

/* Unmaps an alias, which no queued work may use. */
FOREBAY_API int32_t forebay_arena_alias_destroy(forebay_arena* arena, void* alias);

/* Blocks allocated for `stream` from here to forebay_arena_capture_end() belong to a captured graph: their
 * memory stays where it is until forebay_arena_capture_release(). */
FOREBAY_API int32_t forebay_arena_capture_begin(forebay_arena* arena, void* stream /* or null */,
                                                uint32_t* capture);

/* Ends the capture: later blocks belong to nobody's graph. */
FOREBAY_API int32_t forebay_arena_capture_end(forebay_arena* arena, uint32_t capture);

/* Gives the memory of a captured graph back, which has run for the last time. */
FOREBAY_API int32_t forebay_arena_capture_release(forebay_arena* arena, uint32_t capture);

/* Gives wholly free chunks back to the device, and says how many bytes. */
FOREBAY_API int32_t forebay_arena_trim(forebay_arena* arena, uint64_t* freed_bytes);

/* Sets the peaks to the present values. */
FOREBAY_API int32_t forebay_arena_reset_peaks(forebay_arena* arena);

/* A number of forebay_arena_report() by its path: "live_bytes", "tags.weights.peak_live_bytes". */
FOREBAY_API int32_t forebay_arena_number(forebay_arena* arena, const char* name, uint64_t* value);

/* Statistics as JSON, of the arena and of its "tags", and "text": a summary for out-of-memory messages. */
FOREBAY_API int32_t forebay_arena_report(forebay_arena* arena, const char** json);

/* Writes every mapped range and the latest events as a file that PyTorch's memory viewer reads.
 * Errors: FOREBAY_IO_ERROR. */
FOREBAY_API int32_t forebay_arena_snapshot(forebay_arena* arena, const char* path);

/* Gives all memory back once no other handle uses the arena. No queued work may use a block. */
FOREBAY_API void forebay_arena_destroy(forebay_arena* arena);

/* == Pinned pool ==
 * Pinned host memory in exact sizes, for copies that the host does not wait for.
 * Threads: any.
 * Since: 1.
 */

/* Makes a pool; takes no memory yet.
 * Options: pinned-limit, pinned-slab, pinned-numa-node, pinned-huge-pages. */
FOREBAY_API int32_t forebay_pinned_pool_create(forebay_device* device, forebay_options* options /* or null */,
                                               forebay_pinned_pool** pool);

/* Allocates a block, aligned to a page.
 * Errors: FOREBAY_OUT_OF_MEMORY. */
FOREBAY_API int32_t forebay_pinned_pool_allocate(forebay_pinned_pool* pool, uint64_t bytes, void** block);

/* Frees a block. It is used again once the work queued on `stream` has run; with FOREBAY_NO_STREAM at once.
 */
FOREBAY_API int32_t forebay_pinned_pool_free(forebay_pinned_pool* pool, void* block,
                                             void* stream /* or null */);

/* Takes memory until `bytes` in all are held. `block_bytes`: the size of all blocks to come; 0: they
 * differ. */
FOREBAY_API int32_t forebay_pinned_pool_prewarm(forebay_pinned_pool* pool, uint64_t bytes,
                                                uint64_t block_bytes);

/* Gives slabs without a block back to the system, and says how many bytes. */
FOREBAY_API int32_t forebay_pinned_pool_trim(forebay_pinned_pool* pool, uint64_t* freed_bytes);

/* The size of a live block in whole pages; 0 if `block` is not the start of one. */
FOREBAY_API int32_t forebay_pinned_pool_block_bytes(forebay_pinned_pool* pool, const void* block,
                                                    uint64_t* bytes);

/* Sets the peaks to the present values. */
FOREBAY_API int32_t forebay_pinned_pool_reset_peaks(forebay_pinned_pool* pool);

/* A number of forebay_pinned_pool_report() by its path: "held_bytes". */
FOREBAY_API int32_t forebay_pinned_pool_number(forebay_pinned_pool* pool, const char* name, uint64_t* value);

/* Statistics as JSON, and "text": a summary for out-of-memory messages. */
FOREBAY_API int32_t forebay_pinned_pool_report(forebay_pinned_pool* pool, const char** json);

/* Gives all memory back, live blocks included. No queued work may use a block. */
FOREBAY_API void forebay_pinned_pool_destroy(forebay_pinned_pool* pool);

/* == Ranks ==
 * A communicator is a set of ranks and the operations they do together. All ranks make the same calls in
 * the same order.
 * Threads: one at a time. forebay_communicator_status() and forebay_communicator_abort(): any.
 * Since: 1.
 */

/* A get() that finds nothing stores this as the size. */
#define FOREBAY_ABSENT UINT64_MAX

/* A rendezvous store of the caller: small named texts that all ranks see, such as torchrun's. The functions
 * are called from several threads, at the same time, until release(). They return 0, or a code if the store
 * does not work. */
typedef struct forebay_store_calls {
  uint64_t size; /* sizeof(forebay_store_calls). */
  void* user;    /* The first argument of every function. */
  /* Replaces the text if it is there already. */
  int32_t (*set)(void* user, const char* name, const void* text, uint64_t bytes);
  /* Does not wait: *bytes is the text's size, or FOREBAY_ABSENT. The text is written to `text` only if it
   * fits into `capacity` bytes; else the library asks again with more. */
  int32_t (*get)(void* user, const char* name, void* text, uint64_t capacity, uint64_t* bytes);
  /* Sets the text unless one is there. The library then reads the winner by get(). */
  int32_t (*set_if_absent)(void* user, const char* name, const void* text, uint64_t bytes);
  void (*remove)(void* user, const char* name);
  /* The library will not call again; or null. */
  void (*release)(void* user);
} forebay_store_calls;

/* Ranks as processes. They meet in the rendezvous store: `store` if it is given, else the option "store", a
 * directory that all ranks see or tcp://HOST:PORT. With `store`, the option "store-prefix" is put in front of
 * each name, so that several meetings may share one store; where it is empty the option "store" is. Without
 * the options rank and size, the launcher's environment counts; see forebay_options_from_environment().
 * Options: rank, size, store, store-prefix, interface, configuration, deadline, join-deadline, communicator
 * (auto, shm, gloo, nccl), nccl-library, nccl-order. `nccl`: the trainer's own ncclComm_t of the same ranks,
 * which the communicator uses alone and never destroys; or null.
 * Order: collective; blocks until all ranks have come.
 * Errors: FOREBAY_TIMEOUT naming the ranks that did not come, FOREBAY_PEER_LOST naming a rank that ended,
 * FOREBAY_INVALID_ARGUMENT for ranks that differ. */
FOREBAY_API int32_t forebay_communicator_create(forebay_device* device,
                                                forebay_options* options /* or null */,
                                                const forebay_store_calls* store /* or null */,
                                                void* nccl /* or null */,
                                                forebay_communicator** communicator);

/* Ranks as threads of this process: the place where they meet.
 * Options: deadline. */
FOREBAY_API int32_t forebay_local_group_create(int32_t size, forebay_options* options /* or null */,
                                               forebay_local_group** group);

/* The communicator of one rank of a local group, on that rank's own device. Once per rank.
 * Threads: any. */
FOREBAY_API int32_t forebay_local_group_communicator(forebay_local_group* group, int32_t rank,
                                                     forebay_device* device,
                                                     forebay_communicator** communicator);

/* Ends the handle; the communicators go on. */
FOREBAY_API void forebay_local_group_destroy(forebay_local_group* group);

/* Makes a communicator of the ranks that give the same color, ordered by key and rank. Collective. */
FOREBAY_API int32_t forebay_communicator_split(forebay_communicator* communicator, int32_t color, int32_t key,
                                               forebay_communicator** part);

/* This rank's number, and the number of ranks.
 * Threads: any. */
FOREBAY_API int32_t forebay_communicator_rank(forebay_communicator* communicator, int32_t* rank,
                                              int32_t* size);

/* Returns when every rank has called it. */
FOREBAY_API int32_t forebay_communicator_barrier(forebay_communicator* communicator);

/* Every rank gives `bytes` of host memory; `all` gets the pieces of all ranks, in rank order. */
FOREBAY_API int32_t forebay_communicator_exchange(forebay_communicator* communicator, const void* mine,
                                                  uint64_t bytes, void* all);

/* Queues the gather of one slice of each rank. Slice r goes to target + r * stride_bytes. */
FOREBAY_API int32_t forebay_communicator_all_gather(forebay_communicator* communicator, const void* source,
                                                    void* target, uint64_t stride_bytes, uint64_t bytes,
                                                    void* stream /* or null */);

/* Queues the sum of slices in rank order, in fp32. Slice r of the source is at source + r * stride_bytes.
 * `staging` has size * count elements of `dtype`. `first` not 0: target = sum; else target = target + sum. */
FOREBAY_API int32_t forebay_communicator_reduce_scatter(forebay_communicator* communicator,
                                                        const void* source, uint64_t stride_bytes,
                                                        uint64_t count, int32_t dtype, void* staging,
                                                        float* target, int32_t first,
                                                        void* stream /* or null */);

/* Queues the replacement of `count` elements by their sums over the ranks, in rank order, in fp32, rounded
 * once. `staging` has forebay_all_reduce_staging() bytes. */
FOREBAY_API int32_t forebay_communicator_all_reduce(forebay_communicator* communicator, void* data,
                                                    uint64_t count, int32_t dtype, void* staging,
                                                    uint64_t bucket_bytes, void* stream /* or null */);

/* The bytes of staging of an all-reduce with these buckets; 0 for one rank. */
FOREBAY_API int32_t forebay_all_reduce_staging(int32_t ranks, uint64_t bucket_bytes, int32_t dtype,
                                               uint64_t* bytes);

/* Queues one message to a rank. A send and its receive have the same tag and size, in the order of issue. */
FOREBAY_API int32_t forebay_communicator_send(forebay_communicator* communicator, const void* source,
                                              uint64_t bytes, int32_t peer, uint32_t tag,
                                              void* stream /* or null */);

/* Queues the receipt of one message of a rank. */
FOREBAY_API int32_t forebay_communicator_receive(forebay_communicator* communicator, void* target,
                                                 uint64_t bytes, int32_t peer, uint32_t tag,
                                                 void* stream /* or null */);

/* Lets NCCL use mapped memory, such as an arena's, without copies of its own. Every rank registers its
 * part.
 * Errors: FOREBAY_UNSUPPORTED for other communicators. */
FOREBAY_API int32_t forebay_communicator_register(forebay_communicator* communicator, void* address,
                                                  uint64_t bytes);

/* Ends a registration, by the address that was registered. */
FOREBAY_API int32_t forebay_communicator_deregister(forebay_communicator* communicator, void* address);

/* Returns the code of the first failure of all ranks, or 0. */
FOREBAY_API int32_t forebay_communicator_status(forebay_communicator* communicator);

/* Fails this communicator on every rank, with a code other than 0 and a text. */
FOREBAY_API int32_t forebay_communicator_abort(forebay_communicator* communicator, int32_t code,
                                               const char* text);

/* JSON: "name", "rank", "size", "sent_bytes", "received_bytes", "operations", "last_operations". */
FOREBAY_API int32_t forebay_communicator_report(forebay_communicator* communicator, const char** json);

/* Waits for queued operations. */
FOREBAY_API void forebay_communicator_destroy(forebay_communicator* communicator);

/* == Timeline ==
 * Spans of work on named tracks, for Perfetto. An engine that is made with one marks its work there.
 * Threads: any.
 * Since: 1.
 */

/* Makes a timeline; its clock starts here. */
FOREBAY_API int32_t forebay_timeline_create(forebay_timeline** timeline);

/* Begins a span. Spans of one track follow each other or lie inside each other. */
FOREBAY_API int32_t forebay_timeline_begin(forebay_timeline* timeline, const char* track);

/* Ends the latest span of the track that is open, and names it. */
FOREBAY_API int32_t forebay_timeline_end(forebay_timeline* timeline, const char* track, const char* name);

/* The spans in the format of chrome://tracing. */
FOREBAY_API int32_t forebay_timeline_report(forebay_timeline* timeline, const char** json);

/* Ends the handle; engines that mark their work there go on. */
FOREBAY_API void forebay_timeline_destroy(forebay_timeline* timeline);

/* == Engine: description ==
 * The units of a model, their placement under a ZeRO stage, and the training step. The result is bit for
 * bit the same for every stage, offload and bucket size.
 * Order: create; add units, their parameters and then their ties; commit; set values; then steps.
 * Threads: one at a time.
 * Since: 1.
 */

#define FOREBAY_BACKWARD_READS_NOTHING 1 /* Unit: its backward pass reads no parameters; saves a gather. */
#define FOREBAY_FROZEN 1                 /* Parameter: neither reduced nor updated. */
#define FOREBAY_REPLICATED 2             /* Parameter: every tensor-parallel rank has it whole. */
#define FOREBAY_OPTIONAL 4               /* Parameter: its gradient may be left out where others may not. */
#define FOREBAY_ELEMENTWISE 8            /* Parameter: Muon updates it by AdamW: an embedding or a head. */

/* Makes an engine over the ranks of `communicator`, on the same device. `grid`: all tensor- and
 * pipeline-parallel ranks together, from which `communicator` was split. Takes no device memory yet.
 * Options: all of sharding (stage, dtype, micro-steps, offload, ...), order-of-units (strict, recorded, or
 * recorded:ORDER with the "recorded_order" that forebay_engine_report() gave in an earlier run: then the plan
 * is exact and gathers run ahead from the first step on), average, units-at-once, beta1, beta2, epsilon,
 * loss-scale, loss-scale-growth-interval, loss-scale-minimum, host-threads, near-device, counts-replicated,
 * optional-gradients (on; off: forebay_step() refuses a first step in which the gradient of a parameter
 * without FOREBAY_OPTIONAL was never asked for), find-non-finite, agree.*. */
FOREBAY_API int32_t forebay_engine_create(forebay_device* device, forebay_communicator* communicator,
                                          forebay_communicator* grid /* or null */,
                                          forebay_timeline* timeline /* or null */,
                                          forebay_options* options /* or null */, forebay_engine** engine);

/* Makes an engine that only plans: it is described like any other, forebay_engine_report() has its plan,
 * and it cannot be committed. No device and no memory is needed.
 * Options: as forebay_engine_create(), and size: the number of ranks. */
FOREBAY_API int32_t forebay_engine_plan(forebay_options* options /* or null */, forebay_engine** engine);

/* Adds parameters that are gathered together, usually one transformer block. `name` is unique in the model.
 * `flags`: 0 or FOREBAY_BACKWARD_READS_NOTHING. `unit` is the index in order of these calls. */
FOREBAY_API int32_t forebay_engine_add_unit(forebay_engine* engine, const char* name, int32_t flags,
                                            int32_t* unit);

/* Adds a parameter. `name` is unique in the model. `group`: the parameter group, for
 * forebay_hyperparameter(). `flags`: 0, or FOREBAY_FROZEN, FOREBAY_REPLICATED, FOREBAY_OPTIONAL and
 * FOREBAY_ELEMENTWISE combined. `index` counts within the unit. */
FOREBAY_API int32_t forebay_engine_add_parameter(forebay_engine* engine, int32_t unit, const char* name,
                                                 uint64_t count, int32_t group, int32_t flags,
                                                 int32_t* index);

/* Declares the dimensions of a parameter, which saved state keeps for the tools that read it and from which
 * Adafactor makes its factors: 64 at most. Muon takes a parameter of two dimensions for a matrix. Their
 * product is the parameter's count. For an engine that only plans, too. Order: before commit. */
FOREBAY_API int32_t forebay_engine_declare_shape(forebay_engine* engine, int32_t unit, int32_t index,
                                                 const uint64_t* shape, uint64_t dimension_count);

/* Says that the parameter is one tensor-parallel rank's part of a larger tensor of dimensions `shape`:
 * dimension `dimension` is divided into `sections` of equal length (3 for query, key and value side by side),
 * and each section into `parts` pieces, of which this rank has number `part`. Saved state then has the whole
 * tensor, and any other grid of ranks loads its own parts. Order: before commit. */
FOREBAY_API int32_t forebay_engine_declare_split(forebay_engine* engine, int32_t unit, int32_t index,
                                                 const uint64_t* shape, uint64_t dimension_count,
                                                 int32_t dimension, uint64_t sections, uint64_t part,
                                                 uint64_t parts);

/* `unit` uses a parameter of an earlier unit too. `index`: its number in `unit`, after the unit's own
 * parameters, for forebay_parameter() and forebay_gradient(). An acquisition of `unit` gathers the owner too,
 * and counts as one of the owner: the owner's gradient is complete when both have had their backward passes.
 * Order: after the unit's own parameters; forebay_engine_add_parameter() is refused for the unit from here
 * on.
 */
FOREBAY_API int32_t forebay_engine_tie(forebay_engine* engine, int32_t unit, int32_t of_unit,
                                       int32_t of_index, int32_t* index);

/* All ranks of `stages`, which are pipeline stages, have this unit, with the same values. Needs a grid, and
 * order-of-units "strict". */
FOREBAY_API int32_t forebay_engine_share(forebay_engine* engine, int32_t unit, forebay_communicator* stages);

/* Adds the units of a model from the text of its Hugging Face config.json: gpt2 or llama. Parameter group 0
 * has the matrices, parameter group 1 the biases and norms. */
FOREBAY_API int32_t forebay_engine_add_model(forebay_engine* engine, const char* config_json);

/* Declares device memory for activations: forebay_engine_activations() after commit. */
FOREBAY_API int32_t forebay_engine_declare_activations(forebay_engine* engine, uint64_t bytes);

/* The most that may be declared, within the budget of all ranks. Collective. */
FOREBAY_API int32_t forebay_engine_activation_room(forebay_engine* engine, uint64_t* bytes);

/* Compares the ranks' plans and options, checks the budget and takes all memory. Parameters are zero
 * afterwards.
 * Order: once it has succeeded, never again. Collective.
 * Errors: FOREBAY_OUT_OF_MEMORY naming the largest pool; FOREBAY_INVALID_ARGUMENT naming a difference and
 * its ranks, on every rank. */
FOREBAY_API int32_t forebay_engine_commit(forebay_engine* engine);

/* The address of a parameter, in the engine's dtype. It stays the same until the engine is destroyed. The
 * bytes are valid between forebay_acquire() and forebay_release() of the unit. */
FOREBAY_API int32_t forebay_engine_address(forebay_engine* engine, int32_t unit, int32_t index,
                                           void** address);

/* The declared activation memory; null if none was declared. */
FOREBAY_API int32_t forebay_engine_activations(forebay_engine* engine, void** address);

/* The plan, and after commit the statistics, as JSON: "options", "model", "plan", "recorded_order",
 * "statistics". Waits for queued work. */
FOREBAY_API int32_t forebay_engine_report(forebay_engine* engine, const char** json);

/* A number of forebay_engine_report() by its path, the names of nested objects with dots between them:
 * "plan.bytes.parameters", "statistics.peak.parameters". Numbers in arrays have no path.
 * These do not wait: "attempted_steps", "applied_steps", "committed_step"; and, for a caller that an
 * exception may have kept from noting it, "open_steps" and "open_evaluations" (1 between their begin and end,
 * else 0), "begun_micro_steps" (of the open step) and "open_acquisitions". Errors: FOREBAY_INVALID_ARGUMENT
 * with the nearest name. */
FOREBAY_API int32_t forebay_engine_number(forebay_engine* engine, const char* name, uint64_t* value);

/* Waits for all queued work; then gives everything back once no other handle uses the engine. Streams that
 * were given to it outlive it or are drained before. */
FOREBAY_API void forebay_engine_destroy(forebay_engine* engine);

/* == Engine: values ==
 * Order: after commit, between steps.
 * Threads: one at a time.
 * Since: 1.
 */

/* Sets `count` elements of a parameter, from element `first` on, from host memory. All ranks give the same
 * values, which forebay_step() and saves check. A part that is given again is so on every rank, unless all of
 * the parameter is. */
FOREBAY_API int32_t forebay_engine_set(forebay_engine* engine, int32_t unit, int32_t index, int32_t dtype,
                                       const void* values, uint64_t first, uint64_t count);

/* The same for values that were read in the engine's dtype and changed: an element whose value in that dtype
 * is that of its master keeps the master, and its moving average. */
FOREBAY_API int32_t forebay_engine_set_changed(forebay_engine* engine, int32_t unit, int32_t index,
                                               int32_t dtype, const void* values, uint64_t first,
                                               uint64_t count);

/* Reads `count` elements of a parameter's fp32 master, rounded to `dtype`, into host memory. Collective. */
FOREBAY_API int32_t forebay_engine_get(forebay_engine* engine, int32_t unit, int32_t index, int32_t dtype,
                                       void* values, uint64_t first, uint64_t count);

/* Calls `visitor` with the fp32 masters of every parameter, in order of registration, one unit at a time in
 * host memory. The values are valid during the call, and the visitor must not call the engine. Collective. */
FOREBAY_API int32_t forebay_engine_visit(forebay_engine* engine,
                                         void (*visitor)(void* user, int32_t unit, int32_t index,
                                                         const char* name, const float* values,
                                                         uint64_t count),
                                         void* user /* or null */);

/* XXH3-128 over the fp32 masters, as 32 hexadecimal digits and a zero. Collective. */
FOREBAY_API int32_t forebay_engine_digest(forebay_engine* engine, char digest[33]);

/* The same over the masters that this rank keeps. Not collective; works after a failure too. */
FOREBAY_API int32_t forebay_engine_shard_digest(forebay_engine* engine, char digest[33]);

/* == Engine: steps ==
 * forebay_step_begin; for each micro-step forebay_micro_step_begin, then forebay_acquire and
 * forebay_release of each unit forward and backward; forebay_step. With order-of-units "strict" units run
 * in order of registration, and backward in reverse, one at a time. With "recorded" they may run in any
 * order, several at once, several times or not at all; the order of the first step is recorded, and gathers
 * run ahead by it from the second step on. A step that differs is slower and has the same result, and its
 * order is recorded anew. All ranks use the same order. A rank may leave out units, or single uses, of the
 * recorded order: it does not acquire them, goes on to its next unit, and contributes zeros. A use that all
 * ranks leave out in a step is no longer in the order. In a step in which the order changes no rank leaves
 * out units. Recorded order has no forwards-ahead and no shared units.
 *
 * In recorded order the option micro-steps is the most that a step may have: forebay_step() takes those that
 * were begun, and the average is over them. A micro-step ends with the next micro-step, an evaluation,
 * forebay_norm() or forebay_step(); a unit that had a forward and no backward pass by then contributes
 * nothing. Forward passes and no backward pass at all are refused in the first micro-step; a later one adds
 * zeros, and counts in the average. A unit without a backward pass on any rank keeps its weights, m and v.
 *
 * A gradient that was never asked for in a step is zero. One that was asked for is used as it is: a trainer
 * that asks for an address and writes nothing there gives the engine the bytes of an earlier use. With the
 * option guard, or FOREBAY_HOST_GUARD=1 in the environment, a host device fills it with NaN first, and memory
 * of a unit that is not acquired is inaccessible: run a new trainer so once.
 * Threads: one at a time.
 * Since: 1.
 */

/* The `group` of values that hold for the whole step. */
#define FOREBAY_WHOLE_STEP (-1)

typedef struct forebay_step_result {
  double grad_norm;  /* Global, times "gradient-factor", before clipping; NaN when skipped or abandoned. */
  double loss_scale; /* The scale that this step used. */
  double metric_sum; /* The sum of "metric" over ranks. */
  int32_t skipped;   /* Not 0: a gradient was not finite, so only the loss scale changed. */
  int32_t stop;      /* Not 0: some rank asked to stop. */
  int32_t abandoned; /* Not 0: some rank gave this step up, so nothing changed. */
  int32_t reserved;  /* 0. */
} forebay_step_result;

/* Sets one value for the steps to come. For a parameter group: "lr" (1e-3), "weight-decay" (0), "beta1",
 * "beta2", "epsilon" (the engine's). For FOREBAY_WHOLE_STEP: "clip" (0: none) and "gradient-factor" (1),
 * which stay; "metric" and "stop" (0), which count for the next step alone. forebay_step() judges the
 * values, and names one that differs between ranks.
 * Order: after forebay_engine_commit().
 * Errors: FOREBAY_INVALID_ARGUMENT with the nearest name. */
FOREBAY_API int32_t forebay_hyperparameter(forebay_engine* engine, int32_t group, const char* name,
                                           double value);

/* Begins a step.
 * Order: after forebay_engine_commit(), forebay_step() or forebay_abandon(); no evaluation is open.
 * Errors: the failure of a peer, a device or a file since the last step. */
FOREBAY_API int32_t forebay_step_begin(forebay_engine* engine);

/* Begins the forward pass of micro-step `index`: 0, 1, ... */
FOREBAY_API int32_t forebay_micro_step_begin(forebay_engine* engine, int32_t index);

/* From here to forebay_evaluation_end() units are acquired forward only, and belong to no step. Between
 * steps, or within a step, where it ends the present micro-step: call it after the micro-step's backward
 * pass. All ranks run the same evaluations. A rank that calls forebay_abandon() runs none within the step, so
 * where that may happen evaluations belong between steps. In order-of-units "strict" evaluations are between
 * steps, and acquire units in order of registration. The training stays bit for bit the same. */
FOREBAY_API int32_t forebay_evaluation_begin(forebay_engine* engine);

/* Ends the evaluation. */
FOREBAY_API int32_t forebay_evaluation_end(forebay_engine* engine);

/* Gathers a unit, for the forward pass (`backward` 0) or the backward pass. `stream` waits for the gather;
 * the host does not wait: a host that reads calls forebay_stream_synchronize() first. */
FOREBAY_API int32_t forebay_acquire(forebay_engine* engine, int32_t unit, int32_t backward,
                                    void* stream /* or null */);

/* The address of a parameter of an acquired unit. The same as forebay_engine_address(), but refused where
 * the unit is not acquired. */
FOREBAY_API int32_t forebay_parameter(forebay_engine* engine, int32_t unit, int32_t index, void** address);

/* The place for a gradient of a unit that was acquired backward, in the engine's dtype; null for a frozen
 * parameter. `accumulate`: 0: write "="; else "+=". A trainer that asks writes all of it, on the stream, or
 * after synchronizing it, before the release. A gradient that is not asked for is zero. */
FOREBAY_API int32_t forebay_gradient(forebay_engine* engine, int32_t unit, int32_t index, void** address,
                                     int32_t* accumulate);

/* The same for a trainer that only adds: the memory is zeroed, in the order of the stream, where it holds no
 * value. `address` is null for a frozen parameter. */
FOREBAY_API int32_t forebay_zeroed_gradient(forebay_engine* engine, int32_t unit, int32_t index,
                                            void** address);

/* Optional: this gradient is complete in the order of the stream. */
FOREBAY_API int32_t forebay_gradient_ready(forebay_engine* engine, int32_t unit, int32_t index);

/* Ends the latest acquisition of the unit that is not released, at this point of the stream, which is the
 * one that acquired it. */
FOREBAY_API int32_t forebay_release(forebay_engine* engine, int32_t unit, void* stream /* or null */);

/* In place of the forward pass: this rank does not use the unit in this micro-step. In recorded order it
 * has no effect. */
FOREBAY_API int32_t forebay_skip(forebay_engine* engine, int32_t unit);

/* The trainer multiplies its loss by this: 1 except for fp16. */
FOREBAY_API int32_t forebay_loss_scale(forebay_engine* engine, double* scale);

/* The global norm of the gradients, before clipping and "gradient-factor". Not finite where a gradient is
 * not, or where a rank abandoned the step. forebay_step() takes it over. Collective; waits for the
 * gradients.
 * Order: after the last backward pass, before forebay_step(). */
FOREBAY_API int32_t forebay_norm(forebay_engine* engine, double* norm);

/* Decides about the step and queues the update. `bytes`: sizeof(forebay_step_result) of the caller's header;
 * the library writes no more than that, so that an older program may use a newer library. Collective.
 * Errors: FOREBAY_INVALID_ARGUMENT for values that are missing or not finite (nothing changes), or that
 * differ between ranks (the engine is failed). */
FOREBAY_API int32_t forebay_step(forebay_engine* engine, forebay_step_result* result, uint64_t bytes);

/* Gives the current step up, for example after an exception in the trainer: gradients are dropped,
 * acquisitions end, and weights, counts and loss scale stay on all ranks. The other ranks run their step, and
 * forebay_step() reports it there; or they abandon it too. `micro_steps`: the number of micro-steps that the
 * other ranks run in this step, those that were begun included; 0: as many as the option micro-steps. With
 * one rank, or where all abandon, 0 is right. This rank takes part in the collectives of these micro-steps,
 * as they were recorded, and of no evaluation: the other ranks must follow the recorded order, or the engine
 * fails. Before an order was recorded every rank abandons, after the same acquisitions in the step;
 * evaluations before the step do not count. Order-of-units "recorded" only. Collective.
 * Errors: FOREBAY_INVALID_ARGUMENT where ranks differ before an order was recorded, at the latest after a
 * deadline, with the operations and their ranks; the engine is failed then. */
FOREBAY_API int32_t forebay_abandon(forebay_engine* engine, int32_t micro_steps);

/* == Engine: state ==
 * Order: after commit, between steps; forebay_save() says when a state is saved in a step.
 * Threads: one at a time.
 * Since: 1.
 */

/* Keeps other jobs from saving in `directory` until the engine is destroyed or the process ends. Call it
 * before training, so that a mistake costs no training; forebay_save() does the same while it saves.
 * Collective.
 * Errors: FOREBAY_UNAVAILABLE naming the process that holds it; FOREBAY_IO_ERROR; FOREBAY_INVALID_ARGUMENT
 * where another tool wrote the file `latest` there, and where another engine of this process saved its state
 * there or loaded it, and this one did not. */
FOREBAY_API int32_t forebay_lock(forebay_engine* engine, const char* directory);

/* Saves weights, optimizer states, step counts and loss scale under `directory`, which it makes if it is not
 * there, with any bytes of the trainer's own, of which rank 0's are kept. A kill at any moment leaves the
 * last saved state whole.
 * With order-of-units "recorded" this, forebay_save_begin() and forebay_save_end() also work in a step, after
 * a micro-step's backward pass, which they end: the state is that of the step before, without the gradients
 * that wait. A rank that calls forebay_abandon() saves nothing within that step. Collective.
 * Errors: on all ranks; the engine goes on: FOREBAY_IO_ERROR; FOREBAY_INVALID_ARGUMENT where another tool
 * wrote the file `latest` there, where that names the state of a model with other parameters, and where
 * another engine of this process saved its state there or loaded it, and this one did not. */
FOREBAY_API int32_t forebay_save(forebay_engine* engine, const char* directory,
                                 const void* trainer_state /* or null */, uint64_t trainer_state_bytes);

/* The same as forebay_save() while training goes on: copies the values to pinned memory in the order of the
 * updates, and a thread writes them. Only the next update waits for the copy. The newest `keep` states stay.
 * A save that was begun earlier is ended first. Needs the option save-async. Collective. Errors:
 * FOREBAY_IO_ERROR on all ranks, also for a save that was begun earlier; then nothing is begun. */
FOREBAY_API int32_t forebay_save_begin(forebay_engine* engine, const char* directory,
                                       const void* trainer_state /* or null */, uint64_t trainer_state_bytes,
                                       int32_t keep);

/* Waits until the state that was begun is whole under its name. Without one it has no effect. Collective.
 * Errors: FOREBAY_IO_ERROR on all ranks: the state was not saved; the engine goes on. */
FOREBAY_API int32_t forebay_save_end(forebay_engine* engine);

/* Freezes a parameter from the next step on (`frozen` not 0), or unfreezes it: its gradient is null, and its
 * value, optimizer states and average stay. Every rank makes the same calls. */
FOREBAY_API int32_t forebay_engine_freeze(forebay_engine* engine, int32_t unit, int32_t index,
                                          int32_t frozen);

/* Sets all m and v to zero, and the number "applied_steps": the next step is the first of another optimizer.
 * Every rank makes the call, between steps. */
FOREBAY_API int32_t forebay_engine_reset_moments(forebay_engine* engine);

/* Exchanges the weights and their moving average (option "ema"), so that evaluations and forebay_engine_get()
 * are of the average; the next call exchanges them again. No step, saving or loading in between. Collective.
 * Errors: FOREBAY_INVALID_ARGUMENT without the option, or with the option "master-weights" off. */
FOREBAY_API int32_t forebay_engine_swap_average(forebay_engine* engine);

/* Loads the latest saved state, from any number of ranks and any stage. Collective.
 * Ownership: trainer_state is the engine's, until its next call that gives out a text.
 * Errors: FOREBAY_IO_ERROR (there is none), FOREBAY_CORRUPTION, FOREBAY_INVALID_ARGUMENT (another model). */
FOREBAY_API int32_t forebay_load(forebay_engine* engine, const char* directory, const void** trainer_state,
                                 uint64_t* trainer_state_bytes);

#define FOREBAY_SPILL_PARAMETERS 1
#define FOREBAY_SPILL_GRADIENTS 2
#define FOREBAY_SPILL_OPTIMIZER 4
#define FOREBAY_SPILL_WORKSPACE 8 /* Buckets and activations; their contents are lost. */
#define FOREBAY_SPILL_ALL 15

/* Gives the device memory of these states back until forebay_fetch(); pinned host memory keeps them.
 * Addresses stay. Needs the option spillable.
 * Errors: FOREBAY_OUT_OF_MEMORY if the host has no room; nothing is lost. */
FOREBAY_API int32_t forebay_spill(forebay_engine* engine, int32_t states);

/* Takes back all spilled states.
 * Errors: FOREBAY_OUT_OF_MEMORY; the rest stays spilled, and the call may be repeated. */
FOREBAY_API int32_t forebay_fetch(forebay_engine* engine);

/* == Activations ==
 * A checkpointer keeps the activations that a recomputation starts from: whole, partitioned over
 * tensor-parallel ranks, or offloaded.
 * Threads: one at a time.
 * Since: 1.
 */

/* Makes a checkpointer over tensor-parallel ranks, one or more. Nothing else uses the communicator after
 * commit.
 * Options: activation-micro-batches, activation-look-ahead, activation-fetch-bytes-per-second,
 * activation-gather-bytes-per-second, activation-leases, activation-staging-count,
 * activation-tier (cpu, nvme:DIR), activation-device-memory, activation-host-memory,
 * activation-file-staging, activation-region (on: forebay_checkpointer_commit() is given memory). */
FOREBAY_API int32_t forebay_checkpointer_create(forebay_device* device, forebay_communicator* communicator,
                                                forebay_timeline* timeline /* or null */,
                                                forebay_options* options /* or null */,
                                                forebay_checkpointer** checkpointer);

/* Declares one activation that each micro-batch saves, in the order of a forward pass.
 * Options: activation-placement (keep, partition, partition+spill, auto), activation-shared,
 * activation-spill-fraction, activation-state-bytes, activation-recompute-seconds. */
FOREBAY_API int32_t forebay_checkpointer_declare(forebay_checkpointer* checkpointer, int32_t unit,
                                                 int32_t slot, uint64_t bytes,
                                                 forebay_options* options /* or null */);

/* Takes all memory; or uses `region`, of "plan.device_bytes" bytes, aligned to 512. Collective. */
FOREBAY_API int32_t forebay_checkpointer_commit(forebay_checkpointer* checkpointer,
                                                void* region /* or null */);

/* Saves an activation, with a small record of host memory that returns with it. Work queued on the stream
 * later may overwrite the source. */
FOREBAY_API int32_t forebay_checkpointer_save(forebay_checkpointer* checkpointer, int32_t unit, int32_t slot,
                                              int32_t micro_batch, const void* source, uint64_t bytes,
                                              const void* record /* or null */, uint64_t record_bytes,
                                              void* stream /* or null */);

/* Loads a saved activation. `stream` waits until it is there. Address, size, record and its size are valid
 * until forebay_checkpointer_load_end(). */
FOREBAY_API int32_t forebay_checkpointer_load(forebay_checkpointer* checkpointer, int32_t unit, int32_t slot,
                                              int32_t micro_batch, void* stream /* or null */, void** data,
                                              uint64_t* bytes, const void** record /* or null */,
                                              uint64_t* record_bytes /* or null */);

/* Ends a load, and with it the saved activation, in the order of its stream. */
FOREBAY_API int32_t forebay_checkpointer_load_end(forebay_checkpointer* checkpointer, int32_t unit,
                                                  int32_t slot, int32_t micro_batch);

/* Drops a saved activation that will not be loaded. */
FOREBAY_API int32_t forebay_checkpointer_discard(forebay_checkpointer* checkpointer, int32_t unit,
                                                 int32_t slot, int32_t micro_batch);

/* Drops all saved activations. */
FOREBAY_API int32_t forebay_checkpointer_discard_all(forebay_checkpointer* checkpointer);

/* The first failure of queued work on any rank. Collective. Call it after the stream was waited for, before
 * forebay_step(). */
FOREBAY_API int32_t forebay_checkpointer_check(forebay_checkpointer* checkpointer);

/* JSON: "plan", and after commit "statistics". */
FOREBAY_API int32_t forebay_checkpointer_report(forebay_checkpointer* checkpointer, const char** json);

/* A number of forebay_checkpointer_report() by its path: "plan.device_bytes". */
FOREBAY_API int32_t forebay_checkpointer_number(forebay_checkpointer* checkpointer, const char* name,
                                                uint64_t* value);

/* Waits for its queued work; then gives everything back. */
FOREBAY_API void forebay_checkpointer_destroy(forebay_checkpointer* checkpointer);

/* == File store ==
 * Named byte ranges in anonymous files, read and written without waiting. For a trainer's own large states;
 * the engine and the checkpointer have stores of their own.
 * Threads: any.
 * Since: 1.
 */

/* Makes a store. Takes no disk space yet.
 * Options: store-directories (DIR[,DIR...]), store-engine (auto, io_uring, threads), store-block,
 * store-depth, store-checksums, store-direct. */
FOREBAY_API int32_t forebay_file_store_create(forebay_options* options, forebay_file_store** store);

/* Makes a range of `bytes` and takes its disk space. `name` is new.
 * Errors: FOREBAY_OUT_OF_MEMORY without room on the disk. */
FOREBAY_API int32_t forebay_file_store_range(forebay_file_store* store, const char* name, uint64_t bytes,
                                             uint32_t* range);

/* Begins a read or a write of whole granules and returns. The store uses the memory until the ticket is
 * done. */
FOREBAY_API int32_t forebay_file_store_read(forebay_file_store* store, uint32_t range, uint64_t offset,
                                            void* memory, uint64_t bytes, uint64_t* ticket);

/* The same for a write; the store does not change the memory. */
FOREBAY_API int32_t forebay_file_store_write(forebay_file_store* store, uint32_t range, uint64_t offset,
                                             const void* memory, uint64_t bytes, uint64_t* ticket);

/* Waits until a ticket is done, and spends it. `deadline`: milliseconds from now; 0 asks without waiting.
 * Errors: the transfer's; FOREBAY_TIMEOUT: the ticket stays. */
FOREBAY_API int32_t forebay_file_store_wait(forebay_file_store* store, uint64_t ticket, uint64_t deadline);

/* JSON: "granule_bytes", "description" and other facts, "read_bytes" and other statistics. */
FOREBAY_API int32_t forebay_file_store_report(forebay_file_store* store, const char** json);

/* Drops queued transfers and waits for those that run. */
FOREBAY_API void forebay_file_store_destroy(forebay_file_store* store);

#ifdef __cplusplus
}
#endif

#endif /* FOREBAY_FOREBAY_H */
