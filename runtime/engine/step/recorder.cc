#include "runtime/engine/step/recorder.h"

#include <algorithm>
#include <utility>

namespace forebay {
namespace {

std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

}  // namespace

Recorder::Recorder(UnitOrder order, bool known, int unit_count)
    : order_(std::move(order)), known_(known), unit_count_(unit_count) {}

void Recorder::begin(const UnitEvents& expected, Notes& notes) {
  expected_ = &expected;
  position_ = 0;
  on_course_ = true;
  notes_ = &notes;
  hash_ = mixed(hash_, ~std::uint64_t{0});
}

void Recorder::begin_micro_step(int index) {
  micro_steps_.resize(static_cast<std::size_t>(index) + 1);
  begin(order_.micro_step(index), micro_steps_.back());
}

void Recorder::begin_evaluation() {
  begin(order_.evaluation, evaluation_.emplace());
}

Recorder::At Recorder::reach(UnitEvent event, const std::function<bool(UnitEvent)>& may_pass) const {
  At at = expected_->begin() + static_cast<std::ptrdiff_t>(position_);
  while (at != expected_->end() && *at != event && may_pass(*at)) ++at;
  return at;
}

bool Recorder::come_to(UnitEvent event, const std::function<bool(UnitEvent)>& may_pass) {
  const At at = reach(event, may_pass);
  on_course_ = at != expected_->end() && *at == event;
  return on_course_;
}

bool Recorder::expects_later(UnitEvent event, const std::function<bool(UnitEvent)>& may_pass) const {
  if (!on_course_) return false;
  const At at = reach(event, may_pass);
  return at != expected_->end() && *at != event && std::find(at, expected_->end(), event) != expected_->end();
}

std::optional<UnitEvent> Recorder::next() const {
  if (position_ == expected_->size()) return std::nullopt;
  return (*expected_)[position_];
}

void Recorder::note(UnitEvent event, bool used) {
  notes_->push_back({event, used});
  hash_ = mixed(hash_, static_cast<std::uint64_t>(event.unit) * 4 + static_cast<std::uint64_t>(event.kind));
}

std::optional<int> Recorder::next_unit() const {
  if (!on_course_) return std::nullopt;
  for (std::size_t i = position_; i < expected_->size(); ++i) {
    if (!(*expected_)[i].reduces()) return (*expected_)[i].unit;
  }
  return std::nullopt;
}

std::vector<const Recorder::Notes*> Recorder::passes() const {
  std::vector<const Notes*> all;
  for (const Notes& notes : micro_steps_) all.push_back(&notes);
  if (evaluation_) all.push_back(&*evaluation_);
  return all;
}

bool Recorder::as_expected(const Notes& notes, const UnitEvents& events) const {
  return std::equal(notes.begin(), notes.end(), events.begin(), events.end(),
                    [](const Note& note, UnitEvent event) { return note.event == event; });
}

Recorder::News Recorder::news() const {
  News news;
  news.hash = hash_;
  news.differs =
      !known_ ||
      !std::includes(order_.parameters.begin(), order_.parameters.end(), parameters_.begin(),
                     parameters_.end()) ||
      !std::includes(order_.gradients.begin(), order_.gradients.end(), gradients_.begin(), gradients_.end());
  for (std::size_t k = 0; k < micro_steps_.size(); ++k) {
    if (!as_expected(micro_steps_[k], order_.micro_step(static_cast<int>(k)))) news.differs = true;
  }
  if (evaluation_ && !as_expected(*evaluation_, order_.evaluation)) news.differs = true;
  for (const Notes* notes : passes()) {
    for (const Note& note : *notes) news.left_out = news.left_out || !note.used;
  }
  return news;
}

// A byte for each event, then one for each two units, of parameters and of gradients.
std::vector<std::byte> Recorder::account() const {
  std::vector<std::byte> account;
  for (const Notes* notes : passes()) {
    for (const Note& note : *notes) account.push_back(std::byte{note.used});
  }
  for (const UnitPairs* pairs : {&parameters_, &gradients_}) {
    for (int a = 0; a < unit_count_; ++a) {
      for (int b = a + 1; b < unit_count_; ++b) account.push_back(std::byte{pairs->contains({a, b})});
    }
  }
  return account;
}

void Recorder::adopt(std::span<const std::byte> accounts) {
  const std::size_t length = account().size();
  std::vector<bool> any(length, false);
  for (std::size_t i = 0; i < accounts.size(); ++i) {
    if (accounts[i] != std::byte{0}) any[i % length] = true;
  }
  std::size_t at = 0;
  const auto used = [&](const Notes& notes) {
    UnitEvents events;
    for (const Note& note : notes) {
      if (any[at++]) events.push_back(note.event);
    }
    return events;
  };
  std::vector<UnitEvents>& all = order_.micro_steps;
  if (all.size() < micro_steps_.size()) all.resize(micro_steps_.size(), UnitEvents(all.back()));
  for (std::size_t k = 0; k < micro_steps_.size(); ++k) all[k] = used(micro_steps_[k]);
  while (all.size() > 1 && all[all.size() - 1] == all[all.size() - 2]) all.pop_back();
  if (evaluation_) order_.evaluation = used(*evaluation_);
  for (UnitPairs* pairs : {&order_.parameters, &order_.gradients}) {
    for (int a = 0; a < unit_count_; ++a) {
      for (int b = a + 1; b < unit_count_; ++b) {
        if (any[at++]) pairs->emplace(a, b);
      }
    }
  }
  known_ = true;
}

bool Recorder::is_empty(bool with_evaluation) const {
  if (with_evaluation && evaluation_ && !evaluation_->empty()) return false;
  return std::all_of(micro_steps_.begin(), micro_steps_.end(),
                     [](const Notes& notes) { return notes.empty(); });
}

void Recorder::clear() {
  micro_steps_.clear();
  evaluation_.reset();
  parameters_.clear();
  gradients_.clear();
  hash_ = 0;
}

}  // namespace forebay
