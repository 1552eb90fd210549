// Strangers: blocks of a size that a program has never asked for, while almost all of its requests have sizes
// that come again. Where such blocks stay, each would keep the rest of its last chunk from all others, so the
// arena lets them share chunks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace forebay::internal {

class Strangers {
 public:
  // Notes a request. True if it is a stranger.
  bool meet(std::size_t bytes) noexcept {
    ++request_count_;
    const std::uint64_t hash = bytes * 0x9E3779B97F4A7C15ull;
    std::uint32_t& size = sizes_[hash >> kSizeShift];
    const auto check = static_cast<std::uint32_t>(hash >> 16) | 1;
    if (size == check) return false;
    size = check;
    std::uint64_t& place = new_[new_count_++ % kNewCount];
    const std::uint64_t before = place;
    place = request_count_;
    return new_count_ > kNewCount && request_count_ - before > kNewCount * kRequestsPerNew;
  }
  // Notes the block of a stranger, and returns its number, which is not 0.
  std::uint32_t enter() noexcept {
    if (++entered_count_ == 0) ++entered_count_;
    latest_[entered_count_ % kLatestCount] = {entered_count_, true, request_count_};
    return entered_count_;
  }
  // The block is freed. 0: it is no stranger's.
  void leave(std::uint32_t number) noexcept {
    Block& block = latest_[number % kLatestCount];
    if (block.number == number) block.live = false;
  }
  // Whether at least half of the latest ones stayed, of those that were freed or are old by now.
  bool stay() const noexcept {
    std::size_t old_count = 0;
    std::size_t freed_count = 0;
    for (const Block& block : latest_) {
      if (block.number == 0) continue;
      if (!block.live) ++freed_count;
      if (block.live && request_count_ - block.request > kOldRequests) ++old_count;
    }
    return old_count >= kOldMin && old_count >= freed_count;
  }

 private:
  struct Block {
    std::uint32_t number = 0;
    bool live = false;
    std::uint64_t request = 0;  // The number of requests when it was made.
  };
  static constexpr int kSizeShift = 52;
  static constexpr std::size_t kSizeCount = std::size_t{1} << (64 - kSizeShift);
  // A new size is a stranger's if the latest kNewCount new ones are in more than this many requests each.
  // Fewer: jobs whose sizes are all drawn at random count, too.
  static constexpr std::size_t kNewCount = 16;
  static constexpr std::size_t kRequestsPerNew = 32;
  static constexpr std::size_t kLatestCount = 32;
  static constexpr std::size_t kOldMin = 2;
  // A block that is live after so many requests stays. Fewer: activations of one step count.
  static constexpr std::uint64_t kOldRequests = 256;

  std::array<std::uint32_t, kSizeCount> sizes_{};  // By hash.
  std::array<std::uint64_t, kNewCount> new_{};     // When they came.
  std::array<Block, kLatestCount> latest_{};
  std::uint64_t request_count_ = 0;
  std::size_t new_count_ = 0;
  std::uint32_t entered_count_ = 0;
};

}  // namespace forebay::internal
