// Muon's matrices: their momentum is gathered, orthogonalised by one rank each and sent back before the vote,
// and the update after it uses the result. The contract is in ARCHITECTURE.md, the arithmetic in
// forebay/muon.h. Parameters that are not matrices are the Updater's.
//
// Products run on the device, on a stream of their own. Momentum and update of a unit run where its states
// are: on the device, or for an offloaded unit in host functions.
#pragma once

#include <cstdint>
#include <vector>

#include "forebay/muon.h"
#include "runtime/engine/step/context.h"

namespace forebay {

class Decision;
class Updater;

class MatrixUpdates : private StepPart {
 public:
  // Requires: the units are placed.
  MatrixUpdates(StepContext& context, const Decision& decision, Updater& updater);

  // Queues the orthogonalisation of the units that are used. Order: after the decision is queued, and before
  // the vote about it. Requires: the vote about the step before is over.
  void queue(const std::vector<bool>& used, const Hyperparameters& hyperparameters);

  // The update of elements of a segment that is a matrix, without the decision. `begin`: of the elements,
  // from the start of the updated range. `kept`: as Updater::update_of, with gradient, parameters and count.
  MuonUpdateArguments update_of(int unit, const StepContext::Segment& segment, std::uint64_t begin,
                                const KeptUpdateArguments& kept, const GroupHyperparameters& group) const;

 private:
  // The momentum of one offloaded unit.
  struct Work {
    MatrixUpdates* updates = nullptr;
    int unit = 0;
    void take_momentum() { updates->take_momentum(unit); }
  };

  void divide_over_ranks();
  void queue_momentum(int index);
  void queue_gather(int index, float* gathered);
  void queue_products(int index, float* gathered);
  void queue_return(int index, float* gathered);
  void take_momentum(int index);
  MuonMomentumArguments momentum_of(const StepContext::Unit& unit, const StepContext::Segment& segment,
                                    const std::byte* gradients) const;

  const Decision& decision_;
  Updater& updater_;
  std::vector<Work> work_;
  std::vector<GroupHyperparameters> groups_;  // The step's.
  std::vector<EngineEvent> taken_;            // By unit: this rank's momentum,
  std::vector<EngineEvent> gathered_;         // that of all ranks,
  std::vector<EngineEvent> done_;             // and the products of this rank.
  EngineEvent decided_;                       // Whether the step is applied, and the clipping factor.
  EngineStream stream_;                       // The products.
};

}  // namespace forebay
