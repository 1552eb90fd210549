// StepMemory: remembers the offsets of the arena's latest blocks, in order, so that a step that repeats an
// earlier one is served from the same addresses and needs no driver call.
//
// A point of a step is identified by the sizes of the last requests, the live bytes, and the request itself.
// Steps need not be announced. Once a point is recognised, the record is followed request by request until
// one differs; then the next known point is looked for. The result is a hint: the arena checks that the
// memory is free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>

namespace forebay::internal {

class StepMemory {
 public:
  static constexpr std::size_t kUnknown = SIZE_MAX;
  // Requests of an earlier run that can be stored before the first one.
  static constexpr std::size_t kLearnedMax = (std::size_t{1} << 18) - 1;

  StepMemory() noexcept = default;
  StepMemory(const StepMemory&) = delete;
  StepMemory& operator=(const StepMemory&) = delete;
  ~StepMemory() {
    std::free(record_);
    std::free(index_);
  }

  // False if the host has no memory. Pages of the record are touched as it grows. Pages of the index are used
  // in no order, so they are touched here. Each set of the index is one cache line.
  bool start() noexcept {
    record_ = static_cast<Entry*>(std::calloc(kRecordCount, sizeof(Entry)));
    index_ = static_cast<Point*>(
        std::aligned_alloc(kWays * sizeof(Point), (kIndexCount + kBeginningCount) * sizeof(Point)));
    if (record_ == nullptr || index_ == nullptr) return false;
    std::uninitialized_fill_n(index_, kIndexCount + kBeginningCount, Point());
    return true;
  }

  // The offset at which the same point was placed before, or kUnknown. `kind`: the request's region, and
  // whether its stream is another than that of the request before. The streams themselves may differ from run
  // to run. store follows if the request is served.
  std::size_t find(std::size_t bytes, std::size_t live_bytes, std::uint64_t kind) noexcept {
    // Nothing is live: the beginning of a step, independent of earlier requests.
    if (live_bytes == 0) recent_ = 0;
    key_ = mix(recent_ ^ mix(bytes * 0x9E3779B97F4A7C15ull ^ live_bytes) ^ kind << 56);
    key_ &= ~kBeginning;
    if (live_bytes == 0) key_ = (key_ & ~kUnindexed) | kBeginning;
    const bool followed = holds(cursor_);
    if (!followed || live_bytes == 0) {
      // At the beginning of a step its latest record counts; an older one may name memory that is gone. But
      // another step may begin alike: while the record is followed, the latest one must come after the same
      // request too. Later in a step the latest record may be an earlier point of the same step.
      const std::uint32_t position = indexed_position();
      const bool found = holds(position);
      const bool proven = followed && followed_count_ > kDoubt;
      if (found && position != cursor_ && (!proven || check_at(position - 1) == check_at(end_ - 1))) {
        cursor_ = position;
        lap_end_ = end_;
        lap_count_ = 0;
      }
      if (!followed) followed_count_ = live_bytes == 0 ? kDoubt : 0;
      if (!followed && !found) {
        cursor_ = kNowhere;
        lap_count_ = 0;
        return kUnknown;
      }
    }
    const std::size_t offset = record_[cursor_++ & (kRecordCount - 1)].offset;
    if (cursor_ == lap_end_) {
      ++lap_count_;
      lap_end_ = end_ + 1;  // This request's own entry comes next.
    }
    // A few equal requests prove little: the same sizes come again in every layer.
    return ++followed_count_ > kDoubt ? offset : kUnknown;
  }
  // Records where the request of the latest find was placed.
  void store(std::size_t bytes, std::size_t offset) noexcept {
    record_[end_ & (kRecordCount - 1)] = {check(), offset};
    // While the record is followed, only some points are indexed, the same ones each time.
    if (followed_count_ <= kDoubt || indexed()) *find_point() = {check(), end_};
    ++end_;
    recent_ = recent_ << 16 | (mix(bytes * 0x9E3779B97F4A7C15ull) & 0xFFFF);
  }
  // How many times in a row the same sequence of requests was repeated. 0 unless it is being repeated now.
  std::uint32_t lap_count() const noexcept { return lap_count_; }
  // Drops the whole record.
  void forget() noexcept {
    end_ += kRecordCount;
    cursor_ = kNowhere;
    followed_count_ = 0;
    lap_count_ = 0;
    recent_ = 0;
  }
  void swap(StepMemory& other) noexcept {
    std::swap(record_, other.record_);
    std::swap(index_, other.index_);
    std::swap(recent_, other.recent_);
    std::swap(key_, other.key_);
    std::swap(end_, other.end_);
    std::swap(cursor_, other.cursor_);
    std::swap(followed_count_, other.followed_count_);
    std::swap(lap_end_, other.lap_end_);
    std::swap(lap_count_, other.lap_count_);
  }
  std::uint64_t key() const noexcept { return key_; }
  // Sets the request that store records, since find may have been called for another one meanwhile.
  void set_key(std::uint64_t key) noexcept { key_ = key; }

 private:
  struct Entry {
    std::uint32_t check = 0;  // From the key of its point.
    std::size_t offset = 0;
  };
  struct Point {
    std::uint32_t check = 0;
    std::uint32_t position = 0;  // Its latest entry in the record.
  };
  // 4 and 1 MiB of memory. A step of more requests than the record holds is served by searching.
  static constexpr std::size_t kRecordCount = kLearnedMax + 1;
  static constexpr std::size_t kIndexCount = std::size_t{1} << 17;
  static constexpr std::size_t kBeginningCount = 512;
  static constexpr std::size_t kWays = 8;
  static constexpr std::uint32_t kNowhere = UINT32_MAX;
  static constexpr std::uint32_t kDoubt = 8;
  // Points whose key has none of these bits set are indexed: one of eight, and the beginning of each step.
  static constexpr std::uint64_t kUnindexed = std::uint64_t{7} << 61;
  // In the key of the beginning of a step. Beginnings have sets of their own, behind the others: without its
  // beginning a step would not be recognised.
  static constexpr std::uint64_t kBeginning = std::uint64_t{1} << 60;

  Point* set() const noexcept {
    const bool begins = (key_ & kBeginning) != 0;
    const std::size_t set_count = (begins ? kBeginningCount : kIndexCount) / kWays;
    return index_ + (begins ? kIndexCount : 0) + (key_ >> 32 & (set_count - 1)) * kWays;
  }
  // The point's latest entry in the record, or kNowhere.
  std::uint32_t indexed_position() const noexcept {
    const Point* point = set();
    for (std::size_t i = 0; i < kWays; ++i) {
      if (point[i].check == check()) return point[i].position;
    }
    return kNowhere;
  }
  // The key's entry in the index, or the oldest that it may replace.
  Point* find_point() const noexcept {
    Point* const points = set();
    Point* found = points;
    for (std::size_t i = 0; i < kWays; ++i) {
      if (points[i].check == check()) return points + i;
      if (points[i].check == 0 || end_ - points[i].position > end_ - found->position) found = points + i;
      if (points[i].check == 0) break;
    }
    return found;
  }
  static std::uint64_t mix(std::uint64_t value) noexcept {
    value ^= value >> 32;
    value *= 0xD6E8FEB86659FD93ull;
    return value ^ value >> 29;
  }
  bool indexed() const noexcept { return (key_ & kUnindexed) == 0; }
  std::uint32_t check() const noexcept { return static_cast<std::uint32_t>(key_) | 1; }
  std::uint32_t check_at(std::uint32_t position) const noexcept {
    return record_[position & (kRecordCount - 1)].check;
  }
  // Whether that entry of the record still exists and belongs to the current point.
  bool holds(std::uint32_t position) const noexcept {
    const std::uint32_t age = end_ - position;
    return position != kNowhere && age > 0 && age < kRecordCount && check_at(position) == check();
  }

  Entry* record_ = nullptr;
  Point* index_ = nullptr;
  std::uint64_t recent_ = 0;
  std::uint64_t key_ = 0;
  std::uint32_t end_ = 0;             // Entries ever recorded; the ring holds the latest.
  std::uint32_t cursor_ = kNowhere;   // The entry expected next.
  std::uint32_t followed_count_ = 0;  // Consecutive requests that were as recorded.
  std::uint32_t lap_end_ = kNowhere;  // The cursor's position at the end of its lap.
  std::uint32_t lap_count_ = 0;
};

}  // namespace forebay::internal
