// The floating-point environment the kernels are defined in: round to nearest even, subnormals kept.
//
// A thread inherits its creator's control register, so a trainer that sets flush-to-zero before it creates a
// backend would change our bits. Every range of elements therefore runs under this guard; it costs two
// register moves.
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace forebay {

class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

#if defined(__x86_64__) || defined(__i386__)
  DefaultFloatEnvironment() noexcept : saved_(_mm_getcsr()) {
    _mm_setcsr(kDefault);
  }
  ~DefaultFloatEnvironment() {
    _mm_setcsr(saved_);
  }

 private:
  // All exceptions masked, round to nearest, neither flush-to-zero nor denormals-are-zero.
  static constexpr unsigned kDefault = 0x1F80;
  unsigned saved_;
#elif defined(__aarch64__)
  // FPCR of zero: round to nearest, no flush-to-zero, no default NaN, no traps. fesetenv cannot clear FZ.
  DefaultFloatEnvironment() noexcept {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}) : "memory");
  }
  ~DefaultFloatEnvironment() {
    asm volatile("msr fpcr, %0" : : "r"(saved_) : "memory");
  }

 private:
  std::uint64_t saved_ = 0;
#else
  DefaultFloatEnvironment() noexcept {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() {
    std::fesetenv(&saved_);
  }

 private:
  std::fenv_t saved_;
#endif
};

}  // namespace forebay
