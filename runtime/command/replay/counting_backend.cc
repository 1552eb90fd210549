#include "runtime/command/replay/counting_backend.h"

#include <algorithm>
#include <chrono>

namespace forebay {
namespace {

// Chunks and blocks are in one table and told apart by the lowest bit, since a backend chooses its handles as
// it likes.
std::uint64_t key_of(Chunk chunk) {
  return chunk.handle << 1 | 1;
}
std::uint64_t key_of(DevicePtr address) {
  return reinterpret_cast<std::uintptr_t>(address) << 1;
}

}  // namespace

// Adds its lifetime to the time spent in calls.
class CountingBackend::Timed {
 public:
  explicit Timed(CountingBackend& backend) : backend_(backend) {
    if (backend_.is_timed_) begin_ = Clock::now();
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;
  ~Timed() {
    if (!backend_.is_timed_) return;
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin_).count();
    backend_.call_ns_.fetch_add(static_cast<std::uint64_t>(ns), std::memory_order_relaxed);
  }

 private:
  using Clock = std::chrono::steady_clock;
  CountingBackend& backend_;
  Clock::time_point begin_;
};

DriverCalls CountingBackend::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

std::uint64_t CountingBackend::held_bytes() const {
  const std::lock_guard lock(mutex_);
  return held_bytes_;
}

std::uint64_t CountingBackend::peak_held_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_held_bytes_;
}

void CountingBackend::reset_peak() {
  const std::lock_guard lock(mutex_);
  peak_held_bytes_ = held_bytes_;
}

void CountingBackend::count(std::uint64_t DriverCalls::*kind) {
  call_count_.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  ++(calls_.*kind);
}

void CountingBackend::hold(std::uint64_t key, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  held_.emplace(key, bytes);
  held_bytes_ += bytes;
  peak_held_bytes_ = std::max(peak_held_bytes_, held_bytes_);
}

void CountingBackend::give_back(std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  const auto found = held_.find(key);
  if (found == held_.end()) return;
  held_bytes_ -= found->second;
  held_.erase(found);
}

Result<Chunk> CountingBackend::chunk_create(std::size_t bytes) {
  const Timed timed(*this);
  count(&DriverCalls::create);
  Result<Chunk> chunk = ForwardingBackend::chunk_create(bytes);
  if (chunk.ok()) hold(key_of(chunk.value()), bytes);
  return chunk;
}

Status CountingBackend::chunk_destroy(Chunk chunk) {
  const Timed timed(*this);
  count(&DriverCalls::destroy);
  Status status = ForwardingBackend::chunk_destroy(chunk);
  if (status.ok()) give_back(key_of(chunk));
  return status;
}

Status CountingBackend::map(DevicePtr address, Chunk chunk) {
  const Timed timed(*this);
  count(&DriverCalls::map);
  return ForwardingBackend::map(address, chunk);
}

Status CountingBackend::unmap(DevicePtr address, std::size_t bytes) {
  const Timed timed(*this);
  count(&DriverCalls::unmap);
  return ForwardingBackend::unmap(address, bytes);
}

Status CountingBackend::set_access(DevicePtr address, std::size_t bytes) {
  const Timed timed(*this);
  count(&DriverCalls::set_access);
  return ForwardingBackend::set_access(address, bytes);
}

Result<DevicePtr> CountingBackend::alloc(std::size_t bytes) {
  const Timed timed(*this);
  count(&DriverCalls::alloc);
  Result<DevicePtr> block = ForwardingBackend::alloc(bytes);
  if (block.ok()) hold(key_of(block.value()), bytes);
  return block;
}

Status CountingBackend::free(DevicePtr address) {
  const Timed timed(*this);
  count(&DriverCalls::free);
  Status status = ForwardingBackend::free(address);
  if (status.ok()) give_back(key_of(address));
  return status;
}

Result<Event> CountingBackend::event_create() {
  const Timed timed(*this);
  return ForwardingBackend::event_create();
}

Status CountingBackend::event_record(Event event, Stream stream) {
  const Timed timed(*this);
  return ForwardingBackend::event_record(event, stream);
}

Result<bool> CountingBackend::event_query(Event event) {
  const Timed timed(*this);
  return ForwardingBackend::event_query(event);
}

}  // namespace forebay
