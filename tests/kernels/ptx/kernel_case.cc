#include "tests/kernels/ptx/kernel_case.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace forebay::ptx_test {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::byte kGuard{0xA5};
constexpr std::size_t kGuardBytes = 64;

// An array in memory of its own, between guards.
class Placed {
 public:
  explicit Placed(const Array& array)
      : bytes_(array.count * bytes_of(array.element)),
        storage_(bytes_ + array.offset * bytes_of(array.element) + 2 * kGuardBytes + kAlignment, kGuard) {
    const auto place = reinterpret_cast<std::uintptr_t>(storage_.data());
    begin_ = storage_.data() + (kAlignment - place % kAlignment) % kAlignment + kGuardBytes +
             array.offset * bytes_of(array.element);
    for (std::size_t i = 0; i < array.count; ++i) {
      std::memcpy(begin_ + i * bytes_of(array.element), &array.values[i], bytes_of(array.element));
    }
  }

  std::byte* begin() { return begin_; }
  std::size_t bytes() const { return bytes_; }
  std::uint64_t value(std::size_t i, Element element) const {
    std::uint64_t value = 0;
    std::memcpy(&value, begin_ + i * bytes_of(element), bytes_of(element));
    return value;
  }

 private:
  std::size_t bytes_;
  std::vector<std::byte> storage_;
  std::byte* begin_;
};

bool is_nan(Element element, std::uint64_t bits) {
  switch (element) {
    case Element::kFloat16:
      return (bits & 0x7FFF) > 0x7C00;
    case Element::kBfloat16:
      return (bits & 0x7FFF) > 0x7F80;
    case Element::kFloat32:
      return (bits & 0x7FFFFFFF) > 0x7F800000;
    case Element::kFloat64:
      return (bits & 0x7FFFFFFFFFFFFFFF) > 0x7FF0000000000000;
    default:
      return false;
  }
}

std::vector<Placed> place_all(const std::vector<Array>& arrays) {
  std::vector<Placed> placed;
  for (const Array& array : arrays) placed.emplace_back(array);
  return placed;
}

Pointers pointers_to(std::vector<Placed>& placed) {
  std::vector<std::byte*> begins;
  for (Placed& array : placed) begins.push_back(array.begin());
  return Pointers(std::move(begins));
}

float ordinary(std::mt19937_64& random) {
  return std::ldexp(std::uniform_real_distribution<float>(-1.0f, 1.0f)(random),
                    static_cast<int>(random() % 40) - 20);
}

}  // namespace

std::size_t bytes_of(Element element) {
  switch (element) {
    case Element::kByte:
      return 1;
    case Element::kFloat16:
    case Element::kBfloat16:
      return 2;
    case Element::kFloat32:
    case Element::kWord32:
      return 4;
    case Element::kFloat64:
    case Element::kWord64:
      break;
  }
  return 8;
}

Comparison compare(const KernelCase& wanted, const ptx::Kernel& kernel, std::uint64_t most_instructions) {
  std::vector<Placed> device = place_all(wanted.arrays), expected = place_all(wanted.arrays);
  ptx::GlobalMemory memory;
  for (std::size_t i = 0; i < device.size(); ++i) {
    if (device[i].bytes() == 0) continue;
    const auto begin = reinterpret_cast<std::uint64_t>(device[i].begin());
    memory.add({begin, begin + device[i].bytes(), device[i].begin(), !wanted.arrays[i].read_only});
  }
  const std::vector<std::byte> argument = wanted.argument(pointers_to(device));
  if (kernel.parameters.size() != 1 || kernel.parameters[0].bytes != argument.size()) {
    throw ptx::Fault(ptx::FaultKind::kLaunch,
                     wanted.kernel + " takes another argument than its launch gives");
  }
  ptx::Launch launch;
  launch.grid = {wanted.grid, 1, 1};
  launch.block = {256, 1, 1};
  launch.most_instructions = most_instructions;

  Comparison result;
  result.instructions = ptx::execute(kernel, launch, argument.data(), memory).instructions;
  wanted.define(pointers_to(expected));

  for (std::size_t a = 0; a < wanted.arrays.size(); ++a) {
    const Array& array = wanted.arrays[a];
    for (std::size_t i = 0; i < array.count; ++i) {
      const std::uint64_t got = device[a].value(i, array.element),
                          right = expected[a].value(i, array.element);
      ++result.values;
      const bool same =
          got == right || (array.any_nan && is_nan(array.element, got) && is_nan(array.element, right));
      if (same) continue;
      if (result.differences++ == 0) {
        char text[160];
        std::snprintf(text, sizeof text, "array %zu, element %zu: 0x%llx, the definition gives 0x%llx", a, i,
                      static_cast<unsigned long long>(got), static_cast<unsigned long long>(right));
        result.first_difference = wanted.kernel + " (" + wanted.description + "): " + text;
      }
    }
  }
  return result;
}

std::uint64_t hard_value(Element element, std::mt19937_64& random) {
  const std::uint64_t bits = random();
  const std::uint64_t kind = random() % 16;
  switch (element) {
    case Element::kFloat32: {
      static constexpr std::uint32_t kSpecial[] = {
          0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x00000001,
          0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0x477FE000, 0x477FF000, 0x33000000};
      if (kind < 2) return bits & 0xFFFFFFFF;
      if (kind == 2) return bits & 0x807FFFFF;
      if (kind == 3) return kSpecial[bits % std::size(kSpecial)];
      if (kind == 4)
        return (std::bit_cast<std::uint32_t>(ordinary(random)) & 0xFFFF0000) | 0x8000;  // bf16's ties.
      if (kind == 5)
        return (std::bit_cast<std::uint32_t>(ordinary(random)) & 0xFFFFE000) | 0x1000;  // fp16's ties.
      return std::bit_cast<std::uint32_t>(ordinary(random));
    }
    case Element::kFloat16:
    case Element::kBfloat16: {
      static constexpr std::uint16_t kSpecial[] = {0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7C00,
                                                   0xFC00, 0x7E00, 0xFE01, 0x0001, 0x7F81, 0x7C01,
                                                   0x7BFF, 0x0400, 0x0080, 0x83FF};
      if (kind < 4) return bits & 0xFFFF;
      if (kind == 4) return bits & 0x83FF;
      if (kind == 5) return kSpecial[bits % std::size(kSpecial)];
      return (element == Element::kFloat16 ? 0x3400 : 0x3E00) + (bits & 0x83FF);
    }
    case Element::kFloat64: {
      static constexpr std::uint64_t kSpecial[] = {0,
                                                   0x8000000000000000,
                                                   0x7FF0000000000000,
                                                   0xFFF0000000000000,
                                                   0x7FF8000000000001,
                                                   0xFFF4000000000000,
                                                   1,
                                                   0x7FEFFFFFFFFFFFFF};
      if (kind == 0) return kSpecial[bits % std::size(kSpecial)];
      return std::bit_cast<std::uint64_t>(std::fabs(static_cast<double>(ordinary(random))));
    }
    default:
      return bits;
  }
}

std::uint64_t mild_value(Element element, std::mt19937_64& random) {
  const float value = random() % 32 == 0 ? 0.0f : std::normal_distribution<float>()(random);
  switch (element) {
    case Element::kFloat32:
      return std::bit_cast<std::uint32_t>(value);
    case Element::kBfloat16:
      return std::bit_cast<std::uint32_t>(value) >> 16;
    case Element::kFloat16:
      return 0x3400 + (random() & 0x83FF);
    case Element::kFloat64:
      return std::bit_cast<std::uint64_t>(static_cast<double>(value));
    default:
      return random();
  }
}

}  // namespace forebay::ptx_test
