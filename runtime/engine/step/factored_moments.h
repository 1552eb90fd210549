// Adafactor's second moments: sums of squares over ranks before the vote, and the update after it. The
// contract is in ARCHITECTURE.md, the arithmetic in forebay/adafactor.h.
//
// A unit's arithmetic runs where its states are: on the device, in the order of the updates' stream, or for
// an offloaded unit in host functions, in the order of the host's stream.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "forebay/adafactor.h"
#include "runtime/engine/step/context.h"

namespace forebay {

class Decision;
class Updater;

class FactoredMoments : private StepPart {
 public:
  // Elements of a segment that are updated together; the addresses are of the first.
  struct Run {
    int unit = 0;
    std::size_t parameter = 0;  // In the unit.
    std::uint64_t begin = 0;    // Elements from the start of the updated range.
    std::uint64_t count = 0;
    const std::byte* gradient = nullptr;
  };

  FactoredMoments(StepContext& context, const Decision& decision, const Updater& updater);

  // Queues the sums of the units that are used, over all ranks. Order: after the decision is queued, and
  // before the vote about it.
  void queue(const std::vector<bool>& used);

  // A unit on the device: queue_update() of each segment and then queue_end(), after the vote. `kept`: the
  // addresses, group constants and rounding of the update (Updater::update_of), with gradient, parameters
  // and count.
  void queue_update(int unit, const StepContext::Segment& segment, const KeptUpdateArguments& kept,
                    const GroupHyperparameters& group);
  void queue_end(int unit);

  // An offloaded unit, in host functions of its update, if the step is applied: begin_update(), update() of
  // each run and add_squares() of each piece of a segment in order, end_update().
  void begin_update(int unit);
  void update(const Run& run, const KeptUpdateArguments& kept, const GroupHyperparameters& group);
  // Elements [begin, end) of the updated range have their new masters.
  void add_squares(int unit, std::size_t parameter, std::uint64_t begin, std::uint64_t end,
                   const KeptUpdateArguments& kept);
  void end_update(int unit);

  // Sums the squares of masters anew, for a unit with masters that no step has written.
  void refresh_on_device(int unit);
  // `read` gives masters in fp32 from an element of the updated range on.
  template <typename Read>
  void refresh_on_host(int index, const Read& read) {
    constexpr std::uint64_t kMostCount = 1u << 20;  // Whole leaves. Larger: more memory at once.
    Unit& u = unit(index);
    std::vector<float> masters;
    for (StepContext::Factored& p : u.factored) {
      p.squares = 0.0;
      const auto [begin, end] = own_part(index, p);
      for (std::uint64_t at = begin; at < end; at += masters.size()) {
        const std::uint64_t stop = std::min(end, (at / kMostCount + 1) * kMostCount);
        masters.resize(stop - at);
        read(at - u.updated_begin, masters);
        p.squares = add(masters.data(), DataType::kFloat32, masters.size(), at, p.squares);
      }
    }
  }

 private:
  // One offloaded unit's work in host functions.
  struct Work {
    FactoredMoments* moments = nullptr;
    int unit = 0;
    void sum() { moments->sum(unit); }
    void renew() { moments->renew(unit); }
  };
  const EngineStream& stream_of(const Unit& u) const;
  std::uint64_t factor_bytes(int index) const {
    return plan_.factor_counts[static_cast<std::size_t>(index)] * sizeof(float);
  }
  void queue_sum(int index);
  void reduce(int index);
  void queue_renewal(int index);
  void renew_on_device(int index);
  void exchange_squares();
  void sum(int index);
  void renew(int index);
  bool is_applied() const;
  // The part of a parameter in this rank's slice, in elements of the trainable section.
  std::pair<std::uint64_t, std::uint64_t> own_part(int index, const StepContext::Factored& p) const;
  // Without the clipping factor.
  FactoredRun own_run(int index, const StepContext::Factored& p) const;
  FactoredRun run_of(const Run& run, const StepContext::Factored& p) const;
  // `squares`: this rank's sums of the parameter; those of all ranks are square_count behind it.
  AdafactorStepArguments step_from(const double* squares, const StepContext::Factored& p,
                                   const GroupHyperparameters& group) const;
  // The sum of squares of this rank's masters on the device, after `state`'s step. Null: of any masters.
  void queue_squares(int index, std::size_t number, const StepState* state);
  // This rank's sums of squares on the device: masters, then updates.
  double* squares_of(const Unit& u, std::size_t number) const {
    return context_.squares + u.squares_at + 2 * number;
  }
  float* row_means_of(const StepContext::Factored& p) const { return step_of(p) + 1; }
  float* step_of(const StepContext::Factored& p) const { return context_.factor_scalars + p.scalars_at; }
  double add(const void* masters, DataType type, std::uint64_t count, std::uint64_t place, double sum);

  const Decision& decision_;
  const Updater& updater_;
  std::vector<Work> work_;
  std::vector<double> scratch_;       // Offloaded units: for leaves.
  std::vector<EngineEvent> summed_;   // By unit: this rank's sums,
  std::vector<EngineEvent> reduced_;  // and those of all ranks.
  EngineEvent decided_;               // Whether the step is applied, and the clipping factor.
  EngineEvent squared_on_device_;
  EngineEvent squared_on_host_;
};

}  // namespace forebay
