#include "runtime/engine/step/snapshot.h"

#include <algorithm>
#include <utility>

#include "forebay/stream_copy.h"

namespace forebay {
namespace {

// Copied while a change of the values waits. Larger: an update may wait longer. Smaller: more turns.
constexpr std::uint64_t kTurnBytes = 256u << 10;

}  // namespace

void Snapshot::begin(std::vector<Part> parts) {
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.copy < b.copy; });
  const std::lock_guard lock(mutex_);
  parts_ = std::move(parts);
  begun_ = true;
}

void Snapshot::open() {
  const std::lock_guard lock(mutex_);
  is_live_ = begun_;
}

void Snapshot::keep(const Copy& copy) {
  ++keeping_;
  {
    const std::lock_guard lock(mutex_);
    --keeping_;
    if (is_live_) {
      for (const Part& part : parts_) {
        if (part.done < part.bytes)
          copy(part.copy + part.done, part.live + part.done, part.bytes - part.done);
      }
    }
    is_live_ = false;
  }
  kept_.notify_all();
}

void Snapshot::end() {
  const std::lock_guard lock(mutex_);
  begun_ = false;
  is_live_ = false;
}

bool Snapshot::is_begun() const {
  const std::lock_guard lock(mutex_);
  return begun_;
}

void Snapshot::finish(const std::byte* copy, std::uint64_t bytes, const See& see) {
  {
    std::unique_lock lock(mutex_);
    kept_.wait(lock, [&] { return keeping_ == 0; });
    if (Part* const part = is_live_ ? part_of(copy) : nullptr) {
      const auto offset = static_cast<std::uint64_t>(copy - part->copy);
      const std::byte* const values = part->live + offset;
      stream_copy(part->copy + offset, values, bytes);
      part->done = offset + bytes;
      return see(values);
    }
  }
  see(copy);
}

Snapshot::Part* Snapshot::part_of(const std::byte* copy) {
  const auto after = std::upper_bound(parts_.begin(), parts_.end(), copy,
                                      [](const std::byte* at, const Part& part) { return at < part.copy; });
  if (after == parts_.begin()) return nullptr;
  Part& part = *(after - 1);
  return copy < part.copy + part.bytes ? &part : nullptr;
}

void Snapshot::finish_rest() {
  for (std::size_t i = 0;;) {
    std::unique_lock lock(mutex_);
    kept_.wait(lock, [&] { return keeping_ == 0; });
    if (!is_live_ || i == parts_.size()) return;
    Part& part = parts_[i];
    const std::uint64_t here = std::min(part.bytes - part.done, kTurnBytes);
    stream_copy(part.copy + part.done, part.live + part.done, here);
    part.done += here;
    if (part.done == part.bytes) ++i;
  }
}

}  // namespace forebay
