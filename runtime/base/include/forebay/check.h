// Checks of invariants: a broken one is a defect in forebay, so the process stops with the place and the
// values. Operating errors (a full device, a lost peer) are never checks: they are a Status (status.h).
#pragma once

#include "forebay/language.h"

namespace forebay::internal {

// Prints "file:line: check failed: condition: message" to stderr and aborts.
[[noreturn]] __attribute__((format(printf, 4, 5))) void check_failed(const char* file, int line,
                                                                     const char* condition,
                                                                     const char* format, ...) noexcept;

}  // namespace forebay::internal

// FOREBAY_CHECK(condition, "printf format", values...): always on.
#define FOREBAY_CHECK(condition, ...)                                                 \
  do {                                                                                \
    if (__builtin_expect(!(condition), 0))                                            \
      ::forebay::internal::check_failed(__FILE__, __LINE__, #condition, __VA_ARGS__); \
  } while (false)

// FOREBAY_ASSERT: the same in debug builds, nothing with NDEBUG.
#ifdef NDEBUG
#define FOREBAY_ASSERT(condition, ...) \
  do {                                 \
  } while (false)
#else
#define FOREBAY_ASSERT(condition, ...) FOREBAY_CHECK(condition, __VA_ARGS__)
#endif
