// The values of a save in the background, as they were between two steps.
//
// A value in memory that the host can read is read where it lies. Before the next change of the values, those
// that were not read yet are copied. So a save that is written before the next update copies nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace forebay {

class Snapshot {
 public:
  struct Part {
    std::byte* copy = nullptr;  // The place of its copy, pinned.
    const std::byte* live = nullptr;
    std::uint64_t bytes = 0;
    std::uint64_t done = 0;  // Bytes that were read, or passed over.
  };
  using Copy = std::function<void(std::byte* target, const std::byte* source, std::uint64_t bytes)>;

  // Requires: end() of the one before.
  void begin(std::vector<Part> parts);
  // From now on the values are those to save. Order: after begin(), behind all earlier changes.
  void open();
  // Copies what was not read. Order: behind open() and before the next change. Without open() it does
  // nothing. Threads: any.
  void keep(const Copy& copy);
  // Nothing is read any more. Threads: any.
  void end();
  // Whether keep() may have work. Threads: that of begin().
  bool is_begun() const;

  // Writes the `bytes` bytes whose copies begin at `copy` to `target`, which may be `copy` itself. A place
  // that is in no part was copied before. Order: ascending in each part. Threads: one.
  void read(const std::byte* copy, std::uint64_t bytes, std::byte* target);

 private:
  Part* part_of(const std::byte* copy);

  // Calls of keep(), for which read() makes room: a mutex alone may always go to the thread that had it.
  std::atomic<int> keeping_{0};
  mutable std::mutex mutex_;
  std::condition_variable kept_;
  // Guarded by mutex_.
  std::vector<Part> parts_;  // By `copy`.
  bool begun_ = false;
  bool is_live_ = false;
};

}  // namespace forebay
