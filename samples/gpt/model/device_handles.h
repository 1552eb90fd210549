// Owners of pinned host memory and of events. Each releases its resource when it is destroyed. The backend
// outlives them.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include "forebay/backend.h"
#include "forebay/error.h"
#include "forebay/log.h"
#include "forebay/units.h"

namespace forebay::gpt {

// Logs the first failed release of the process.
inline void gave_back(const Status& status) noexcept {
  static std::atomic<bool> said{false};
  if (!status.ok() && !said.exchange(true))
    log(LogLevel::kWarning, "%s; said once", status.message().c_str());
}

class PinnedMemory {
 public:
  PinnedMemory(Backend& backend, std::size_t bytes) : backend_(backend) {
    const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const std::size_t whole_pages = round_up(bytes, page);
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(page, whole_pages)));
    if (memory_ == nullptr) throw std::bad_alloc();
    throw_if_error(backend.pin(memory_.get(), whole_pages));
  }
  ~PinnedMemory() { gave_back(backend_.unpin(memory_.get())); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::byte* data() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  Backend& backend_;
  std::unique_ptr<std::byte, Free> memory_;
};

class OwnedEvent {
 public:
  explicit OwnedEvent(Backend& backend)
      : backend_(&backend), event_(value_or_throw(backend.event_create())) {}
  OwnedEvent(OwnedEvent&& other) noexcept
      : backend_(other.backend_), event_(std::exchange(other.event_, Event{})) {}
  OwnedEvent& operator=(OwnedEvent&&) = delete;
  ~OwnedEvent() {
    if (event_ != Event{}) gave_back(backend_->event_destroy(event_));
  }

  Event get() const { return event_; }

 private:
  Backend* backend_;
  Event event_;
};

}  // namespace forebay::gpt
