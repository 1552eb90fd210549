// ArenaOperations: any sequence of operations on an arena over a ModelBackend, chosen by a source of numbers,
// with books that say what must hold after each operation.
//
// Checks: no memory is allocated at two addresses at once, nor before the work that may still use it has run,
// except to the stream of that work; no address is unmapped that a live block or queued work uses; no other
// request gets a capture's memory until its release, and no mapping changes during a capture; a paused tag's
// blocks keep their addresses; accounts and limits agree; nothing is left at the end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "forebay/arena.h"
#include "forebay/check.h"
#include "forebay/units.h"
#include "runtime/device/model/script.h"
#include "tests/allocator/arena/watched_backend.h"

namespace forebay::testing {

class ArenaOperations {
 public:
  static constexpr std::size_t kChunk = 64_KiB;
  static constexpr std::size_t kLimit = 192 * kChunk;
  static constexpr unsigned kStreams = 3;

  // `pick(n)` gives a number below n.
  ArenaOperations(std::function<std::uint32_t(std::uint32_t)> pick, std::uint64_t seed)
      : pick_(std::move(pick)) {
    ModelBackendOptions options;
    options.memory_bytes = kLimit + 8 * kChunk;
    options.granularity = kChunk;
    backend_ = std::move(ScriptedModelBackend::create(std::move(options),
                                                      {.order = ModelOrder::kSeeded, .seed = seed}))
                   .value();
    watched_ = std::make_unique<WatchedBackend>(*backend_);
    watched_->on_unmap = [this](DevicePtr address, std::size_t bytes) { check_unmap(address, bytes); };
    watched_->on_map = [this](DevicePtr, std::size_t, bool again) {
      FOREBAY_CHECK(!again || capturing_ == nullptr || aliasing_ || pausing_ != 0 || failing_,
                    "memory was mapped again in a capture");
    };
    watched_->on_event_record = [this](Stream stream) {
      FOREBAY_CHECK(capturing_ == nullptr || !(capturing_->stream == stream), "an event in a capture");
    };
    faultless_ = pick_(2) == 0;
    const unsigned kind = pick_(4);
    ArenaOptions arena_options;
    arena_options.limit_bytes = kLimit;
    arena_options.reserve_bytes = (kind == 3 ? 2 : 16) * kLimit;
    arena_options.growth_bytes = kind == 0 ? 0 : 8 * kChunk;
    arena_options.largest_chunk_bytes = kind == 1 ? kChunk : kind == 2 ? 16 * kChunk : 0;
    arena_options.history_count = kind == 0 ? 16 : 0;
    arena_ = std::move(Arena::create(*watched_, arena_options)).value();
    for (auto& state : streams_) state.stream = backend_->stream_create().value();
    tags_[1] = arena_->tag_create("limited", kLimit / 4).value();
    tags_[2] = arena_->tag_create({.name = "pausable", .pausable = true}).value();
    tags_[3] = arena_->tag_create({.name = "other", .pausable = true}).value();
  }
  ~ArenaOperations() { finish(); }

  void step() {
    const std::uint32_t kind = pick_(1000);
    if (kind < 430) {
      allocate();
    } else if (kind < 850) {
      if (!blocks_.empty()) free_block(pick_(static_cast<std::uint32_t>(blocks_.size())));
    } else if (kind < 890) {
      record_stream();
    } else if (kind < 899) {
      repeat();
    } else if (kind < 900) {
      keep_strangers();
    } else if (kind < 920) {
      pause_or_resume(2 + pick_(2));
    } else if (kind < 940) {
      capture();
    } else if (kind < 960) {
      slot();
    } else if (kind < 970) {
      arena_->trim();
    } else if (kind < 980) {
      synchronize(pick_(kStreams));
    } else if (kind < 985) {
      retire(pick_(kStreams));
    } else if (kind < 990) {
      misuse();
    } else if (kind < 995) {
      fail_next();
    } else if (kind < 997) {
      free_everything();
    } else {
      (void)arena_->snapshot();
      (void)arena_->report();
    }
    check_accounts();
  }

  std::uint64_t recalled_count() const { return arena_->statistics().recalled_count; }
  std::uint64_t moved_chunk_count() const { return arena_->statistics().moved_chunk_count; }
  std::uint64_t refused_count() const { return refused_count_; }
  std::uint64_t paused_count() const { return paused_count_; }
  std::uint64_t captured_count() const { return captured_count_; }
  std::uint64_t refinement_count() const { return arena_->statistics().refinement_count; }

 private:
  struct StreamState {
    Stream stream;
    std::uint64_t marked = 0;
    std::uint64_t passed = 0;
    static void pass(void* state) { ++static_cast<StreamState*>(state)->passed; }
  };
  struct Block {
    DevicePtr address = nullptr;
    std::size_t bytes = 0;
    unsigned tag = 0;
    int stream = -1;
    unsigned recorded = 0;  // A bit per stream.
    bool fixed = false;
    std::vector<Extent> memory;
  };
  struct Pending {
    DevicePtr address;
    std::size_t bytes;
    std::vector<Extent> memory;
    std::uint64_t points[kStreams];  // 0: none.
    unsigned tag;
  };
  struct CaptureState {
    Capture capture;
    Stream stream;
    std::vector<Extent> memory;
  };
  struct SlotState {
    Slot slot;
    std::size_t bytes;
    std::vector<DevicePtr> aliases;
  };

  static bool overlap(const Extent& a, const Extent& b) { return a.begin < b.end && b.begin < a.end; }
  bool done(const Pending& pending) const {
    for (unsigned s = 0; s < kStreams; ++s) {
      if (streams_[s].passed < pending.points[s]) return false;
    }
    return true;
  }

  void check_unmap(DevicePtr address, std::size_t bytes) const {
    FOREBAY_CHECK(capturing_ == nullptr || aliasing_ || pausing_ != 0 || failing_,
                  "unmapped during a capture");
    for (const Block& block : blocks_) {
      const bool apart = block.address + block.bytes <= address || address + bytes <= block.address;
      FOREBAY_CHECK(apart || (block.tag != 0 && block.tag == pausing_) || paused_[block.tag],
                    "a live block was unmapped");
    }
    for (const Pending& pending : pending_) {
      const bool apart = pending.address + pending.bytes <= address || address + bytes <= pending.address;
      FOREBAY_CHECK(apart || done(pending), "unmapped what queued work may use");
    }
  }

  // Enters the memory of a new block in the books, after checking that no other block has it.
  void take(Block& block) {
    block.memory = watched_->shown(block.address, block.bytes);
    const CaptureState* own = capturing_ != nullptr && block.stream >= 0 &&
                                      streams_[block.stream].stream == capturing_->stream && block.tag < 2
                                  ? capturing_.get()
                                  : nullptr;
    for (const Extent& extent : block.memory) {
      auto next = live_.lower_bound(extent.begin);
      FOREBAY_CHECK(next == live_.end() || next->first >= extent.end, "memory was handed out twice");
      FOREBAY_CHECK(next == live_.begin() || std::prev(next)->second <= extent.begin, "handed out twice");
      for (const auto& state : captured_) {
        if (own == state.get()) continue;
        for (const Extent& other : state->memory) {
          FOREBAY_CHECK(!overlap(extent, other), "a capture's memory went to somebody else");
        }
      }
    }
    for (const Extent& extent : block.memory) live_[extent.begin] = extent.end;
    if (own != nullptr) {
      capturing_->memory.insert(capturing_->memory.end(), block.memory.begin(), block.memory.end());
    }
    for (std::size_t i = 0; i < pending_.size();) {
      const Pending& pending = pending_[i];
      if (done(pending)) {
        pending_[i] = std::move(pending_.back());
        pending_.pop_back();
        continue;
      }
      for (unsigned s = 0; s < kStreams; ++s) {
        if (streams_[s].passed >= pending.points[s] || static_cast<int>(s) == block.stream) continue;
        for (const Extent& extent : block.memory) {
          for (const Extent& other : pending.memory) {
            FOREBAY_CHECK(!overlap(extent, other), "handed out while stream %u has work to do with it", s);
          }
        }
      }
      ++i;
    }
  }

  std::size_t random_bytes() {
    switch (pick_(10)) {
      case 0:
        return pick_(3);
      case 1:
      case 2:
      case 3:
      case 4:
        return 1 + pick_(kChunk);
      case 9:
        return 1 + pick_(48 * kChunk);
      default:
        return 1 + pick_(6 * kChunk);
    }
  }

  bool allocate_one(std::size_t bytes, std::size_t alignment, unsigned tag, int stream, Region region,
                    bool fixed) {
    AllocationRequest request;
    request.bytes = bytes;
    request.alignment = alignment;
    request.region = region;
    request.tag = tags_[tag];
    if (stream >= 0) request.stream = streams_[stream].stream;
    request.fixed = fixed;
    Result<DevicePtr> address = arena_->allocate(request);
    if (paused_[tag]) {
      FOREBAY_CHECK(address.status().code() == StatusCode::kUnavailable, "allocated for a paused tag");
      return false;
    }
    if (!address.ok()) {
      const StatusCode code = address.status().code();
      FOREBAY_CHECK(code == StatusCode::kOutOfMemory || (failing_ && code == StatusCode::kInternal),
                    "refused: %s", address.status().to_string().c_str());
      ++refused_count_;
      return false;
    }
    const std::size_t unit = fixed ? kChunk : kBlockGranule;
    Block block;
    block.address = address.value();
    block.bytes = std::max(round_up(bytes, unit), unit);
    block.tag = tag;
    block.stream = stream;
    block.fixed = fixed;
    FOREBAY_CHECK(reinterpret_cast<std::uintptr_t>(block.address) % alignment == 0, "not aligned");
    FOREBAY_CHECK(arena_->block_bytes(block.address) == block.bytes, "not as large as rounded");
    take(block);
    if (fixed) {
      int mapping_count = 0;
      const Extent chunk = watched_->chunk_at(block.address, &mapping_count);
      FOREBAY_CHECK(mapping_count == 1 && chunk.end - chunk.begin == block.bytes, "not a chunk of its own");
    }
    live_bytes_[tag] += block.bytes;
    blocks_.push_back(std::move(block));
    return true;
  }

  void allocate() {
    if (blocks_.size() >= 120) free_block(pick_(120));
    const std::size_t bytes = random_bytes();
    const std::size_t alignment = pick_(4) == 0 ? std::size_t{512} << pick_(8) : kBlockGranule;
    allocate_one(bytes, alignment, pick_(2) == 0 ? 0 : pick_(4), static_cast<int>(pick_(kStreams + 1)) - 1,
                 pick_(3) == 0 ? Region::kPersistent : Region::kTransient, pick_(32) == 0);
  }

  // A step, the same each time it comes: its sizes are those of one of four seeds.
  void repeat() {
    const std::uint32_t which = pick_(4);
    const int rounds = 1 + static_cast<int>(pick_(3));
    for (int round = 0; round < rounds; ++round) {
      std::uint32_t state = 1000 + which;
      const auto next = [&state] { return state = state * 1664525u + 1013904223u, state >> 8; };
      std::vector<DevicePtr> mine;
      for (int i = 0; i < 24; ++i) {
        if (allocate_one(1 + next() % (2 * kChunk), kBlockGranule, 0, static_cast<int>(which % kStreams),
                         Region::kTransient, false)) {
          mine.push_back(blocks_.back().address);
        }
        if (next() % 3 == 0 && !mine.empty()) drop(&mine, next() % mine.size());
      }
      while (!mine.empty()) drop(&mine, next() % mine.size());
    }
  }
  // Blocks of sizes that were never asked for, after many requests of a few sizes. They stay for a while, so
  // the arena lets the later ones share chunks (Strangers).
  void keep_strangers() {
    const int stream = static_cast<int>(pick_(kStreams));
    for (int i = 0; i < 6; ++i) {
      for (std::size_t j = 0; j < 300; ++j) {
        if (allocate_one((1 + j % 4) * kChunk / 2, kBlockGranule, 0, stream, Region::kTransient, false))
          free_block(blocks_.size() - 1);
      }
      new_bytes_ += kBlockGranule;
      allocate_one(kChunk + new_bytes_ % (4 * kChunk), kBlockGranule, 0, stream, Region::kTransient, false);
    }
  }
  void drop(std::vector<DevicePtr>* mine, std::size_t at) {
    const DevicePtr address = (*mine)[at];
    mine->erase(mine->begin() + static_cast<std::ptrdiff_t>(at));
    for (std::size_t i = blocks_.size(); i-- > 0;) {
      if (blocks_[i].address == address) return free_block(i);
    }
  }

  // With nothing live, and the streams idle or not, free memory may go back to the device. Sometimes a step
  // that leaves gaps comes right before.
  void free_everything() {
    if (pick_(2) == 0) repeat();
    aliasing_ = true;
    for (std::size_t at = slots_.size(); at-- > 0;) destroy_slot(at);
    aliasing_ = false;
    if (pick_(2) == 0) synchronize_all();
    while (!blocks_.empty()) free_block(blocks_.size() - 1);
  }

  void free_block(std::size_t index) {
    index = std::min(index, blocks_.size() - 1);
    Block block = std::move(blocks_[index]);
    if (index + 1 < blocks_.size()) blocks_[index] = std::move(blocks_.back());
    blocks_.pop_back();
    Pending pending{block.address, block.bytes, block.memory, {}, block.tag};
    bool waits = false;
    for (unsigned s = 0; s < kStreams; ++s) {
      if (static_cast<int>(s) != block.stream && (block.recorded >> s & 1) == 0) continue;
      if (paused_[block.tag]) continue;  // Nothing uses it.
      pending.points[s] = mark(s);
      waits = true;
    }
    for (const Extent& extent : block.memory) live_.erase(extent.begin);
    live_bytes_[block.tag] -= block.bytes;
    if (waits) pending_.push_back(std::move(pending));
    const Status status =
        arena_->free(block.address, block.stream >= 0 ? streams_[block.stream].stream : Stream());
    FOREBAY_CHECK(status.ok(), "%s", status.to_string().c_str());
  }

  std::uint64_t mark(unsigned s) {
    FOREBAY_CHECK(backend_->call_host(streams_[s].stream, &StreamState::pass, &streams_[s]).ok(), "queue");
    return ++streams_[s].marked;
  }
  void synchronize(unsigned s) {
    FOREBAY_CHECK(backend_->stream_synchronize(streams_[s].stream).ok(), "synchronize");
  }
  void synchronize_all() {
    for (unsigned s = 0; s < kStreams; ++s) synchronize(s);
  }

  void record_stream() {
    if (blocks_.empty()) return;
    Block& block = blocks_[pick_(static_cast<std::uint32_t>(blocks_.size()))];
    const unsigned s = pick_(kStreams);
    FOREBAY_CHECK(arena_->record_stream(block.address, streams_[s].stream).ok(), "record_stream");
    block.recorded |= 1u << s;
  }

  void retire(unsigned s) {
    if (capturing_ != nullptr && capturing_->stream == streams_[s].stream) return;
    synchronize(s);
    FOREBAY_CHECK(arena_->stream_retire(streams_[s].stream).ok(), "retire");
    FOREBAY_CHECK(backend_->stream_destroy(streams_[s].stream).ok(), "destroy");
    streams_[s].stream = backend_->stream_create().value();
    for (Block& block : blocks_) {
      // Nothing of its own is queued there any more, nor will be.
      if (block.stream == static_cast<int>(s)) block.stream = -1;
      block.recorded &= ~(1u << s);
    }
  }

  void pause_or_resume(unsigned tag) {
    if (!paused_[tag]) {
      synchronize_all();
      pausing_ = tag;
      const Status status = arena_->pause(tags_[tag], false);
      pausing_ = 0;
      const bool excused = failing_ || capturing_ != nullptr;
      // No event is recorded on a captured stream, so memory that it freed stays in use.
      FOREBAY_CHECK(status.ok() || excused, "%s", status.to_string().c_str());
      // Nothing has changed, unless one call failed and undoing it failed too.
      if (!status.ok() && status.message().find("in part only") == std::string::npos) return;
      paused_[tag] = true;
      ++paused_count_;
      return;
    }
    pausing_ = tag;
    const Status status = arena_->resume(tags_[tag]);
    pausing_ = 0;
    if (!status.ok()) {
      FOREBAY_CHECK(status.code() == StatusCode::kOutOfMemory || failing_, "%s", status.to_string().c_str());
      return;
    }
    paused_[tag] = false;
    for (Block& block : blocks_) {
      if (block.tag != tag) continue;
      for (const Extent& extent : block.memory) live_.erase(extent.begin);
    }
    for (Block& block : blocks_) {
      if (block.tag == tag) take(block);
    }
  }

  void capture() {
    if (capturing_ != nullptr) {
      FOREBAY_CHECK(arena_->capture_end(capturing_->capture).ok(), "capture_end");
      capturing_ = nullptr;
    } else if (captured_.size() >= 3) {
      const std::size_t at = pick_(static_cast<std::uint32_t>(captured_.size()));
      FOREBAY_CHECK(arena_->capture_release(captured_[at]->capture).ok(), "capture_release");
      captured_.erase(captured_.begin() + static_cast<std::ptrdiff_t>(at));
    } else {
      auto state = std::make_shared<CaptureState>();
      state->stream = streams_[pick_(kStreams)].stream;
      Result<Capture> capture = arena_->capture_begin(state->stream);
      FOREBAY_CHECK(capture.ok(), "%s", capture.status().to_string().c_str());
      state->capture = capture.value();
      captured_.push_back(state);
      capturing_ = state;
      ++captured_count_;
    }
  }

  void slot() {
    aliasing_ = true;
    if (slots_.size() < 3 && pick_(2) == 0) {
      const std::size_t bytes = 1 + pick_(5 * kChunk);
      Result<Slot> slot = arena_->slot_create(bytes, 0);
      if (slot.ok()) {
        slots_.push_back({slot.value(), bytes, {}});
        slot_bytes_ += round_up(bytes, kBlockGranule);
      }
    } else if (!slots_.empty()) {
      const std::size_t at = pick_(static_cast<std::uint32_t>(slots_.size()));
      SlotState& state = slots_[at];
      if (state.aliases.size() < 3 && pick_(2) == 0) {
        Result<DevicePtr> alias = arena_->alias_create(state.slot, state.bytes);
        if (alias.ok()) state.aliases.push_back(alias.value());
      } else {
        destroy_slot(at);
      }
    }
    aliasing_ = false;
  }

  // Stays when an alias cannot be destroyed.
  void destroy_slot(std::size_t at) {
    SlotState& state = slots_[at];
    while (!state.aliases.empty() && arena_->alias_destroy(state.aliases.back()).ok())
      state.aliases.pop_back();
    if (!state.aliases.empty()) return;
    FOREBAY_CHECK(arena_->slot_destroy(state.slot).ok(), "slot_destroy");
    slot_bytes_ -= round_up(state.bytes, kBlockGranule);
    slots_.erase(slots_.begin() + static_cast<std::ptrdiff_t>(at));
  }

  void misuse() {
    if (blocks_.empty()) return;
    const Block& block = blocks_[pick_(static_cast<std::uint32_t>(blocks_.size()))];
    FOREBAY_CHECK(!arena_->alias_destroy(block.address).ok(), "a block is no alias");
    FOREBAY_CHECK(block.bytes == kBlockGranule || !arena_->free(block.address + kBlockGranule, {}).ok(),
                  "freed the middle of a block");
    FOREBAY_CHECK(!arena_->pause(0, false).ok() && !arena_->capture_end({}).ok(), "nonsense was accepted");
  }

  // One of the next calls on the backend fails. In every second run none does, because failed calls weaken
  // the checks: mappings that could not be undone are tried again whenever that is possible.
  void fail_next() {
    if (faultless_) return;
    static constexpr HostCall kCalls[] = {HostCall::kChunkCreate, HostCall::kMap, HostCall::kUnmap,
                                          HostCall::kSetAccess};
    backend_->add_fault(
        {kCalls[pick_(4)], 1 + std::uint64_t{pick_(4)}, Status(StatusCode::kInternal, "scripted")});
    failing_ = true;
  }

  void check_accounts() const {
    const ArenaStatistics statistics = arena_->statistics();
    std::size_t live_bytes = slot_bytes_;
    for (unsigned tag = 0; tag < 4; ++tag) live_bytes += live_bytes_[tag];
    FOREBAY_CHECK(statistics.live_bytes == live_bytes, "%zu live, not %zu", statistics.live_bytes,
                  live_bytes);
    FOREBAY_CHECK(arena_->statistics(tags_[2]).live_bytes == live_bytes_[2], "the tag's account");
    // An alias that stayed mapped after two failed calls keeps the memory of a destroyed slot until it is
    // recovered.
    const std::size_t charged_bytes = backend_->charged_bytes();
    FOREBAY_CHECK(
        statistics.reserved_bytes == charged_bytes || (failing_ && statistics.reserved_bytes < charged_bytes),
        "%zu reserved, %zu charged", statistics.reserved_bytes, charged_bytes);
    FOREBAY_CHECK(statistics.reserved_bytes <= kLimit && live_bytes_[1] <= kLimit / 4, "beyond a limit");
  }

  void finish() {
    if (capturing_ != nullptr) capture();
    for (const auto& state : captured_)
      FOREBAY_CHECK(arena_->capture_release(state->capture).ok(), "release");
    captured_.clear();
    while (!blocks_.empty()) free_block(blocks_.size() - 1);
    for (int attempt = 0; attempt < 60 && !slots_.empty(); ++attempt) destroy_slot(slots_.size() - 1);
    synchronize_all();
    arena_->trim();
    for (unsigned tag = 2; tag < 4; ++tag) {
      // A scripted fault may still be waiting.
      for (int attempt = 0; attempt < 40 && paused_[tag]; ++attempt) pause_or_resume(tag);
      FOREBAY_CHECK(!paused_[tag], "a tag cannot be resumed: %s\n%s",
                    arena_->resume(tags_[tag]).to_string().c_str(), arena_->report().c_str());
    }
    for (int attempt = 0; attempt < 60 && arena_->statistics().reserved_bytes != 0; ++attempt) {
      arena_->trim();
      synchronize_all();
    }
    FOREBAY_CHECK(arena_->statistics().reserved_bytes == 0, "something is held in the end:\n%s",
                  arena_->report().c_str());
    FOREBAY_CHECK(backend_->charged_bytes() == 0, "something is charged in the end");
    for (auto& state : streams_) FOREBAY_CHECK(backend_->stream_destroy(state.stream).ok(), "destroy");
    arena_.reset();
    FOREBAY_CHECK(failing_ || backend_->live_handle_count() == 0, "%zu handles leaked",
                  backend_->live_handle_count());
  }

  std::function<std::uint32_t(std::uint32_t)> pick_;
  std::unique_ptr<ScriptedModelBackend> backend_;
  std::unique_ptr<WatchedBackend> watched_;
  std::unique_ptr<Arena> arena_;
  StreamState streams_[kStreams];
  Tag tags_[4] = {};
  bool paused_[4] = {};
  std::size_t live_bytes_[4] = {};
  std::size_t slot_bytes_ = 0;
  unsigned pausing_ = 0;
  bool aliasing_ = false;
  bool faultless_ = false;
  bool failing_ = false;
  std::vector<Block> blocks_;
  std::vector<Pending> pending_;
  std::map<std::uint64_t, std::uint64_t> live_;
  std::vector<std::shared_ptr<CaptureState>> captured_;
  std::shared_ptr<CaptureState> capturing_;
  std::vector<SlotState> slots_;
  std::uint64_t refused_count_ = 0;
  std::size_t new_bytes_ = 0;
  std::uint64_t paused_count_ = 0;
  std::uint64_t captured_count_ = 0;
};

}  // namespace forebay::testing
