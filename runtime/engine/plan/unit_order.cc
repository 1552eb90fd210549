#include "runtime/engine/plan/unit_order.h"

#include <algorithm>
#include <charconv>

namespace forebay {
namespace {

std::string text_of(const UnitEvents& events) {
  std::string text;
  for (const UnitEvent& event : events) {
    if (!text.empty()) text += '.';
    text += std::to_string(event.unit);
    if (event.kind != UnitEvent::Kind::kForward) text += event.reduces() ? 'r' : 'b';
  }
  return text;
}

std::string text_of(const UnitPairs& pairs) {
  std::string text;
  for (const auto& [a, b] : pairs) {
    if (!text.empty()) text += '.';
    text += std::to_string(a) + '-' + std::to_string(b);
  }
  return text;
}

// Reads the parts of an order; a part that is not as it should be leaves ok() false.
class Parser {
 public:
  Parser(std::string_view text, int unit_count) : rest_(text), unit_count_(unit_count) {}

  bool ok() const { return ok_ && rest_.empty(); }
  bool take(char wanted) {
    if (rest_.empty() || rest_.front() != wanted) return false;
    rest_.remove_prefix(1);
    return true;
  }
  void expect(char wanted) { ok_ = take(wanted) && ok_; }
  bool at_unit() const { return !rest_.empty() && rest_.front() >= '0' && rest_.front() <= '9'; }
  int unit() {
    int value = -1;
    const auto read = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    rest_.remove_prefix(static_cast<std::size_t>(read.ptr - rest_.data()));
    ok_ = ok_ && value >= 0 && value < unit_count_;
    return std::clamp(value, 0, unit_count_ - 1);
  }
  UnitEvents events() {
    UnitEvents events;
    if (!at_unit()) return events;
    do {
      const int number = unit();
      events.push_back({number, take('r')   ? UnitEvent::Kind::kReduce
                                : take('b') ? UnitEvent::Kind::kBackward
                                            : UnitEvent::Kind::kForward});
    } while (ok_ && take('.'));
    return events;
  }
  UnitPairs pairs() {
    UnitPairs pairs;
    if (!at_unit()) return pairs;
    do {
      const int first = unit();
      expect('-');
      add_pair(pairs, first, unit());
    } while (ok_ && take('.'));
    return pairs;
  }

 private:
  std::string_view rest_;
  int unit_count_;
  bool ok_ = true;
};

}  // namespace

std::string UnitOrder::text() const {
  std::string text;
  for (const UnitEvents& events : micro_steps) text += (text.empty() ? "" : "+") + text_of(events);
  return text + '/' + text_of(evaluation) + '/' + text_of(parameters) + '/' + text_of(gradients);
}

Result<UnitOrder> parse_unit_order(std::string_view text, int unit_count) {
  Parser parser(text, unit_count);
  UnitOrder order;
  do order.micro_steps.push_back(parser.events());
  while (parser.take('+'));
  parser.expect('/');
  order.evaluation = parser.events();
  parser.expect('/');
  order.parameters = parser.pairs();
  parser.expect('/');
  order.gradients = parser.pairs();
  if (parser.ok()) return order;
  return Status(StatusCode::kInvalidArgument,
                "order-of-units has a recorded order that is not one of a model of " +
                    std::to_string(unit_count) +
                    " units; give the text of recorded_order() of a run of this model, or none");
}

UnitOrder registered_order(const ModelShape& model, Accumulate accumulate) {
  UnitOrder order;
  UnitEvents& events = order.micro_steps.emplace_back();
  UnitEvents reductions;
  const int unit_count = static_cast<int>(model.units.size());
  for (int unit = 0; unit < unit_count; ++unit) events.push_back({unit, UnitEvent::Kind::kForward});
  order.evaluation = events;
  for (int unit = unit_count - 1; unit >= 0; --unit) {
    if (model.units[static_cast<std::size_t>(unit)].backward_reads_parameters)
      events.push_back({unit, UnitEvent::Kind::kBackward});
    (accumulate == Accumulate::kLocal ? reductions : events).push_back({unit, UnitEvent::Kind::kReduce});
  }
  events.insert(events.end(), reductions.begin(), reductions.end());
  return order;
}

}  // namespace forebay
