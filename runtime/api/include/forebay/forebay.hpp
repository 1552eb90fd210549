// The C interface for C++17: handles that destroy themselves, and exceptions in place of codes. A header
// alone; link libforebay-c. It needs no C++20, so nvcc -std=c++17 and older compilers take it.
//
//   using namespace forebay::c;
//   Options options{{"stage", "3"}, {"dtype", "bf16"}};
//   auto device = make<Device>(forebay_device_open, "cuda:0", options);
//   auto ranks = make<Communicator>(forebay_communicator_create, device, options, nullptr, nullptr);
//   auto engine = make<Engine>(forebay_engine_create, device, ranks, nullptr, nullptr, options);
//   const auto unit = get<std::int32_t>(forebay_engine_add_unit, engine, "block", 0);
//   ...
//   Lease lease(engine, unit, Pass::kForward, stream);
//   kernel<<<1, 1, 0, stream>>>(lease.parameter<float>(0));
//
// Every function of forebay.h is called as call(function, ...), or as get<T>(function, ...) where its last
// parameter is the address of a result, or as make<Handle>(function, ...) where that is a new handle.
//
// Errors: Error, thrown. Destructors throw nothing.
#pragma once

#if __cplusplus < 201703L  // forebay/language.h says the same; this header stands beside forebay.h alone.
#error "The headers of forebay need C++17 or newer: compile with -std=c++17."
#endif

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "forebay/forebay.h"

namespace forebay::c {

class Error : public std::runtime_error {
 public:
  Error(std::int32_t code, const std::string& text)
      : std::runtime_error(std::string(forebay_code_name(code)) + ": " + text), code_(code) {}
  std::int32_t code() const noexcept { return code_; }

 private:
  std::int32_t code_;
};

inline void check(std::int32_t code) {
  if (code != FOREBAY_OK) throw Error(code, forebay_last_error());
}

template <typename Function, typename... Arguments>
void call(Function function, Arguments&&... arguments) {
  check(function(std::forward<Arguments>(arguments)...));
}

// The result that a function writes through its last parameter.
template <typename Result, typename Function, typename... Arguments>
Result get(Function function, Arguments&&... arguments) {
  Result result{};
  check(function(std::forward<Arguments>(arguments)..., &result));
  return result;
}

// A handle that destroys itself. Move-only; converts to the pointer that the functions of forebay.h take.
template <typename T, void (*kDestroy)(T*)>
class Handle {
 public:
  using Pointer = T*;

  Handle() = default;
  explicit Handle(T* handle) : handle_(handle) {}
  operator T*() const noexcept { return handle_.get(); }  // NOLINT: implicit on purpose

 private:
  struct Destroy {
    void operator()(T* handle) const noexcept { kDestroy(handle); }
  };
  std::unique_ptr<T, Destroy> handle_;
};

using Device = Handle<forebay_device, forebay_device_close>;
using Arena = Handle<forebay_arena, forebay_arena_destroy>;
using PinnedPool = Handle<forebay_pinned_pool, forebay_pinned_pool_destroy>;
using LocalGroup = Handle<forebay_local_group, forebay_local_group_destroy>;
using Communicator = Handle<forebay_communicator, forebay_communicator_destroy>;
using Timeline = Handle<forebay_timeline, forebay_timeline_destroy>;
using Engine = Handle<forebay_engine, forebay_engine_destroy>;
using Checkpointer = Handle<forebay_checkpointer, forebay_checkpointer_destroy>;
using FileStore = Handle<forebay_file_store, forebay_file_store_destroy>;

// Makes a handle by a function that writes it through its last parameter.
template <typename NewHandle, typename Function, typename... Arguments>
NewHandle make(Function function, Arguments&&... arguments) {
  return NewHandle(get<typename NewHandle::Pointer>(function, std::forward<Arguments>(arguments)...));
}

class Options : public Handle<forebay_options, forebay_options_destroy> {
 public:
  Options(
      std::initializer_list<std::pair<const char*, std::string>> values = {})  // NOLINT: implicit on purpose
      : Handle(get<forebay_options*>(forebay_options_create)) {
    for (const auto& [name, value] : values) set(name, value);
  }
  void set(const char* name, const std::string& value) {
    call(forebay_options_set, *this, name, value.c_str());
  }
};

enum class Pass : std::int32_t { kForward = 0, kBackward = 1 };

// A unit that is acquired until the end of the scope, in the order of the stream.
class Lease {
 public:
  template <typename T>
  struct Gradient {
    T* address;       // Null for a frozen parameter.
    bool accumulate;  // False: write "="; true: "+=".
  };

  // `stream`: as in forebay.h. Requires: the engine outlives the lease.
  Lease(forebay_engine* engine, std::int32_t unit, Pass pass, void* stream)
      : engine_(engine), unit_(unit), stream_(stream) {
    call(forebay_acquire, engine, unit, static_cast<std::int32_t>(pass), stream);
  }
  ~Lease() {
    if (engine_ != nullptr) static_cast<void>(forebay_release(engine_, unit_, stream_));
  }
  Lease(Lease&& other) noexcept
      : engine_(std::exchange(other.engine_, nullptr)), unit_(other.unit_), stream_(other.stream_) {}
  Lease& operator=(Lease&&) = delete;

  template <typename T>
  T* parameter(std::int32_t index) const {
    return static_cast<T*>(get<void*>(forebay_parameter, engine_, unit_, index));
  }
  template <typename T>
  Gradient<T> gradient(std::int32_t index) const {
    void* address = nullptr;
    const auto accumulate = get<std::int32_t>(forebay_gradient, engine_, unit_, index, &address);
    return {static_cast<T*>(address), accumulate != 0};
  }

 private:
  forebay_engine* engine_;
  std::int32_t unit_;
  void* stream_;
};

inline forebay_step_result step(forebay_engine* engine) {
  forebay_step_result result{};
  call(forebay_step, engine, &result, sizeof(result));
  return result;
}

}  // namespace forebay::c
