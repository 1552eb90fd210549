// The arena under memory interfaces of others: a container of the C++ standard library takes it as a
// std::pmr::memory_resource, and CUDA libraries (CCCL) as a memory resource in stream order.
//
//   build/release/bin/arena-for-others
//
// The device is made of host memory here, so that the host may read it. On a GPU only the second half makes
// sense.

#include <concepts>
#include <cstddef>
#include <cstdio>
#include <memory_resource>
#include <numeric>
#include <vector>

#include "forebay/arena.h"
#include "forebay/error.h"
#include "forebay/host_backend.h"
#include "forebay/stream_call.h"
#include "forebay/units.h"

#ifdef ARENA_FOR_OTHERS_HAS_CCCL
#include <cuda/memory_resource>
#endif

namespace {

using namespace forebay;

// For containers that the host alone uses: no stream is involved.
class ArenaOfTheHost : public std::pmr::memory_resource {
 public:
  explicit ArenaOfTheHost(Arena& arena) : arena_(arena) {}

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    AllocationRequest request;
    request.bytes = bytes;
    if (alignment > request.alignment) request.alignment = alignment;
    return value_or_throw(arena_.allocate(request));
  }
  void do_deallocate(void* block, std::size_t, std::size_t) override {
    throw_if_error(arena_.free(static_cast<DevicePtr>(block), {}));
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  Arena& arena_;
};

// For libraries that work on streams: a memory resource of CCCL 3.1 (cuda::mr::resource). A block that is
// freed on a stream serves the stream's next allocation at once, and other streams when this one has come so
// far. StreamRef is cuda::stream_ref, or any type with get().
class ArenaInStreamOrder {
 public:
  explicit ArenaInStreamOrder(Arena& arena) : arena_(&arena) {}

  template <typename StreamRef>
  void* allocate(StreamRef stream, std::size_t bytes, std::size_t alignment) {
    AllocationRequest request;
    request.bytes = bytes;
    if (alignment > request.alignment) request.alignment = alignment;
    request.stream = {stream.get()};
    return value_or_throw(arena_->allocate(request));
  }
  template <typename StreamRef>
  void deallocate(StreamRef stream, void* block, std::size_t, std::size_t) {
    throw_if_error(arena_->free(static_cast<DevicePtr>(block), {stream.get()}));
  }
  // Without a stream: no queued work uses the block at either end.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    return allocate(NoStream(), bytes, alignment);
  }
  void deallocate_sync(void* block, std::size_t bytes, std::size_t alignment) {
    deallocate(NoStream(), block, bytes, alignment);
  }
  friend bool operator==(const ArenaInStreamOrder&, const ArenaInStreamOrder&) = default;

 private:
  struct NoStream {
    static void* get() { return nullptr; }
  };

  Arena* arena_;
};

// The same concept after CCCL's documentation, for a build without its headers.
template <typename Resource, typename StreamRef>
concept ResourceInStreamOrder = std::equality_comparable<Resource> &&
    requires(Resource& resource, StreamRef stream, void* block, std::size_t n) {
  { resource.allocate_sync(n, n) } -> std::same_as<void*>;
  { resource.deallocate_sync(block, n, n) } -> std::same_as<void>;
  { resource.allocate(stream, n, n) } -> std::same_as<void*>;
  { resource.deallocate(stream, block, n, n) } -> std::same_as<void>;
};

struct StreamRef {
  void* get() const { return stream.handle; }
  Stream stream;
};
static_assert(ResourceInStreamOrder<ArenaInStreamOrder, StreamRef>);
#ifdef ARENA_FOR_OTHERS_HAS_CCCL
static_assert(cuda::mr::resource<ArenaInStreamOrder>);
constexpr const char* kChecked = "checked against CCCL's headers";
#else
constexpr const char* kChecked = "checked against CCCL's documentation";
#endif

// An array in the order of a stream, as such libraries have, over any resource.
template <ResourceInStreamOrder<StreamRef> Resource>
class StreamArray {
 public:
  StreamArray(Resource resource, StreamRef stream, std::size_t count)
      : resource_(resource),
        stream_(stream),
        count_(count),
        values_(static_cast<int*>(resource_.allocate(stream, count * sizeof(int), alignof(int)))) {}
  ~StreamArray() { resource_.deallocate(stream_, values_, count_ * sizeof(int), alignof(int)); }
  StreamArray(const StreamArray&) = delete;
  int* data() const { return values_; }

 private:
  Resource resource_;
  StreamRef stream_;
  std::size_t count_;
  int* values_;
};

bool run() {
  const auto backend = value_or_throw(HostBackend::create({.memory_bytes = 64u << 20}));
  const auto arena = value_or_throw(Arena::create(*backend));

  ArenaOfTheHost host(*arena);
  std::pmr::vector<int> numbers(1000, &host);
  std::iota(numbers.begin(), numbers.end(), 1);
  std::printf("std::pmr::vector: %zu numbers, sum %d, %s of the arena are live\n", numbers.size(),
              std::accumulate(numbers.begin(), numbers.end(), 0),
              format_bytes(arena->statistics().live_bytes).c_str());

  const StreamRef stream{value_or_throw(backend->stream_create())};
  const ArenaInStreamOrder resource(*arena);
  const int* places[2];
  int sum = 0;
  for (int round = 0; round < 2; ++round) {
    // Freed at the end of the scope, before its work has run.
    const StreamArray array(resource, stream, 1000);
    places[round] = array.data();
    throw_if_error(call_on(*backend, stream.stream, [values = array.data(), &sum] {
      std::iota(values, values + 1000, 1);
      sum += std::accumulate(values, values + 1000, 0);
    }));
  }
  throw_if_error(backend->stream_synchronize(stream.stream));
  std::printf("in stream order: two arrays at %s address, sum %d; %s\n",
              places[0] == places[1] ? "one" : "more than one", sum, kChecked);
  throw_if_error(arena->stream_retire(stream.stream));
  throw_if_error(backend->stream_destroy(stream.stream));
  return places[0] == places[1] && sum == 2 * 500500;
}

}  // namespace

int main() {
  try {
    if (run()) return 0;
    std::fprintf(stderr, "arena-for-others: another result was expected\n");
  } catch (const Error& error) {
    std::fprintf(stderr, "arena-for-others: %s\n", error.what());
  }
  return 1;
}
