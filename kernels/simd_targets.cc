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

// Bits of ECX, for instruction sets that not every compiler asks for by name.
bool has_ecx_bits(unsigned leaf, unsigned bits) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(leaf, 0, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bits) == bits;
}

std::int64_t find_targets() {
  constexpr unsigned kFeatures = 1, kMoreFeatures = 7, kExtendedFeatures = 0x80000001;
  __builtin_cpu_init();
  std::int64_t targets = HWY_STATIC_TARGET;
  if (!__builtin_cpu_supports("ssse3")) return targets;
  targets |= HWY_SSSE3;
  if (!__builtin_cpu_supports("sse4.1") || !__builtin_cpu_supports("sse4.2") ||
      !__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("aes")) {
    return targets;
  }
  targets |= HWY_SSE4;
  const bool has_f16c = has_ecx_bits(kFeatures, 1u << 29);
  const bool has_lzcnt = has_ecx_bits(kExtendedFeatures, 1u << 5);
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi") ||
      !__builtin_cpu_supports("bmi2") || !has_f16c || !has_lzcnt) {
    return targets;
  }
  targets |= HWY_AVX2;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512cd")) {
    return targets;
  }
  targets |= HWY_AVX3;
  // VBMI, VBMI2, GFNI, VAES, VPCLMULQDQ, VNNI, BITALG, VPOPCNTDQ. Only sources that ask for it are compiled
  // for this target, and none for a better one.
  const bool has_avx3_dl = has_ecx_bits(kMoreFeatures, 1u << 1 | 0x1Fu << 8 | 1u << 6 | 1u << 14);
  return has_avx3_dl ? targets | HWY_AVX3_DL : targets;
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
