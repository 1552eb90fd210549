// CountingBackend: a Backend in front of another one that counts the calls which cost on a device, by kind,
// the bytes taken from it, and the time in its calls. So the figures of a replay mean the same on every
// backend.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "forebay/backend.h"
#include "runtime/device/forwarding_backend.h"

namespace forebay {

// Calls of each kind so far, failed ones included.
struct DriverCalls {
  std::uint64_t create = 0;
  std::uint64_t destroy = 0;
  std::uint64_t map = 0;
  std::uint64_t unmap = 0;
  std::uint64_t set_access = 0;
  std::uint64_t alloc = 0;
  std::uint64_t free = 0;

  std::uint64_t total() const { return create + destroy + map + unmap + set_access + alloc + free; }
  friend DriverCalls operator-(const DriverCalls& a, const DriverCalls& b) {
    return {a.create - b.create,         a.destroy - b.destroy, a.map - b.map,  a.unmap - b.unmap,
            a.set_access - b.set_access, a.alloc - b.alloc,     a.free - b.free};
  }
};

class CountingBackend final : public ForwardingBackend {
 public:
  // Requires: `below` outlives this.
  explicit CountingBackend(Backend& below) noexcept : ForwardingBackend(below) {}

  DriverCalls calls() const;
  // The sum of calls(); cheap enough to be asked around every allocation.
  std::uint64_t call_count() const noexcept { return call_count_.load(std::memory_order_relaxed); }
  // Nanoseconds spent in those calls, in calls of events, and in counting. Measured after measure_time.
  void measure_time() noexcept { is_timed_ = true; }
  std::uint64_t call_ns() const noexcept { return call_ns_.load(std::memory_order_relaxed); }
  // Bytes of the chunks and blocks held now; the most since the last reset_peak.
  std::uint64_t held_bytes() const;
  std::uint64_t peak_held_bytes() const;
  void reset_peak();

  Result<Chunk> chunk_create(std::size_t bytes) override;
  Status chunk_destroy(Chunk chunk) override;
  Status map(DevicePtr address, Chunk chunk) override;
  Status unmap(DevicePtr address, std::size_t bytes) override;
  Status set_access(DevicePtr address, std::size_t bytes) override;
  Result<DevicePtr> alloc(std::size_t bytes) override;
  Status free(DevicePtr address) override;
  Result<Event> event_create() override;
  Status event_record(Event event, Stream stream) override;
  Result<bool> event_query(Event event) override;

 private:
  class Timed;

  void count(std::uint64_t DriverCalls::*kind);
  void hold(std::uint64_t key, std::size_t bytes);
  void give_back(std::uint64_t key);

  bool is_timed_ = false;
  std::atomic<std::uint64_t> call_ns_{0};
  std::atomic<std::uint64_t> call_count_{0};
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  DriverCalls calls_;
  std::unordered_map<std::uint64_t, std::size_t> held_;  // Chunk handle, or address of a block.
  std::uint64_t held_bytes_ = 0;
  std::uint64_t peak_held_bytes_ = 0;
};

}  // namespace forebay
