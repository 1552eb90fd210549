// Device memory lent out and taken back: a buffer is spilled to a file, its memory is used for something
// else, and the buffer is fetched again.
//
//   build/release/bin/spill-and-fetch [DIRECTORY]      the temporary directory, unless one is named
//
// A Mover takes bytes between a Store and device memory in the order of its stream, through a few page-locked
// buffers. Events say when a move may begin and when it has ended, as for any other work on the device; the
// host waits once, at the end. The file has no name, so nothing is left behind, however this ends.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "forebay/file_store.h"
#include "forebay/host_backend.h"
#include "forebay/mover.h"
#include "forebay/pinned_pool.h"
#include "forebay/staging_buffers.h"
#include "forebay/units.h"

namespace {

constexpr std::size_t kBytes = (32 << 20) + 12345;  // Any number: the store pads, the mover counts.

void run(const std::string& directory) {
  using namespace forebay;
  const auto backend = value_or_throw(HostBackend::create({.memory_bytes = 64 << 20}));
  const auto store = value_or_throw(make_file_store({.directories = {directory}}));
  const auto pool = value_or_throw(PinnedPool::create(*backend, {.slab_bytes = 1}));
  const auto buffers =
      value_or_throw(StagingBuffers::create(*pool, {.buffer_bytes = 2 << 20, .buffer_count = 4}));
  const auto mover = value_or_throw(Mover::create(*backend, *store, *buffers));

  // A buffer on the device, written by work on a stream of its own.
  std::vector<std::uint8_t> values(kBytes);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint8_t>(i * i >> 7);
  DevicePtr const device = value_or_throw(backend->alloc(kBytes));
  const Stream work = value_or_throw(backend->stream_create());
  throw_if_error(backend->copy_async(device, values.data(), kBytes, work));
  const Event written = value_or_throw(backend->event_create());
  throw_if_error(backend->event_record(written, work));

  // Its place in the store. The room is taken here, so a full disk is met here and nowhere later.
  const StoreRange range = value_or_throw(store->create_range("buffer", kBytes));
  const StoredBytes stored{.range = range, .offset = 0, .bytes = kBytes, .range_bytes = kBytes};

  throw_if_error(backend->stream_wait(mover->stream(), written));
  throw_if_error(mover->spill(device, stored));
  const Event spilled = value_or_throw(backend->event_create());
  throw_if_error(backend->event_record(spilled, mover->stream()));

  // Somebody else has the memory meanwhile.
  throw_if_error(backend->stream_wait(work, spilled));
  throw_if_error(backend->fill_async(device, 0xA5, kBytes, work));
  const Event done = value_or_throw(backend->event_create());
  throw_if_error(backend->event_record(done, work));

  throw_if_error(backend->stream_wait(mover->stream(), done));
  throw_if_error(mover->fetch(stored, device));
  throw_if_error(backend->stream_synchronize(mover->stream()));
  throw_if_error(mover->status());  // What the store met; a stream does not tell.

  const bool same = std::memcmp(device, values.data(), kBytes) == 0;
  const StoreStatistics moved = store->statistics();
  std::printf("store: %s\n", store->facts().description.c_str());
  std::printf("spilled %s and fetched %s through %s of page-locked memory: %s\n",
              format_bytes(moved.written_bytes).c_str(), format_bytes(moved.read_bytes).c_str(),
              format_bytes(buffers->memory().size()).c_str(), same ? "the same bytes" : "OTHER BYTES");

  for (const Event event : {written, spilled, done}) throw_if_error(backend->event_destroy(event));
  throw_if_error(backend->stream_destroy(work));
  throw_if_error(backend->free(device));
  if (!same) throw Error(StatusCode::kCorruption, "what came back differs from what was sent away");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2 || (argc == 2 && argv[1][0] == '-')) {
    std::fprintf(stderr, "usage: spill-and-fetch [DIRECTORY]\n");
    return 2;
  }
  try {
    run(argc > 1 ? argv[1] : std::filesystem::temp_directory_path().string());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "spill-and-fetch: %s\n", error.what());
    return 1;
  }
}
