// Follows the order that is expected of a pass, and records the order that comes.
//
// Ranks run the same collectives if they see the same events in the same order. A rank that leaves a unit out
// sees its events too: when it goes on to a later event, it goes through the expected ones before it. An
// event that is not among the expected ones comes at once, on every rank alike, and the next step expects it
// there.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/engine/plan/unit_order.h"

namespace forebay {

class Recorder {
 public:
  // The facts that a rank tells the others when a step ends.
  struct News {
    bool differs = false;    // There is no order, or events or pairs are not in it.
    bool left_out = false;   // This rank went through events without using them.
    std::uint64_t hash = 0;  // A hash of all events since the last step.
  };

  // `known`: `order` was recorded, or given.
  Recorder(UnitOrder order, bool known, int unit_count);

  const UnitOrder& order() const { return order_; }
  bool known() const { return known_; }

  void begin_micro_step(int index);
  void begin_evaluation();
  // The rank comes to `event`: whether it is expected, before any event that `may_pass` refuses.
  bool come_to(UnitEvent event, const std::function<bool(UnitEvent)>& may_pass);
  // The order is as expected up to here, and `event` is expected behind an event that `may_pass` refuses.
  bool expects_later(UnitEvent event, const std::function<bool(UnitEvent)>& may_pass) const;
  // The next expected event, none at the end. advance() goes beyond it.
  std::optional<UnitEvent> next() const;
  void advance() { ++position_; }
  void note(UnitEvent event, bool used);
  // The unit whose parameters are expected next; none when the order is not as expected.
  std::optional<int> next_unit() const;
  // Notes that two units do not share a slot.
  void pair_parameters(int unit, int other) { add_pair(parameters_, unit, other); }
  void pair_gradients(int unit, int other) { add_pair(gradients_, unit, other); }

  News news() const;
  // This rank's account of the step, as long as every other rank's; the order becomes that of all accounts.
  std::vector<std::byte> account() const;
  void adopt(std::span<const std::byte> accounts);
  // No event was noted since clear(), those of evaluations left aside unless `with_evaluation`.
  bool is_empty(bool with_evaluation) const;
  // Forgets all events and pairs since the last step.
  void clear();

 private:
  struct Note {
    UnitEvent event;
    bool used = false;
  };
  using Notes = std::vector<Note>;

  using At = UnitEvents::const_iterator;
  // The place of `event`, or of the first event before it that `may_pass` refuses, or the end.
  At reach(UnitEvent event, const std::function<bool(UnitEvent)>& may_pass) const;
  bool as_expected(const Notes& notes, const UnitEvents& events) const;
  void begin(const UnitEvents& expected, Notes& notes);
  std::vector<const Notes*> passes() const;

  UnitOrder order_;
  bool known_;
  const int unit_count_;
  const UnitEvents* expected_ = nullptr;
  std::size_t position_ = 0;
  bool on_course_ = false;  // The last event was expected.
  Notes* notes_ = nullptr;
  std::vector<Notes> micro_steps_;
  std::optional<Notes> evaluation_;  // The last one.
  UnitPairs parameters_;
  UnitPairs gradients_;
  std::uint64_t hash_ = 0;
};

}  // namespace forebay
