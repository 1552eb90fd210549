// The instruction sets of this x86-64 processor, by the numbers that Highway's dispatch tables use: the
// functions that Highway's headers call, in place of libhwy.so. That library measures a clock for 3.5 ms when
// it is loaded.
#include <cpuid.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "hwy/targets.h"

namespace hwy {
namespace {

// A bit of ECX, for instruction sets that compilers do not ask for by name.
bool has_ecx_bit(unsigned leaf, unsigned bit) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(leaf, 0, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> bit & 1) != 0;
}

std::int64_t find_targets() {
  constexpr unsigned kFeatures = 1, kExtendedFeatures = 0x80000001;
  __builtin_cpu_init();
  std::int64_t targets = HWY_STATIC_TARGET;
  if (!__builtin_cpu_supports("ssse3")) return targets;
  targets |= HWY_SSSE3;
  if (!__builtin_cpu_supports("sse4.1") || !__builtin_cpu_supports("sse4.2") ||
      !__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("aes")) {
    return targets;
  }
  targets |= HWY_SSE4;
  const bool has_f16c = has_ecx_bit(kFeatures, 29);
  const bool has_lzcnt = has_ecx_bit(kExtendedFeatures, 5);
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi") ||
      !__builtin_cpu_supports("bmi2") || !has_f16c || !has_lzcnt) {
    return targets;
  }
  targets |= HWY_AVX2;
  // Highway's next target, AVX3_DL, is not among those that it compiles by default.
  const bool has_avx3 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512cd");
  return has_avx3 ? targets | HWY_AVX3 : targets;
}

// Not 0 while a test chooses.
std::int64_t chosen_by_test = 0;

}  // namespace

std::int64_t SupportedTargets() {
  static const std::int64_t targets = find_targets();
  return chosen_by_test != 0 ? chosen_by_test : targets;
}

void SetSupportedTargetsForTest(std::int64_t targets) {
  chosen_by_test = targets;
  GetChosenTarget().DeInit();
}

ChosenTarget& GetChosenTarget() {
  static ChosenTarget target;
  return target;
}

// Checks of builds without optimisation call it.
void Abort(const char* file, int line, const char* format, ...) {
  std::fprintf(stderr, "%s:%d: ", file, line);
  std::va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::abort();
}

}  // namespace hwy
