// The interpreter against the rules of the PTX ISA, instruction by instruction, and the defects that it
// finds.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "tests/fakes/cuda/ptx/executor.h"
#include "tests/fakes/cuda/ptx/image.h"
#include "tests/fakes/cuda/ptx/parser.h"

namespace forebay::ptx {
namespace {

constexpr char kHead[] = R"(.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 data)
{
  .reg .pred %p<10>;
  .reg .b16 %h<10>;
  .reg .b32 %r<20>;
  .reg .b64 %d<20>;
  .shared .align 16 .b8 shared[512];
  mov.u32 %r0, %tid.x;
  ld.param.u64 %d0, [data];
  cvta.to.global.u64 %d0, %d0;
)";

// A kernel with the registers %p, %h (16 bits), %r and %d (64 bits); %r0 is the thread and %d0 the address of
// the data.
std::string text_of(const std::string& body) {
  return kHead + body + "\n  ret;\n}\n";
}

struct Outcome {
  std::vector<std::uint64_t> data;
  std::optional<FaultKind> fault;
  std::string message;
};

Outcome run(const std::string& body, std::vector<std::uint64_t> data, unsigned threads = 1, unsigned grid = 1,
            std::size_t dynamic_shared_bytes = 0) {
  Outcome outcome;
  try {
    const Module module = parse(text_of(body));
    GlobalMemory memory;
    const auto address = reinterpret_cast<std::uint64_t>(data.data());
    memory.add({address, address + data.size() * 8, reinterpret_cast<std::byte*>(data.data()), true});
    Launch launch;
    launch.grid[0] = grid;
    launch.block[0] = threads;
    launch.dynamic_shared_bytes = dynamic_shared_bytes;
    launch.most_instructions = 100'000;
    execute(module.kernels.at("k"), launch, reinterpret_cast<const std::byte*>(&address), memory);
  } catch (const Fault& fault) {
    outcome.fault = fault.kind;
    outcome.message = fault.what();
  }
  outcome.data = std::move(data);
  return outcome;
}

// The result of one instruction in %r9, from %r1, %r2 and %r3, or in %d9 from %d1, %d2 and %d3. %p1 is true,
// %p2 false.
std::uint64_t value_of(const std::string& instruction, const std::string& result,
                       std::array<std::uint64_t, 3> inputs) {
  std::string body;
  for (int i = 1; i <= 3; ++i) {
    const std::string n = std::to_string(i);
    body += "ld.global.u64 %d" + n + ", [%d0+" + std::to_string(8 * (i - 1)) + "];\n";
    body += "cvt.u32.u64 %r" + n + ", %d" + n + ";\ncvt.u16.u64 %h" + n + ", %d" + n + ";\n";
  }
  body += "setp.eq.u32 %p1, 0, 0;\nsetp.ne.u32 %p2, 0, 0;\n" + instruction +
          (instruction.front() == '{' ? "\n" : ";\n");
  if (result == "%p9") body += "selp.b32 %r9, 1, 0, %p9;\n";
  const std::string stored = result == "%p9" ? "%r9" : result;
  const std::string type = stored[1] == 'd' ? "u64" : stored[1] == 'h' ? "u16" : "u32";
  body += "st.global." + type + " [%d0+24], " + stored + ";";
  const Outcome outcome = run(body, {inputs[0], inputs[1], inputs[2], 0});
  EXPECT_FALSE(outcome.fault.has_value()) << outcome.message;
  return outcome.data[3];
}

struct Row {
  const char* instruction;
  const char* result;
  std::array<std::uint64_t, 3> inputs;
  std::uint64_t expected;
};

void expect_rows(const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    const std::uint64_t got = value_of(row.instruction, row.result, row.inputs);
    EXPECT_EQ(got, row.expected) << row.instruction << std::hex << " of 0x" << row.inputs[0] << ", 0x"
                                 << row.inputs[1] << ", 0x" << row.inputs[2] << " is 0x" << got;
  }
}

constexpr std::uint64_t kOne = 0x3F800000, kNan = 0x7FFFFFFF, kQuiet = 0xFFC01234, kInfinity = 0x7F800000,
                        kMinusZero = 0x80000000, kTiny = 0x00000001, kSubnormal = 0x007FFFFF,
                        kSmallest = 0x00800000;

TEST(PtxFloat, EveryNanOfFp32IsTheCanonicalOne) {
  expect_rows({{"add.f32 %r9, %r1, %r2", "%r9", {kQuiet, kOne, 0}, kNan},
               {"sub.rn.f32 %r9, %r1, %r2", "%r9", {kInfinity, kInfinity, 0}, kNan},
               {"mul.rn.f32 %r9, %r1, %r2", "%r9", {kInfinity, 0, 0}, kNan},
               {"fma.rn.f32 %r9, %r1, %r2, %r3", "%r9", {kOne, kOne, kQuiet}, kNan},
               {"div.rn.f32 %r9, %r1, %r2", "%r9", {0, 0, 0}, kNan},
               {"sqrt.rn.f32 %r9, %r1", "%r9", {0xBF800000, 0, 0}, kNan},
               {"sqrt.rn.f32 %r9, %r1", "%r9", {kMinusZero, 0, 0}, kMinusZero},
               {"rcp.rn.f32 %r9, %r1", "%r9", {kMinusZero, 0, 0}, 0xFF800000},
               {"mov.b32 %r9, %r1", "%r9", {kQuiet, 0, 0}, kQuiet},
               {"neg.f32 %r9, %r1", "%r9", {kQuiet, 0, 0}, kQuiet ^ 0x80000000},
               {"abs.f32 %r9, %r1", "%r9", {kQuiet, 0, 0}, kQuiet & 0x7FFFFFFF}});
}

TEST(PtxFloat, MinAndMaxPreferNumbersAndOrderZeros) {
  expect_rows({{"min.f32 %r9, %r1, %r2", "%r9", {kQuiet, kOne, 0}, kOne},
               {"max.f32 %r9, %r1, %r2", "%r9", {kOne, kQuiet, 0}, kOne},
               {"min.f32 %r9, %r1, %r2", "%r9", {kQuiet, kQuiet, 0}, kNan},
               {"min.NaN.f32 %r9, %r1, %r2", "%r9", {kQuiet, kOne, 0}, kNan},
               {"min.f32 %r9, %r1, %r2", "%r9", {0, kMinusZero, 0}, kMinusZero},
               {"min.f32 %r9, %r1, %r2", "%r9", {kMinusZero, 0, 0}, kMinusZero},
               {"max.f32 %r9, %r1, %r2", "%r9", {0, kMinusZero, 0}, 0},
               {"max.f32 %r9, %r1, %r2", "%r9", {kMinusZero, 0, 0}, 0},
               {"max.ftz.f32 %r9, %r1, %r2", "%r9", {kTiny, kMinusZero, 0}, 0}});
}

TEST(PtxFloat, RoundsAsItIsTold) {
  // 1 + 2^-24, half way to the next number, and 1 + 2^-23 + 2^-24.
  constexpr std::uint64_t kHalfUlp = 0x33800000, kNext = 0x3F800001;
  expect_rows({{"add.rn.f32 %r9, %r1, %r2", "%r9", {kOne, kHalfUlp, 0}, kOne},
               {"add.rn.f32 %r9, %r1, %r2", "%r9", {kNext, kHalfUlp, 0}, 0x3F800002},
               {"add.rz.f32 %r9, %r1, %r2", "%r9", {kNext, kHalfUlp, 0}, kNext},
               {"add.rm.f32 %r9, %r1, %r2", "%r9", {kNext, kHalfUlp, 0}, kNext},
               {"add.rp.f32 %r9, %r1, %r2", "%r9", {kOne, kHalfUlp, 0}, kNext},
               {"fma.rp.f32 %r9, %r1, %r2, %r3", "%r9", {kOne, kHalfUlp, kOne}, kNext},
               {"div.rz.f32 %r9, %r1, %r2", "%r9", {kOne, 0x40400000, 0}, 0x3EAAAAAA},
               {"div.rn.f32 %r9, %r1, %r2", "%r9", {kOne, 0x40400000, 0}, 0x3EAAAAAB},
               {"fma.rn.f32 %r9, %r1, %r2, %r3", "%r9", {0x3F800001, 0x3F800001, 0xBF800002}, 0x28800000},
               {"add.rp.f64 %d9, %d1, %d2", "%d9", {0x3FF0000000000000, 1, 0}, 0x3FF0000000000001}});
}

TEST(PtxFloat, FlushesSubnormalsWhereItIsTold) {
  expect_rows({{"add.f32 %r9, %r1, %r2", "%r9", {kTiny, 0, 0}, kTiny},
               {"add.ftz.f32 %r9, %r1, %r2", "%r9", {kTiny, 0, 0}, 0},
               {"mul.rn.f32 %r9, %r1, %r2", "%r9", {kSmallest, 0x3F000000, 0}, 0x00400000},
               {"mul.rn.ftz.f32 %r9, %r1, %r2", "%r9", {kSmallest, 0xBF000000, 0}, kMinusZero},
               {"add.sat.f32 %r9, %r1, %r2", "%r9", {kOne, kOne, 0}, kOne},
               {"add.sat.f32 %r9, %r1, %r2", "%r9", {kQuiet, kOne, 0}, 0},
               {"setp.eq.ftz.f32 %p9, %r1, %r2", "%p9", {kSubnormal, 0, 0}, 1},
               {"setp.eq.f32 %p9, %r1, %r2", "%p9", {kSubnormal, 0, 0}, 0}});
}

TEST(PtxComparison, AreFalseForNanUnlessUnordered) {
  expect_rows({{"setp.lt.f32 %p9, %r1, %r2", "%p9", {kQuiet, kOne, 0}, 0},
               {"setp.ne.f32 %p9, %r1, %r2", "%p9", {kQuiet, kOne, 0}, 0},
               {"setp.neu.f32 %p9, %r1, %r2", "%p9", {kQuiet, kOne, 0}, 1},
               {"setp.gtu.f32 %p9, %r1, %r2", "%p9", {kQuiet, kOne, 0}, 1},
               {"setp.num.f32 %p9, %r1, %r1", "%p9", {kQuiet, 0, 0}, 0},
               {"setp.nan.f32 %p9, %r1, %r2", "%p9", {kOne, kQuiet, 0}, 1},
               {"setp.eq.f32 %p9, %r1, %r2", "%p9", {kMinusZero, 0, 0}, 1},
               {"setp.lt.s32 %p9, %r1, %r2", "%p9", {0xFFFFFFFF, 0, 0}, 1},
               {"setp.lt.u32 %p9, %r1, %r2", "%p9", {0xFFFFFFFF, 0, 0}, 0},
               {"setp.lt.and.u32 %p9, %r1, %r2, %p2", "%p9", {0, 1, 0}, 0},
               {"setp.lt.or.u32 %p9, %r1, %r2, !%p2", "%p9", {1, 0, 0}, 1},
               {"setp.lt.u32 %p8|%p9, %r1, %r2", "%p9", {0, 1, 0}, 0}});
}

TEST(PtxConversion, RoundsClampsAndKeepsTheIsasNan) {
  expect_rows({{"cvt.rzi.s32.f32 %r9, %r1", "%r9", {0xC0200000, 0, 0}, 0xFFFFFFFE},  // -2.5
               {"cvt.rni.s32.f32 %r9, %r1", "%r9", {0x40200000, 0, 0}, 2},           // A tie.
               {"cvt.rmi.s32.f32 %r9, %r1", "%r9", {0xC0200000, 0, 0}, 0xFFFFFFFD},
               {"cvt.rpi.s32.f32 %r9, %r1", "%r9", {0x40200000, 0, 0}, 3},
               {"cvt.rzi.s32.f32 %r9, %r1", "%r9", {kInfinity, 0, 0}, 0x7FFFFFFF},
               {"cvt.rzi.u32.f32 %r9, %r1", "%r9", {0xBF800000, 0, 0}, 0},
               {"cvt.rzi.u32.f32 %r9, %r1", "%r9", {kQuiet, 0, 0}, 0},
               {"cvt.rzi.u16.f32 %h9, %r1", "%h9", {0x49742400, 0, 0}, 0xFFFF},  // 1,000,000
               {"cvt.rn.f32.u64 %r9, %d1", "%r9", {0x0000004000004001, 0, 0}, 0x52800001},
               {"cvt.rn.f32.f64 %r9, %d1", "%r9", {0x3FF0000010000000, 0, 0}, kOne},  // A tie.
               {"cvt.rp.f32.f64 %r9, %d1", "%r9", {0x3FF0000010000000, 0, 0}, 0x3F800001},
               {"cvt.f64.f32 %d9, %r1", "%d9", {kTiny, 0, 0}, 0x36A0000000000000},
               {"cvt.rni.f32.f32 %r9, %r1", "%r9", {0x40200000, 0, 0}, 0x40000000},
               {"cvt.sat.f32.f32 %r9, %r1", "%r9", {0xBF800000, 0, 0}, 0},
               {"cvt.rn.f16.f32 %h9, %r1", "%h9", {0x477FF000, 0, 0}, 0x7C00},  // 65520
               {"cvt.rn.f16.f32 %h9, %r1", "%h9", {0x477FEFFF, 0, 0}, 0x7BFF},
               {"cvt.rz.f16.f32 %h9, %r1", "%h9", {0x477FF000, 0, 0}, 0x7BFF},
               {"cvt.rn.f16.f32 %h9, %r1", "%h9", {0x33000000, 0, 0}, 0},  // Half the least.
               {"cvt.rn.f16.f32 %h9, %r1", "%h9", {0x33000001, 0, 0}, 1},
               {"cvt.rn.f16.f32 %h9, %r1", "%h9", {0x387FE000, 0, 0}, 0x0400},  // Up to a normal one.
               {"cvt.rn.f16.f32 %h9, %r1", "%h9", {kQuiet, 0, 0}, 0x7FFF},
               {"cvt.f32.f16 %r9, %h1", "%r9", {0x0001, 0, 0}, 0x33800000},
               {"cvt.f32.f16 %r9, %h1", "%r9", {0xFE00, 0, 0}, kNan},
               {"cvt.rn.bf16.f32 %h9, %r1", "%h9", {0x3F808000, 0, 0}, 0x3F80},  // A tie.
               {"cvt.rn.bf16.f32 %h9, %r1", "%h9", {0x3F818000, 0, 0}, 0x3F82},
               {"cvt.s32.s16 %r9, %h1", "%r9", {0x8000, 0, 0}, 0xFFFF8000},
               {"cvt.u32.u16 %r9, %h1", "%r9", {0x8000, 0, 0}, 0x8000},
               {"cvt.s32.s8 %r9, %r1", "%r9", {0x1280, 0, 0}, 0xFFFFFF80},
               {"cvt.sat.s8.s32 %r9, %r1", "%r9", {0x1000, 0, 0}, 0x7F},
               {"cvt.sat.u16.s32 %h9, %r1", "%h9", {0xFFFFFFFF, 0, 0}, 0}});
}

TEST(PtxInteger, WrapsMultipliesAndDivides) {
  expect_rows({{"add.s32 %r9, %r1, %r2", "%r9", {0x7FFFFFFF, 1, 0}, 0x80000000},
               {"mul.hi.s32 %r9, %r1, %r2", "%r9", {0xFFFFFFFF, 2, 0}, 0xFFFFFFFF},
               {"mul.hi.u32 %r9, %r1, %r2", "%r9", {0xFFFFFFFF, 2, 0}, 1},
               {"mul.wide.s32 %d9, %r1, %r2", "%d9", {0xFFFFFFFF, 2, 0}, 0xFFFFFFFFFFFFFFFE},
               {"mul.wide.u16 %r9, %h1, %h2", "%r9", {0xFFFF, 0xFFFF, 0}, 0xFFFE0001},
               {"mad.wide.u32 %d9, %r1, %r2, %d3", "%d9", {0xFFFFFFFF, 2, 5}, 0x200000003},
               {"mad.lo.s32 %r9, %r1, %r2, %r3", "%r9", {7, 6, 5}, 47},
               {"div.s32 %r9, %r1, %r2", "%r9", {0x80000000, 0xFFFFFFFF, 0}, 0x80000000},
               {"rem.s32 %r9, %r1, %r2", "%r9", {0xFFFFFFF9, 4, 0}, 0xFFFFFFFD},
               {"div.u64 %d9, %d1, %d2", "%d9", {0xFFFFFFFFFFFFFFFF, 10, 0}, 0x1999999999999999},
               {"min.s16 %h9, %h1, %h2", "%h9", {0x8000, 1, 0}, 0x8000},
               {"shl.b32 %r9, %r1, %r2", "%r9", {1, 32, 0}, 0},
               {"shr.s32 %r9, %r1, %r2", "%r9", {0x80000000, 40, 0}, 0xFFFFFFFF},
               {"shr.u64 %d9, %d1, %r2", "%d9", {0x8000000000000000, 63, 0}, 1},
               {"shf.l.wrap.b32 %r9, %r1, %r2, %r3", "%r9", {0x80000000, 1, 33}, 3},
               {"bfe.s32 %r9, %r1, %r2, %r3", "%r9", {0x00000F00, 8, 4}, 0xFFFFFFFF},
               {"bfe.u32 %r9, %r1, %r2, %r3", "%r9", {0x00000F00, 8, 4}, 15},
               {"bfi.b32 %r9, %r1, %r2, 8, 4", "%r9", {0xA, 0xFFFFFFFF, 0}, 0xFFFFFAFF},
               {"prmt.b32 %r9, %r1, %r2, 0x6543", "%r9", {0x44332211, 0x88776655, 0}, 0x77665544},
               {"prmt.b32 %r9, %r1, %r2, 0xB000", "%r9", {0xF0000012, 0, 0}, 0xFF121212},
               {"lop3.b32 %r9, %r1, %r2, %r3, 0xE8", "%r9", {0xC, 0xA, 0x9}, 0x8},
               {"popc.b64 %r9, %d1", "%r9", {0xFF00FF00FF00FF00, 0, 0}, 32},
               {"clz.b32 %r9, %r1", "%r9", {1, 0, 0}, 31},
               {"brev.b32 %r9, %r1", "%r9", {1, 0, 0}, 0x80000000},
               {"mov.b64 %d9, {%r1, %r2}", "%d9", {1, 2, 0}, 0x200000001},
               {"mov.b64 {_, %r9}, %d1", "%r9", {0x500000004, 0, 0}, 5},
               {"{ .reg .b16 low; mov.b32 {low, %h9}, %r1; }", "%h9", {0x12345678, 0, 0}, 0x1234},
               {"selp.b32 %r9, %r1, %r2, %p2", "%r9", {1, 2, 0}, 2},
               {"copysign.f32 %r9, %r1, %r2", "%r9", {kMinusZero, kOne, 0}, 0xBF800000},
               {"set.eq.u32.u32 %r9, %r1, %r2", "%r9", {3, 3, 0}, 0xFFFFFFFF}});
}

// --- threads ---

std::vector<std::uint64_t> zeros(std::size_t count) {
  return std::vector<std::uint64_t>(count);
}

// %d1 becomes the address of the thread's own entry.
constexpr char kOwnEntry[] = "mul.wide.u32 %d1, %r0, 8;\nadd.s64 %d1, %d0, %d1;\n";
constexpr char kOwnShared[] = "mov.u32 %r1, shared;\nmad.lo.u32 %r1, %r0, 4, %r1;\n";

TEST(PtxThreads, ShufflesMoveValuesWithinTheirSegments) {
  const std::string store = "cvt.u64.u32 %d2, %r2;\nst.global.u64 [%d1], %d2;";
  const auto shuffled = [&](const std::string& instruction) {
    const Outcome outcome = run(kOwnEntry + instruction + store, zeros(64), 64);
    EXPECT_FALSE(outcome.fault.has_value()) << outcome.message;
    return outcome.data;
  };
  const auto down = shuffled("shfl.sync.down.b32 %r2|%p1, %r0, 1, 31, -1;\n");
  const auto up = shuffled("shfl.sync.up.b32 %r2, %r0, 2, 0, -1;\n");
  const auto butterfly = shuffled("shfl.sync.bfly.b32 %r2, %r0, 16, 31, -1;\n");
  const auto index = shuffled("shfl.sync.idx.b32 %r2, %r0, 3, 0x181F, -1;\n");  // Segments of 8 lanes.
  for (std::uint64_t i = 0; i < 64; ++i) {
    EXPECT_EQ(down[i], i % 32 == 31 ? i : i + 1);
    EXPECT_EQ(up[i], i % 32 < 2 ? i : i - 2);
    EXPECT_EQ(butterfly[i], i ^ 16);
    EXPECT_EQ(index[i], i / 8 * 8 + 3);
  }
}

TEST(PtxThreads, VotesCountTheLanesThatTakePart) {
  const Outcome outcome = run(std::string(kOwnEntry) + R"(
    setp.lt.u32 %p1, %r0, 5;
    vote.sync.ballot.b32 %r2, %p1, -1;
    vote.sync.any.pred %p2, %p1, -1;
    vote.sync.all.pred %p3, !%p1, -1;
    selp.b32 %r3, 0x100, 0, %p2;
    selp.b32 %r4, 0x200, 0, %p3;
    or.b32 %r2, %r2, %r3;
    or.b32 %r2, %r2, %r4;
    cvt.u64.u32 %d2, %r2;
    st.global.u64 [%d1], %d2;)",
                              zeros(32), 32);
  ASSERT_FALSE(outcome.fault.has_value()) << outcome.message;
  EXPECT_EQ(outcome.data[0], 0x11Fu);
}

TEST(PtxThreads, LanesThatPartComeTogetherAgain) {
  // Each lane loops as often as its number says, and then all shuffle.
  const Outcome outcome = run(std::string(kOwnEntry) + R"(
    mov.u32 %r2, 0;
    mov.u32 %r3, 0;
  loop:
    setp.ge.u32 %p1, %r3, %r0;
    @%p1 bra done;
    add.u32 %r2, %r2, %r3;
    add.u32 %r3, %r3, 1;
    bra loop;
  done:
    shfl.sync.down.b32 %r4, %r2, 1, 31, -1;
    cvt.u64.u32 %d2, %r4;
    st.global.u64 [%d1], %d2;)",
                              zeros(32), 32);
  ASSERT_FALSE(outcome.fault.has_value()) << outcome.message;
  EXPECT_EQ(outcome.data[9], 45u);
}

TEST(PtxThreads, BarriersOrderSharedMemoryStaticAndDynamic) {
  const std::string body = std::string(kOwnEntry) + kOwnShared + R"(
    st.shared.u32 [%r1], %r0;
    bar.sync 0;
    xor.b32 %r2, %r0, 127;
    mad.lo.u32 %r3, %r2, 4, shared;
    ld.shared.u32 %r4, [%r3];
    cvt.u64.u32 %d2, %r4;
    st.global.u64 [%d1], %d2;)";
  const Outcome outcome = run(body, zeros(128), 128, 3);
  ASSERT_FALSE(outcome.fault.has_value()) << outcome.message;
  EXPECT_EQ(outcome.data[0], 127u);

  std::string dynamic = text_of(body);
  dynamic.replace(dynamic.find(".visible"), 0, ".extern .shared .align 16 .b8 more[];\n");
  for (std::size_t at = dynamic.find("shared;"); at != std::string::npos; at = dynamic.find("shared;", at))
    dynamic.replace(at, 6, "more");
  const Module module = parse(dynamic);
  std::vector<std::uint64_t> data(128);
  const auto address = reinterpret_cast<std::uint64_t>(data.data());
  GlobalMemory memory;
  memory.add({address, address + 1024, reinterpret_cast<std::byte*>(data.data()), true});
  Launch launch;
  launch.block[0] = 128;
  EXPECT_THROW(execute(module.kernels.at("k"), launch, reinterpret_cast<const std::byte*>(&address), memory),
               Fault);
  launch.dynamic_shared_bytes = 512;
  execute(module.kernels.at("k"), launch, reinterpret_cast<const std::byte*>(&address), memory);
  EXPECT_EQ(data[127], 0u);
  EXPECT_EQ(data[1], 126u);
}

TEST(PtxThreads, NamedBarriersLetProducersGoOn) {
  // The first warp writes and arrives; the second waits and reads. Nothing else orders them.
  const std::string body = std::string(kOwnEntry) + kOwnShared + R"(
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra consumer;
    st.shared.u32 [%r1], %r0;
    bar.arrive 1, 64;
    ret;
  consumer:
    bar.sync 1, 64;
    ld.shared.u32 %r4, [%r1+-128];
    cvt.u64.u32 %d2, %r4;
    st.global.u64 [%d1], %d2;)";
  const Outcome outcome = run(body, zeros(64), 64, 2);
  ASSERT_FALSE(outcome.fault.has_value()) << outcome.message;
  EXPECT_EQ(outcome.data[40], 8u);
}

TEST(PtxThreads, ReductionsOfBarriersSeeEveryThread) {
  const Outcome outcome = run(std::string(kOwnEntry) + R"(
    setp.lt.u32 %p1, %r0, 50;
    barrier.cta.red.popc.aligned.u32 %r2, 0, %p1;
    bar.red.or.pred %p2, 0, %p1;
    @!%p2 trap;
    cvt.u64.u32 %d2, %r2;
    st.global.u64 [%d1], %d2;)",
                              zeros(96), 96);
  ASSERT_FALSE(outcome.fault.has_value()) << outcome.message;
  EXPECT_EQ(outcome.data[95], 50u);
}

TEST(PtxThreads, AtomicsAddEveryThread) {
  const Outcome outcome = run(R"(
    atom.global.add.u32 %r2, [%d0], 1;
    red.global.max.u32 [%d0+8], %r2;
    mov.u32 %r3, shared;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 st.shared.u32 [%r3], 0;
    bar.sync 0;
    atom.shared.add.u32 %r4, [%r3], %r0;
    bar.sync 0;
    @%p1 ld.shared.u32 %r5, [%r3];
    @%p1 st.global.u32 [%d0+16], %r5;)",
                              zeros(3), 64, 2);
  ASSERT_FALSE(outcome.fault.has_value()) << outcome.message;
  EXPECT_EQ(outcome.data, (std::vector<std::uint64_t>{128, 127, 2016}));
}

// --- defects ---

void expect_fault(FaultKind kind, const std::string& words, const std::string& body, unsigned threads = 64) {
  const Outcome outcome = run(body, zeros(63), threads);
  ASSERT_TRUE(outcome.fault.has_value()) << body;
  EXPECT_EQ(*outcome.fault, kind) << outcome.message;
  EXPECT_NE(outcome.message.find(words), std::string::npos) << outcome.message;
}

TEST(PtxDefects, UnknownInstructionsAndModifiersAreRefused) {
  for (const char* body :
       {"frobnicate.u32 %r1, %r0;", "add.frob.u32 %r1, %r0, %r0;", "div.approx.f32 %r1, %r0, %r0;",
        "sqrt.approx.f32 %r1, %r0;", "mov.u32 %r1, %clock;", "add.u32 %d1, %r0, %r0;", "bra nowhere;",
        "add.u32 %r1, %r0;", "ex2.approx.f32 %r1, %r0;", "mul.u32 %r1, %r0, %r0;", "call f;",
        "cvt.f16.f32 %h1, %r0;", "add.f32 %r1, %r0, 1;;"}) {
    const Outcome outcome = run(body, zeros(1));
    ASSERT_TRUE(outcome.fault.has_value()) << body;
    EXPECT_EQ(*outcome.fault, FaultKind::kRefused) << body;
    EXPECT_NE(outcome.message.find("PTX line 14"), std::string::npos) << outcome.message;
  }
}

TEST(PtxDefects, RegistersThatNobodyWroteAreFound) {
  expect_fault(FaultKind::kUninitialised, "register %r2", "add.u32 %r1, %r0, %r2;");
  expect_fault(FaultKind::kUninitialised, "thread 7",
               "setp.ne.u32 %p1, %r0, 7;\n@%p1 mov.u32 %r2, 1;\nadd.u32 %r1, %r0, %r2;");
  expect_fault(FaultKind::kUninitialised, "predicate %p1", "@%p1 mov.u32 %r2, 1;");
  // One side of "or" decides, as compilers know.
  expect_fault(FaultKind::kUninitialised, "predicate %p3",
               "setp.eq.u32 %p1, %r0, 0;\nor.pred %p3, %p1, %p2;\n@%p3 mov.u32 %r2, 1;");
  const Outcome decided =
      run("setp.eq.u32 %p1, %r0, %r0;\nor.pred %p3, %p1, %p2;\n@%p3 mov.u32 %r2, 1;", zeros(1));
  EXPECT_FALSE(decided.fault.has_value()) << decided.message;
  // A shuffle from a lane that takes no part.
  expect_fault(FaultKind::kUninitialised, "register %r2",
               "setp.lt.u32 %p1, %r0, 16;\n@!%p1 ret;\nshfl.sync.down.b32 %r2, %r0, 8, 31, 0xFFFF;\nadd.u32 "
               "%r3, %r2, 1;",
               32);
}

TEST(PtxDefects, MemoryThatIsNotThereIsFound) {
  expect_fault(FaultKind::kAddress, "reaches beyond its allocation",
               "ld.global.v2.u64 {%d1, %d2}, [%d0+496];");
  expect_fault(FaultKind::kAddress, "finds no memory", "mov.u64 %d2, 0;\nst.global.u32 [%d2], %r0;");
  expect_fault(FaultKind::kAlignment, "of 8 bytes", "ld.global.u64 %d2, [%d0+4];");
  expect_fault(FaultKind::kAlignment, "of 16 bytes", "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d0+8];");
  expect_fault(FaultKind::kAddress, "512 bytes of shared memory",
               "mov.u32 %r1, 512;\nst.shared.u32 [%r1], %r0;");
  expect_fault(FaultKind::kUninitialised, "shared memory", "mov.u32 %r1, shared;\nld.shared.u32 %r2, [%r1];");
  expect_fault(FaultKind::kAddress, "another space",
               "mov.u64 %d1, shared;\ncvta.shared.u64 %d1, %d1;\ncvta.to.global.u64 %d1, %d1;");
  expect_fault(FaultKind::kTrap, "divided by zero", "div.u32 %r1, %r0, 0;");
}

TEST(PtxDefects, RacesOfSharedMemoryAreFound) {
  const std::string own = kOwnShared;
  const std::string other = "xor.b32 %r2, %r0, 33;\nmad.lo.u32 %r3, %r2, 4, shared;\n";
  // The second one is found as a read before or after the other thread's write, as the order of warps has it.
  expect_fault(
      FaultKind::kRace, "with no barrier since",
      own + other +
          "st.shared.u32 [%r1], %r0;\nbar.sync 0;\nst.shared.u32 [%r1], %r0;\nld.shared.u32 %r4, [%r3];");
  expect_fault(
      FaultKind::kRace, "with no barrier since",
      own + other +
          "st.shared.u32 [%r1], %r0;\nbar.sync 0;\nld.shared.u32 %r4, [%r3];\nst.shared.u32 [%r1], %r4;");
  expect_fault(FaultKind::kRace, "written by thread 0", "mov.u32 %r1, shared;\nst.shared.u32 [%r1], %r0;");
  // Lanes of one warp are not ordered by running together, but by their own barrier.
  const std::string neighbour = "xor.b32 %r2, %r0, 1;\nmad.lo.u32 %r3, %r2, 4, shared;\n";
  expect_fault(FaultKind::kRace, "written by thread",
               own + neighbour + "st.shared.u32 [%r1], %r0;\nld.shared.u32 %r4, [%r3];");
  const Outcome ordered =
      run(own + neighbour + "st.shared.u32 [%r1], %r0;\nbar.warp.sync -1;\nld.shared.u32 %r4, [%r3];",
          zeros(1), 64);
  EXPECT_FALSE(ordered.fault.has_value()) << ordered.message;
}

TEST(PtxDefects, ThreadsThatCannotMeetAreFound) {
  expect_fault(FaultKind::kMeeting, "has ended", "setp.eq.u32 %p1, %r0, 0;\n@%p1 ret;\nbar.sync 0;");
  expect_fault(FaultKind::kMeeting, "together",
               "setp.lt.u32 %p1, %r0, 7;\n@%p1 bra a;\nbar.sync 0;\nret;\na:\nbar.sync 0;");
  expect_fault(FaultKind::kMeeting, "has ended", "setp.lt.u32 %p1, %r0, 32;\n@%p1 ret;\nbar.sync 0;");
  expect_fault(FaultKind::kMeeting, "not in the mask", "shfl.sync.down.b32 %r1, %r0, 1, 31, 1;");
  expect_fault(FaultKind::kMeeting, "expect different numbers",
               "setp.lt.u32 %p1, %r0, 32;\n@%p1 bar.arrive 1, 64;\n@!%p1 bar.sync 1, 96;");
  expect_fault(FaultKind::kEndless, "as many instructions", "loop:\nbra loop;");
}

// --- images ---

TEST(PtxImages, UnpackTheNewestTextOfAFatBinary) {
  const auto entry = [](std::uint32_t architecture, std::uint64_t flags, const std::string& content,
                        std::uint64_t unpacked) {
    std::string bytes(64, '\0');
    const auto put = [&](std::size_t at, auto value) {
      std::memcpy(bytes.data() + at, &value, sizeof value);
    };
    put(0, std::uint16_t{1});
    put(2, std::uint16_t{0x101});
    put(4, std::uint32_t{64});
    put(8, std::uint64_t{(content.size() + 7) / 8 * 8});
    put(16, static_cast<std::uint32_t>(content.size()));
    put(28, architecture);
    put(40, flags);
    put(56, unpacked);
    return bytes + content + std::string((8 - content.size() % 8) % 8, '\0');
  };
  // LZ4: four literals, then 12 bytes that repeat them, then the last literals.
  const std::string packed = std::string(
                                 "\x48"
                                 "abcd\x04\x00\x20",
                                 8) +
                             "xy";
  const std::string entries = entry(80, 0, "// plain", 0) + entry(90, 0x2000, packed, 18);
  std::string image(16, '\0');
  const std::uint32_t magic = 0xBA55ED50;
  const std::uint16_t version = 1, header = 16;
  const std::uint64_t bytes = entries.size();
  std::memcpy(image.data(), &magic, 4);
  std::memcpy(image.data() + 4, &version, 2);
  std::memcpy(image.data() + 6, &header, 2);
  std::memcpy(image.data() + 8, &bytes, 8);
  image += entries;

  EXPECT_EQ(text_of_image(image.data()), "abcdabcdabcdabcdxy");
  EXPECT_EQ(text_of_image(".version 8.0\n"), ".version 8.0\n");
  EXPECT_EQ(text_of_image("forebay kernels\n"), "");
  image[16 + 8] = 127;  // An entry longer than the image.
  image[16 + 9] = 127;
  EXPECT_THROW(static_cast<void>(text_of_image(image.data())), Fault);
}

}  // namespace
}  // namespace forebay::ptx
