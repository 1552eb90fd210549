#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "allocator/arena/learned.h"
#include "forebay/arena.h"
#include "forebay/check.h"
#include "forebay/units.h"
#include "runtime/device/model/script.h"
#include "tests/allocator/arena/watched_backend.h"
#include "tests/fuzz/learned_input.h"
#include "tests/fuzz/picker.h"

// Learned placements: the bytes as a file, and as placements that an arena follows. Any of them may cost the
// gain and nothing else: no block shows the memory of another one, and nothing is left at the end.
namespace {

using namespace forebay;
using forebay::testing::Extent;
using forebay::testing::Picker;

constexpr std::size_t kChunk = 64_KiB;
constexpr std::size_t kMemory = 256 * kChunk;

internal::LearnedPlacements pick_placements(Picker& picker) {
  internal::LearnedPlacements learned;
  learned.granule_bytes = kChunk;
  learned.reserve_bytes = (1 + picker.pick(4)) * 8 * kMemory;
  learned.transient_offset = picker.pick(3) == 0 ? 0 : learned.reserve_bytes / 4;
  learned.peak_live_bytes = picker.pick(256) * kChunk;
  for (std::uint32_t i = 1 + picker.pick(12); i > 0; --i)
    learned.chunk_bytes.push_back((1 + picker.pick(8)) * kChunk);
  std::size_t offset = picker.pick(4) == 0 ? 0 : learned.transient_offset;
  for (std::uint32_t i = picker.pick(24); i > 0; --i) {
    const auto chunk = picker.pick(static_cast<std::uint32_t>(learned.chunk_bytes.size()));
    learned.mappings.push_back({offset, chunk});
    offset += learned.chunk_bytes[chunk] + (picker.pick(4) == 0 ? picker.pick(16) * kChunk : 0);
  }
  std::size_t live = 0;
  for (std::uint32_t i = picker.pick(64); i > 0; --i) {
    internal::LearnedPlacement one;
    one.bytes = (1 + picker.pick(1024)) * kBlockGranule;
    one.live_bytes = live;
    one.kind = (picker.pick(8) == 0 ? 0 : 2) + 1;  // The region, and the same stream as before.
    const auto at =
        learned.mappings.empty()
            ? 0
            : learned.mappings[picker.pick(static_cast<std::uint32_t>(learned.mappings.size()))].offset;
    one.offset = at + picker.pick(256) * kBlockGranule;
    live = picker.pick(8) == 0 ? 0 : live + one.bytes;
    learned.placements.push_back(one);
  }
  return learned;
}

class Job {
 public:
  explicit Job(std::string_view learned) {
    ModelBackendOptions options;
    options.memory_bytes = kMemory;
    options.granularity = kChunk;
    backend_ = std::move(ScriptedModelBackend::create(std::move(options), {})).value();
    watched_ = std::make_unique<forebay::testing::WatchedBackend>(*backend_);
    ArenaOptions arena;
    arena.reserve_bytes = 16 * kMemory;
    arena.learned = learned;
    Result<std::unique_ptr<Arena>> made = Arena::create(*watched_, arena);
    if (made.ok()) arena_ = std::move(made).value();
  }
  ~Job() {
    while (!blocks_.empty()) free_last();
    if (arena_ != nullptr) arena_->trim();
    arena_.reset();
    FOREBAY_CHECK(backend_->live_handle_count() == 0, "%zu handles leaked", backend_->live_handle_count());
  }
  bool can_run() const { return arena_ != nullptr; }

  // The requests of the placements, so that they are followed.
  void play(const internal::LearnedPlacements& learned) {
    for (const internal::LearnedPlacement& one : learned.placements) {
      while (live_ > one.live_bytes && !blocks_.empty()) free_last();
      AllocationRequest request;
      request.bytes = one.bytes;
      request.region = one.kind < 2 ? Region::kPersistent : Region::kTransient;
      const Result<DevicePtr> address = arena_->allocate(request);
      if (address.ok()) take(address.value(), one.bytes);
    }
  }

 private:
  struct Block {
    DevicePtr address;
    std::size_t bytes;
    std::vector<Extent> memory;
  };

  void take(DevicePtr address, std::size_t bytes) {
    Block block{address, bytes, watched_->shown(address, bytes)};
    for (const Extent& extent : block.memory) {
      const auto next = memory_.lower_bound(extent.begin);
      FOREBAY_CHECK(next == memory_.end() || next->first >= extent.end, "memory was handed out twice");
      FOREBAY_CHECK(next == memory_.begin() || std::prev(next)->second <= extent.begin, "handed out twice");
      memory_[extent.begin] = extent.end;
    }
    live_ += bytes;
    blocks_.push_back(std::move(block));
  }
  void free_last() {
    const Block block = std::move(blocks_.back());
    blocks_.pop_back();
    for (const Extent& extent : block.memory) memory_.erase(extent.begin);
    live_ -= block.bytes;
    FOREBAY_CHECK(arena_->free(block.address, {}).ok(), "free");
  }

  std::unique_ptr<ScriptedModelBackend> backend_;
  std::unique_ptr<forebay::testing::WatchedBackend> watched_;
  std::unique_ptr<Arena> arena_;
  std::vector<Block> blocks_;
  std::map<std::uint64_t, std::uint64_t> memory_;
  std::size_t live_ = 0;
};

}  // namespace

// The first byte selects: the rest is a file, the numbers of a file whose sum is right, or choices.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  internal::LearnedPlacements learned;
  if (data[0] == 'f' || data[0] == 'n') {
    const std::string file =
        forebay::testing::learned_file(std::string_view(reinterpret_cast<const char*>(data), size));
    Result<internal::LearnedPlacements> decoded = internal::LearnedPlacements::decode(file);
    if (!decoded.ok()) return 0;
    learned = std::move(decoded).value();
  } else {
    Picker picker(rest);
    learned = pick_placements(picker);
  }
  Job job(learned.encode());
  if (!job.can_run()) return 0;
  for (int pass = 0; pass < 3; ++pass) job.play(learned);
  return 0;
}
