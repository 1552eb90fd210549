// The values of a save in the background, as they were between two steps.
//
// Values in memory that the host can read are copied by the thread that saves them. Only those that it has
// not copied before the next change of the values hold that change up.
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
    std::uint64_t done = 0;  // Bytes that were copied, or passed over.
  };
  using Copy = std::function<void(std::byte* target, const std::byte* source, std::uint64_t bytes)>;

  // Requires: end() of the one before.
  void begin(std::vector<Part> parts);
  // From now on the values are those to save. Order: after begin(), behind all earlier changes.
  void open();
  // Copies what was not copied yet. Order: behind open() and before the next change. Without open() it does
  // nothing. Threads: any.
  void keep(const Copy& copy);
  // Nothing is copied any more. Threads: any.
  void end();
  // Whether keep() may have work. Threads: that of begin().
  bool is_begun() const;

  // Copies the `bytes` bytes whose copies begin at `copy`, and calls `see` with them where the processor has
  // them in its cache. They are of one part, or were copied before. A change of the values waits meanwhile.
  // Order: behind open(); ascending in each part. Threads: one.
  using See = std::function<void(const std::byte* values)>;
  void finish(const std::byte* copy, std::uint64_t bytes, const See& see);
  // Copies all that finish() has not come to. Order: behind open(). Threads: one.
  void finish_rest();

 private:
  Part* part_of(const std::byte* copy);

  // Calls of keep(), for which finish() makes room: a mutex alone may always go to the thread that had it.
  std::atomic<int> keeping_{0};
  mutable std::mutex mutex_;
  std::condition_variable kept_;
  // Guarded by mutex_.
  std::vector<Part> parts_;  // By `copy`.
  bool begun_ = false;
  bool is_live_ = false;
};

}  // namespace forebay
