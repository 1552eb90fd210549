// OwnedEvent: an event that is destroyed with its owner. The backend outlives it.
#pragma once

#include <atomic>
#include <utility>

#include "forebay/backend.h"
#include "forebay/error.h"
#include "forebay/log.h"

namespace forebay::gpt {

// Logs the first failed release of the process.
inline void gave_back(const Status& status) noexcept {
  static std::atomic<bool> said{false};
  if (!status.ok() && !said.exchange(true))
    log(LogLevel::kWarning, "%s; said once", status.message().c_str());
}

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
