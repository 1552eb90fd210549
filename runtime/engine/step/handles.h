// Streams and events of the engine, which give themselves back.
#pragma once

#include <cstdint>
#include <utility>

#include "forebay/arena.h"
#include "forebay/backend.h"

namespace forebay {

struct StepContext;

// An event, destroyed with its owner. A default one has no event: waiting for it is a mistake.
class EngineEvent {
 public:
  EngineEvent() = default;
  // Errors: the Backend's, thrown.
  explicit EngineEvent(StepContext& context);
  EngineEvent(EngineEvent&& other) noexcept { swap(other); }
  EngineEvent& operator=(EngineEvent&& other) noexcept {
    swap(other);
    return *this;
  }
  ~EngineEvent();

  operator Event() const noexcept { return event_; }

 private:
  void swap(EngineEvent& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(event_, other.event_);
  }

  StepContext* context_ = nullptr;
  Event event_;
};

// A stream. Its end waits for the queued work.
// Errors: each call that the Backend refuses is thrown and fails the engine.
class EngineStream {
 public:
  explicit EngineStream(StepContext& context) noexcept : context_(context) {}
  EngineStream(const EngineStream&) = delete;
  EngineStream& operator=(const EngineStream&) = delete;
  ~EngineStream() { close(); }

  void open();
  // The same, for collectives.
  void open_urgent();
  // Uses a stream that has another owner.
  void borrow(Stream stream) noexcept { stream_ = stream; }
  bool is_open() const noexcept { return stream_.handle != nullptr; }
  // Waits for the queued work and destroys the stream, after `arena`, if given, has forgotten it.
  void close(Arena* arena = nullptr);
  operator Stream() const noexcept { return stream_; }

  void wait(Event event) const;
  void record(Event event) const;
  void copy(void* target, const void* source, std::uint64_t bytes) const;
  void fill(DevicePtr target, std::uint8_t value, std::uint64_t bytes) const;
  // Runs a member function of `argument` on a host thread in the order of the stream. Requires: the argument
  // stays until then; the function neither throws nor calls the Backend.
  template <auto kFunction, typename Argument>
  void call(Argument& argument) const {
    call([](void* given) { (static_cast<Argument*>(given)->*kFunction)(); }, &argument);
  }
  void synchronize() const;

 private:
  void call(HostFunction function, void* argument) const;

  StepContext& context_;
  Stream stream_;
  bool owned_ = false;
};

}  // namespace forebay
