// Defects planted into the PTX of compiled kernels: each is caught by the cases of its kernel, as a
// difference or as a fault.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "tests/fakes/cuda/ptx/parser.h"
#include "tests/kernels/kernel_test_support.h"
#include "tests/kernels/ptx/kernel_case.h"

namespace forebay::ptx_test {
namespace {

// Some defects never end.
constexpr std::uint64_t kMostInstructionsOfAMutant = 3'000'000;

constexpr int kLast = -1;

struct Mutation {
  const char* defect;
  const char* kernel;
  const char* pattern;  // A regular expression, and the match that is replaced, counted from 0.
  int match;
  const char* replacement;
};

constexpr Mutation kForebay[] = {
    {"a product rounded towards zero", "forebay_scale_fp32_fp32", R"(mul\.rn\.f32)", 3, "mul.rz.f32"},
    {"a square root rounded up", "forebay_adamw_fp32", R"(sqrt\.rn)", 1, "sqrt.rp"},
    {"a quotient rounded down", "forebay_adamw_fp32_bf16", R"(div\.rn)", 2, "div.rm"},
    {"subnormals flushed", "forebay_add_fp32", R"(add\.rn\.f32)", 0, "add.rn.ftz.f32"},
    {"a fused multiply-add rounded twice", "forebay_adamw_bf16_bf16",
     R"(fma\.rn\.f32\s+(%\w+), (%\w+), (%\w+), (%\w+);)", 2,
     "{ .reg .b32 t; mul.rn.f32 t, $2, $3; add.rn.f32 $1, t, $4; }"},
    {"a lost predicate", "forebay_fill_bf16", R"(@%p\d+ bra)", 2, "bra"},
    {"a predicate turned round", "forebay_cast_fp32_fp16", R"(@(%p\d+) bra)", 2, "@!$1 bra"},
    {"no barrier after the lanes are stored", "forebay_norm_leaves_fp32", R"(bar\.sync\s+0;)", 0, ""},
    {"no barrier before the leaves are added", "forebay_norm_leaves_bf16", R"(bar\.sync\s+0;)", 1, ""},
    {"no barrier before the next chunk", "forebay_norm_leaves_fp16", R"(bar\.sync\s+0;)", 2, ""},
    {"no barrier between levels of a tree in global memory", "forebay_norm_tree", R"(bar\.sync\s+0;)", 0, ""},
    {"a bound off by one", "forebay_cast_fp32_bf16", R"(setp\.ge\.u64)", kLast, "setp.gt.u64"},
    {"half of a load's width", "forebay_cast_bf16_fp32", R"(ld\.global\.u16)", 0, "ld.global.u8"},
    {"a shuffle from one lane too far", "forebay_norm_leaves_fp32", R"((shfl\.sync\.down\.b32\s+\S+ \S+) 1,)",
     0, "$1 2,"},
    {"a NaN that stays as it came", "forebay_norm_tree", R"(setp\.num\.f64)", 0, "setp.nan.f64"},
    {"a comparison turned round", "forebay_step_control", R"(setp\.lt\.f64)", 0, "setp.gt.f64"},
    {"a register that nobody writes", "forebay_accumulate_fp16", R"(cvt\.rn\.f32\.u16\s+[^;]*;)", 5, ""},
    {"no barrier after the greatest of each thread", "forebay_kept_update_block8", R"(bar\.sync\s+0;)", 0,
     ""},
    {"a step of a chain rounded twice", "forebay_matrix_gram",
     R"(fma\.rn\.f32\s+(%\w+), (%\w+), (%\w+), (%\w+);)", 40,
     "{ .reg .b32 t; mul.rn.f32 t, $2, $3; add.rn.f32 $1, t, $4; }"},
    {"a step of a chain left out", "forebay_matrix_polynomial",
     R"(fma\.rn\.f32\s+(%\w+), (%\w+), (%\w+), (%\w+);)", 3, "mov.b32 $1, $4;"},
    {"no barrier after a tile is loaded", "forebay_matrix_step", R"(bar\.sync\s+0;)", 0, ""},
    {"no barrier before the next tile", "forebay_matrix_gram", R"(bar\.sync\s+0;)", kLast, ""},
    {"a square rounded before it is added", "forebay_matrix_squares",
     R"(mul\.rn\.f64\s+(%\w+), (%\w+), (%\w+);)", kLast,
     "{ .reg .f32 t; mul.rn.f64 $1, $2, $3; cvt.rn.f32.f64 t, $1; cvt.f64.f32 $1, t; }"},
    {"a divisor rounded down", "forebay_matrix_norm", R"(cvt\.rn\.f32\.f64)", 0, "cvt.rm.f32.f64"},
    {"a negative zero that stays", "forebay_matrix_move", R"(add\.rn\.f32\s+(%\w+), (%\w+), [^;]*;)", 0,
     "mov.b32 $1, $2;"},
    {"no barrier after the lanes of rows are stored", "forebay_factor_rows", R"(bar\.sync\s+0;)", 0, ""},
    {"a sum of a row rounded up", "forebay_factor_rows", R"(add\.rn\.f64)", 7, "add.rp.f64"},
    {"no barrier after bands are stored", "forebay_factor_columns", R"(bar\.sync\s+0;)", 0, ""},
    {"no barrier before the next bands", "forebay_factor_columns", R"(bar\.sync\s+0;)", kLast, ""},
    {"bands that are one row longer", "forebay_factor_columns", R"((add\.s64\s+%\w+, %\w+), 256;)", 0,
     "$1, 257;"},
    {"a factor rounded twice", "forebay_factor_renewal", R"(fma\.rn\.f32\s+(%\w+), (%\w+), (%\w+), (%\w+);)",
     0, "{ .reg .b32 t; mul.rn.f32 t, $2, $3; add.rn.f32 $1, t, $4; }"},
    {"a mean rounded down", "forebay_factor_means", R"(cvt\.rn\.f32\.f64)", kLast, "cvt.rm.f32.f64"},
    {"no barrier after row factors are loaded", "forebay_factor_means", R"(bar\.sync\s+0;)", 0, ""},
    {"a root rounded up", "forebay_leaves_of_updates", R"(sqrt\.rn)", 0, "sqrt.rp"},
    {"a row that is not entered", "forebay_factored_update", R"(div\.rn\.f32)", 0, "mul.rn.f32"},
    {"no barrier before the values are added", "forebay_chain", R"(bar\.sync\s+0;)", 0, ""},
    {"a threshold turned round", "forebay_adafactor_step", R"(max\.f64)", kLast, "min.f64"},
    {"a skipped step that is kept", "forebay_keep_factors", R"(setp\.ne\.(s32|u32|b32)\s+(%\w+), (%\w+), 1;)",
     0, "setp.eq.u32 $2, $3, 7;"},
    {"a wide load off its alignment", "forebay_add_bf16",
     R"((ld\.global\.cs\.v4\.u32\s+\{[^}]*\}, \[%\w+)\])", 0, "$1+4]"},
};

constexpr Mutation kSample[] = {
    {"no barrier after a tile is loaded", "forebay_gpt_product", R"(bar\.sync\s+0;)", 1, ""},
    {"operands exchanged", "forebay_gpt_norm_forward", R"(sub\.rn\.f32\s+(%\w+), (%\w+), (%\w+);)", kLast,
     "sub.rn.f32 $1, $3, $2;"},
    {"the last bit of a constant", "forebay_gpt_gelu", "0f3F4C422A", 0, "0f3F4C422B"},
    {"or for exclusive or", "forebay_gpt_drop", R"(xor\.b64)", 1, "or.b64"},
    {"a shared address one word on", "forebay_gpt_column_sums", R"((st\.shared\.f32\s+\[%\w+)\])", 0,
     "$1+4]"},
    {"a signed shift for an unsigned one", "forebay_gpt_widen", R"(shl\.b32\s+(%\w+), (%\w+), 16;)", 0,
     "shr.s32 $1, $2, 16;"},
};

// The text with the mutation in its kernel; empty where the pattern does not match.
std::string mutated(const std::string& text, const Mutation& mutation) {
  const std::size_t begin = text.find(".entry " + std::string(mutation.kernel) + "(");
  if (begin == std::string::npos) return {};
  const std::size_t end = text.find("\n}", begin);
  const std::string body = text.substr(begin, end - begin);
  const std::regex pattern(mutation.pattern);
  std::vector<std::smatch> matches;
  for (std::sregex_iterator match(body.begin(), body.end(), pattern), none; match != none; ++match)
    matches.push_back(*match);
  const std::size_t index =
      mutation.match == kLast ? matches.size() - 1 : static_cast<std::size_t>(mutation.match);
  if (index >= matches.size()) return {};
  const std::smatch& match = matches[index];
  const std::string replaced = match.format(mutation.replacement);
  const auto place = begin + static_cast<std::size_t>(match.position());
  return text.substr(0, place) + replaced + text.substr(place + static_cast<std::size_t>(match.length()));
}

// The text with the first two steps of every chain of a product exchanged: their operands are the first eight
// wide loads from shared memory.
std::string with_exchanged_steps(std::string text, const std::string& kernel) {
  constexpr std::size_t kLoadsOfAStep = 4;
  std::size_t at = text.find(".entry " + kernel + "(");
  std::vector<std::pair<std::size_t, std::string>> addresses;
  while (addresses.size() < 2 * kLoadsOfAStep) {
    at = text.find("[", text.find("ld.shared.v4", at));
    if (at == std::string::npos) return {};
    addresses.emplace_back(at, text.substr(at, text.find(']', at) + 1 - at));
  }
  for (std::size_t i = addresses.size(); i-- > 0;) {
    const std::size_t other = i < kLoadsOfAStep ? i + kLoadsOfAStep : i - kLoadsOfAStep;
    text.replace(addresses[i].first, addresses[i].second.size(), addresses[other].second);
  }
  return text;
}

// Why the mutation is caught; empty when it is not.
std::string caught_by(const ptx::Module& module, const std::string& kernel,
                      const std::vector<KernelCase>& cases) {
  for (const KernelCase& wanted : cases) {
    if (wanted.kernel != kernel) continue;
    try {
      const Comparison compared = compare(wanted, module.kernels.at(kernel), kMostInstructionsOfAMutant);
      if (compared.differences != 0) return compared.first_difference;
    } catch (const ptx::Fault& fault) {
      return fault.what();
    }
  }
  return {};
}

struct Tally {
  int mutations = 0, caught = 0;
};

void expect_all_caught(const std::string& text, const std::vector<KernelCase>& cases,
                       const Mutation* mutations, std::size_t count, Tally* tally) {
  for (std::size_t i = 0; i < count; ++i) {
    const Mutation& mutation = mutations[i];
    ++tally->mutations;
    const std::string changed = mutated(text, mutation);
    ASSERT_FALSE(changed.empty()) << mutation.kernel << " has no match " << mutation.match << " of "
                                  << mutation.pattern;
    // A mutation that is refused by its form would show nothing.
    ptx::Module module;
    ASSERT_NO_THROW(module = ptx::parse(changed)) << mutation.defect;
    const std::string reason = caught_by(module, mutation.kernel, cases);
    EXPECT_FALSE(reason.empty()) << mutation.defect << " in " << mutation.kernel << " was not caught";
    if (reason.empty()) continue;
    ++tally->caught;
    std::printf("%s: %s\n", mutation.defect, reason.c_str());
  }
}

TEST(PtxMutations, AreAllCaught) {
  const std::string forebay = forebay_ptx(), sample = gpt_ptx();
  if (forebay.empty() || sample.empty())
    GTEST_SKIP() << "nvcc was not found when this was built, so there is no PTX to change";
  const std::uint64_t seed = kernel_test::test_seed();
  Tally tally;
  expect_all_caught(forebay, forebay_cases(seed), kForebay, std::size(kForebay), &tally);
  expect_all_caught(sample, gpt_cases(seed), kSample, std::size(kSample), &tally);
  std::printf("%d of %d mutations caught\n", tally.caught, tally.mutations);
  EXPECT_GE(tally.mutations, 20);
}

TEST(PtxMutations, AnotherOrderOfAChainIsCaught) {
  const std::string forebay = forebay_ptx();
  if (forebay.empty()) GTEST_SKIP() << "nvcc was not found when this was built, so there is no PTX to change";
  const std::vector<KernelCase> cases = forebay_cases(kernel_test::test_seed());
  for (const char* const kernel :
       {"forebay_matrix_gram", "forebay_matrix_polynomial", "forebay_matrix_step"}) {
    const std::string changed = with_exchanged_steps(forebay, kernel);
    ASSERT_FALSE(changed.empty()) << kernel;
    const std::string reason = caught_by(ptx::parse(changed), kernel, cases);
    EXPECT_NE(reason.find("the definition gives"), std::string::npos) << kernel << ": " << reason;
    std::printf("%s\n", reason.c_str());
  }
}

}  // namespace
}  // namespace forebay::ptx_test
