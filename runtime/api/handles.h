// Handles of the C interface, and the frame of every function of it.
//
// A handle is not an address: it is a number that names a record and carries its kind and generation. So the
// library tells a null, a destroyed, a foreign or a busy handle apart without reading memory that may be
// gone. Records are never given back.
//
//   std::int32_t forebay_engine_commit(forebay_engine* engine) {
//     return guarded(__func__, [&] { hold(engine)->engine->commit(); });
//   }
#pragma once

#include <cxxabi.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include "forebay/error.h"
#include "forebay/forebay.h"

namespace forebay::api {

enum class Kind : std::uint8_t {
  kOptions = 1,
  kDevice,
  kArena,
  kPinnedPool,
  kLocalGroup,
  kCommunicator,
  kTimeline,
  kEngine,
  kCheckpointer,
  kFileStore,
};

// The thing that a handle stands for. Children hold their parents by shared_ptr.
struct Object {
  virtual ~Object() = default;
  // Keeps `text` until the next call and returns it.
  const char* give(std::string text);

 private:
  std::mutex mutex_;
  std::string text_;
};

// The object and the kind of each type of handle; specialised beside the objects.
template <typename Handle>
struct Traits;

// A call that can never be right. guarded() puts the name of the function in front.
[[noreturn]] void misuse(const std::string& message);

namespace internal {

enum class Claim : std::uint8_t { kShared, kExclusive };

void* insert(std::shared_ptr<Object> object, Kind kind);
// Throws for a handle that is not a live one of this kind; `what` names it.
Object* claim(void* handle, Kind kind, Claim claim, const char* what);
std::shared_ptr<Object> shared(void* handle);
void unclaim(void* handle, Claim claim) noexcept;
// Ends the handle. The object ends with the last call that holds it.
void close(void* handle, Kind kind, const char* function) noexcept;

std::int32_t fail(const char* function, std::exception_ptr error) noexcept;

}  // namespace internal

// A handle for the duration of a call.
template <typename Handle, internal::Claim kClaim>
class Held {
 public:
  using T = typename Traits<Handle>::Object;

  Held(Handle* handle, const char* what)
      : handle_(handle),
        object_(static_cast<T*>(internal::claim(handle, Traits<Handle>::kKind, kClaim, what))) {}
  ~Held() { internal::unclaim(handle_, kClaim); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }
  // For children, which keep the object.
  std::shared_ptr<T> keep() const { return std::static_pointer_cast<T>(internal::shared(handle_)); }

 private:
  Handle* handle_;
  T* object_;
};

// For objects that one thread uses at a time.
template <typename Handle>
Held<Handle, internal::Claim::kExclusive> hold(Handle* handle) {
  return {handle, Traits<Handle>::kName};
}

// For objects and calls that several threads may use at once.
template <typename Handle>
Held<Handle, internal::Claim::kShared> share(Handle* handle) {
  return {handle, Traits<Handle>::kName};
}

// Null for a null handle.
template <typename Handle>
std::shared_ptr<typename Traits<Handle>::Object> keep_or_null(Handle* handle) {
  return handle == nullptr ? nullptr : share(handle).keep();
}

template <typename Handle>
Handle* make_handle(std::shared_ptr<typename Traits<Handle>::Object> object) {
  return static_cast<Handle*>(internal::insert(std::move(object), Traits<Handle>::kKind));
}

template <typename Handle>
void close(Handle* handle, const char* function) noexcept {
  internal::close(handle, Traits<Handle>::kKind, function);
}

// While it lives the thread is not cancelled: it holds locks and other threads wait for it.
class NotCancelled {
 public:
  NotCancelled() noexcept { ::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  NotCancelled(const NotCancelled&) = delete;
  NotCancelled& operator=(const NotCancelled&) = delete;
  ~NotCancelled() { ::pthread_setcancelstate(before_, nullptr); }

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

// Runs the body of a function of the interface: no exception leaves it, and its text becomes
// forebay_last_error(). A callback's pthread_exit() passes.
template <typename Body>
std::int32_t guarded(const char* function, Body&& body) {
  const NotCancelled not_cancelled;
  try {
    body();
    return FOREBAY_OK;
  } catch (const abi::__forced_unwind&) {
    throw;
  } catch (...) {
    return internal::fail(function, std::current_exception());
  }
}

// Throws for the first null pointer. `names`: those of the parameters, "name, unit".
[[noreturn]] void refuse_null(const char* names, std::initializer_list<const void*> pointers);

template <typename... Pointers>
void require(const char* names, const Pointers*... pointers) {
  if (((pointers == nullptr) || ...)) refuse_null(names, {pointers...});
}

}  // namespace forebay::api

#define FOREBAY_REQUIRE(...) ::forebay::api::require(#__VA_ARGS__, __VA_ARGS__)
