// Spills a device buffer to a file, uses its memory for other work, and fetches the buffer again.
//
//   build/release/bin/spill-and-fetch [DIRECTORY]      default: the temporary directory
//
// A Mover moves bytes between a Store and device memory in the order of its stream, through a few pinned
// buffers. Events order the moves relative to other work on the device; the host waits once, at the end. The
// file is anonymous, so it disappears when the program ends.

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

constexpr std::size_t kBytes = (32 << 20) + 12345;  // Any number works: the store pads it.

void run(const std::string& directory) {
  using namespace forebay;
  const auto backend = value_or_throw(HostBackend::create({.memory_bytes = 64 << 20}));
  const auto store = value_or_throw(make_file_store({.directories = {directory}}));
  const auto pool = value_or_throw(PinnedPool::create(*backend, {.slab_bytes = 1}));
  const auto buffers =
      value_or_throw(StagingBuffers::create(*pool, {.buffer_bytes = 2 << 20, .buffer_count = 4}));
  const auto mover = value_or_throw(Mover::create(*backend, *store, *buffers));

  // A buffer on the device, written on another stream.
  std::vector<std::uint8_t> values(kBytes);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint8_t>(i * i >> 7);
  DevicePtr const device = value_or_throw(backend->alloc(kBytes));
  const Stream work = value_or_throw(backend->stream_create());
  throw_if_error(backend->copy_async(device, values.data(), kBytes, work));
  const Event written = value_or_throw(backend->event_create());
  throw_if_error(backend->event_record(written, work));

  // Its range in the store. The space is allocated here, so a full disk fails here and not later.
  const StoreRange range = value_or_throw(store->create_range("buffer", kBytes));
  const StoredBytes stored{.range = range, .offset = 0, .bytes = kBytes, .range_bytes = kBytes};

  throw_if_error(backend->stream_wait(mover->stream(), written));
  throw_if_error(mover->spill(device, stored));
  const Event spilled = value_or_throw(backend->event_create());
  throw_if_error(backend->event_record(spilled, mover->stream()));

  // Other work uses the memory meanwhile.
  throw_if_error(backend->stream_wait(work, spilled));
  throw_if_error(backend->fill_async(device, 0xA5, kBytes, work));
  const Event done = value_or_throw(backend->event_create());
  throw_if_error(backend->event_record(done, work));

  throw_if_error(backend->stream_wait(mover->stream(), done));
  throw_if_error(mover->fetch(stored, device));
  throw_if_error(backend->stream_synchronize(mover->stream()));
  throw_if_error(mover->status());  // Errors of the store; streams do not report them.

  const bool same = std::memcmp(device, values.data(), kBytes) == 0;
  const StoreStatistics moved = store->statistics();
  std::printf("store: %s\n", store->facts().description.c_str());
  std::printf("spilled %s and fetched %s through %s of pinned memory: %s\n",
              format_bytes(moved.written_bytes).c_str(), format_bytes(moved.read_bytes).c_str(),
              format_bytes(buffers->memory().size()).c_str(), same ? "the same bytes" : "OTHER BYTES");

  for (const Event event : {written, spilled, done}) throw_if_error(backend->event_destroy(event));
  throw_if_error(backend->stream_destroy(work));
  throw_if_error(backend->free(device));
  if (!same) throw Error(StatusCode::kCorruption, "the fetched bytes differ from the spilled bytes");
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
