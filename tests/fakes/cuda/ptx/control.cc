// Control: bra, ret, exit, trap, barriers, shuffles, votes, activemask, nanosleep.
#include <bit>

#include "tests/fakes/cuda/ptx/fault.h"
#include "tests/fakes/cuda/ptx/lanes.h"

namespace forebay::ptx {
namespace {

enum class Shuffle : std::uint8_t { kUp, kDown, kButterfly, kIndex };

// in: the mask of lanes, the value, the distance or lane, and the clamp with the mask of segments.
// A lane that does not take part has no value to give: whoever reads it gets a register that nobody has
// written.
void shuffle(Warp& warp, const Instruction& i) {
  const std::uint32_t* const a = warp.values<std::uint32_t>(i.in[1]);
  std::uint32_t result[kWarpSize] = {};
  LaneMask inside_mask = 0, undefined = 0;
  warp.for_lanes([&](unsigned lane) {
    const auto b = static_cast<unsigned>(warp.get(i.in[2], lane)) & 31;
    const auto c = static_cast<unsigned>(warp.get(i.in[3], lane));
    const unsigned segments = c >> 8 & 31, clamp = c & 31;
    const unsigned most = (lane & segments) | (clamp & ~segments), least = lane & segments;
    unsigned from = lane;
    bool inside = false;
    switch (static_cast<Shuffle>(i.table)) {
      case Shuffle::kUp:
        inside = lane >= b && lane - b >= most;
        from = lane - b;
        break;
      case Shuffle::kDown:
        from = lane + b;
        inside = from <= most;
        break;
      case Shuffle::kButterfly:
        from = lane ^ b;
        inside = from <= most;
        break;
      case Shuffle::kIndex:
        from = least | (b & ~segments & 31);
        inside = from <= most;
        break;
    }
    if (!inside) from = lane;
    result[lane] = a[from];
    inside_mask |= LaneMask{inside} << lane;
    if ((warp.active >> from & 1) == 0) undefined |= LaneMask{1} << lane;
  });
  if ((i.out_used & 1) != 0) {
    warp.set(i.out[0], result);
    warp.undefine(i.out[0], undefined);
  }
  if (i.out_count > 1) warp.set_predicate(i.out[1], inside_mask);
}

enum class Vote : std::uint8_t { kAll, kAny, kUniform, kBallot };

// in: the mask of lanes, the predicate.
void vote(Warp& warp, const Instruction& i) {
  LaneMask given = warp.predicate(i.in[1]);
  if (i.input_negated) given = ~given;
  given &= warp.active;
  const bool all = given == warp.active, any = given != 0;
  switch (static_cast<Vote>(i.table)) {
    case Vote::kAll:
      warp.set_predicate(i.out[0], all ? kAllLanes : 0);
      break;
    case Vote::kAny:
      warp.set_predicate(i.out[0], any ? kAllLanes : 0);
      break;
    case Vote::kUniform:
      warp.set_predicate(i.out[0], all || !any ? kAllLanes : 0);
      break;
    case Vote::kBallot:
      warp.for_lanes([&](unsigned lane) { warp.put(i.out[0], lane, given); });
      break;
  }
}

void synchronise_warp(Warp& warp, const Instruction&) {
  warp.order_lanes();
}

void active_mask(Warp& warp, const Instruction& i) {
  warp.for_lanes([&](unsigned lane) { warp.put(i.out[0], lane, warp.active); });
}

void do_nothing(Warp&, const Instruction&) {}

// bar is barrier.aligned; without .aligned, the lanes of a warp come on their own.
void decode_barrier(Statement& s) {
  Instruction& i = s.result;
  i.aligned = s.name() == "bar";
  if (s.take("warp")) {
    s.expect("sync");
    s.expect_operands(1, 1);
    s.in(0, 4);
    i.flow = Flow::kMeeting;
    i.execute = synchronise_warp;
    return;
  }
  s.take("cta");
  i.flow = Flow::kBarrier;
  const bool arrives = s.take("arrive");
  if (arrives) {
    i.flow = Flow::kArrive;
  } else if (s.take("red")) {
    i.reduction = s.take("popc") ? Reduction::kPopulation : s.take("and") ? Reduction::kAnd : Reduction::kOr;
    if (i.reduction == Reduction::kOr) s.expect("or");
  } else {
    s.expect("sync");
  }
  if (!i.aligned) i.aligned = s.take("aligned");
  std::size_t next = 0;
  const bool reduces = i.reduction != Reduction::kNone;
  if (reduces) {
    const bool counts = i.reduction == Reduction::kPopulation;
    s.expect(counts ? "u32" : "pred");
    s.expect_operands(3, 4);
    s.out(next++, counts ? 4 : 0);
  } else {
    s.expect_operands(1, 2);
  }
  s.in(next++, 4);
  const bool has_count = s.operand_count() == next + (reduces ? 2 : 1);
  if (arrives && !has_count) s.refuse("it needs a number of threads");
  if (has_count) {
    s.in(next++, 4);
  } else {
    s.in_constant(0, 4);
  }
  if (reduces) s.in(next, 0);
}

void decode_shuffle(Statement& s) {
  Instruction& i = s.result;
  s.expect("sync");
  Shuffle kind = Shuffle::kUp;
  if (s.take("down")) {
    kind = Shuffle::kDown;
  } else if (s.take("bfly")) {
    kind = Shuffle::kButterfly;
  } else if (s.take("idx")) {
    kind = Shuffle::kIndex;
  } else {
    s.expect("up");
  }
  s.expect("b32");
  s.expect_operands(5, 5);
  s.out(0, 4);
  const Operand& target = s.operand(0);
  if (target.has_second) {
    if (target.second.bytes != 0) s.refuse("its second result must be a predicate");
    s.out_slot(target.second, true);
  }
  s.in(4, 4);
  for (std::size_t k = 1; k <= 3; ++k) s.in(k, 4);
  i.table = static_cast<std::uint8_t>(kind);
  i.flow = Flow::kMeeting;
  i.execute = shuffle;
}

void decode_vote(Statement& s) {
  Instruction& i = s.result;
  s.expect("sync");
  Vote kind = Vote::kBallot;
  if (s.take("all")) {
    kind = Vote::kAll;
  } else if (s.take("any")) {
    kind = Vote::kAny;
  } else if (s.take("uni")) {
    kind = Vote::kUniform;
  } else {
    s.expect("ballot");
  }
  s.expect(kind == Vote::kBallot ? "b32" : "pred");
  s.expect_operands(3, 3);
  s.out(0, kind == Vote::kBallot ? 4 : 0);
  s.in(2, 4);
  const Operand& given = s.operand(1);
  if (given.kind == Operand::Kind::kRegister && given.slot.bytes == 0) {
    s.in_slot(given.slot);
    i.input_negated = given.negated;
  } else {
    s.in(1, 0);
  }
  i.table = static_cast<std::uint8_t>(kind);
  i.flow = Flow::kMeeting;
  i.execute = vote;
}

}  // namespace

bool decode_control(Statement& s) {
  const std::string_view name = s.name();
  Instruction& i = s.result;
  if (name == "bra") {
    s.take("uni");
    s.expect_operands(1, 1);
    if (s.operand(0).kind != Operand::Kind::kLabel) s.refuse("its operand must be a label");
    i.flow = Flow::kBranch;
  } else if (name == "ret" || name == "exit") {
    s.take("uni");
    s.expect_operands(0, 0);
    i.flow = Flow::kExit;
  } else if (name == "trap" || name == "brkpt") {
    s.expect_operands(0, 0);
    i.flow = Flow::kTrap;
  } else if (name == "bar" || name == "barrier") {
    decode_barrier(s);
  } else if (name == "shfl") {
    decode_shuffle(s);
  } else if (name == "vote") {
    decode_vote(s);
  } else if (name == "activemask") {
    s.expect("b32");
    s.expect_operands(1, 1);
    s.out(0, 4);
    i.execute = active_mask;
  } else if (name == "nanosleep") {
    s.expect("u32");
    s.expect_operands(1, 1);
    s.in(0, 4);
    i.execute = do_nothing;
  } else {
    return false;
  }
  return true;
}

}  // namespace forebay::ptx
