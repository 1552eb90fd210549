#include "runtime/engine/step/snapshot.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace forebay {
namespace {

// Read while a change of the values waits. Larger: an update may wait longer. Smaller: more turns.
constexpr std::uint64_t kReadBytes = 256u << 10;

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

void Snapshot::read(const std::byte* copy, std::uint64_t bytes, std::byte* target) {
  while (bytes > 0) {
    std::unique_lock lock(mutex_);
    kept_.wait(lock, [&] { return keeping_ == 0; });
    Part* const part = is_live_ ? part_of(copy) : nullptr;
    if (part == nullptr) {
      lock.unlock();
      if (target != copy) std::memcpy(target, copy, bytes);
      return;
    }
    const auto offset = static_cast<std::uint64_t>(copy - part->copy);
    const std::uint64_t here = std::min({bytes, part->bytes - offset, kReadBytes});
    std::memcpy(target, part->live + offset, here);
    part->done = offset + here;
    copy += here;
    target += here;
    bytes -= here;
  }
}

Snapshot::Part* Snapshot::part_of(const std::byte* copy) {
  const auto after = std::upper_bound(parts_.begin(), parts_.end(), copy,
                                      [](const std::byte* at, const Part& part) { return at < part.copy; });
  if (after == parts_.begin()) return nullptr;
  Part& part = *(after - 1);
  return copy < part.copy + part.bytes ? &part : nullptr;
}

}  // namespace forebay
