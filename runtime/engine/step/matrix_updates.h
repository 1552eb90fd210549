// Muon's matrices: their momentum is gathered, orthogonalised by one rank each and sent back before the vote,
// and the update after it uses the result. The contract is in ARCHITECTURE.md, the arithmetic in
// forebay/host_muon.h. Parameters that are not matrices are the Updater's.
//
// All arithmetic runs in host functions: on the stream of the unit's update, so the host has to reach the
// memory of units that are not offloaded, and for products on a stream of its own.
#pragma once

#include <cstdint>
#include <vector>

#include "forebay/host_muon.h"
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

  // Updates elements of a segment that is a matrix, in a host function of the update, if the step is applied.
  // `begin`: of the elements, from the start of the updated range. `kept`: as Updater::update_of, with
  // gradient, parameters and count.
  void update(int unit, const StepContext::Segment& segment, std::uint64_t begin,
              const KeptUpdateArguments& kept, const GroupHyperparameters& group) const;

  // Waits for the products, which use the Updater's threads.
  void close() { stream_.close(); }

 private:
  // One unit's work in host functions.
  struct Work {
    MatrixUpdates* updates = nullptr;
    int unit = 0;
    void take_momentum() { updates->take_momentum(unit); }
  };
  // One matrix of this rank.
  struct Product {
    MatrixUpdates* updates = nullptr;
    const StepContext::Matrix* matrix = nullptr;
    void orthogonalise() { updates->orthogonalise(*matrix); }
  };

  void divide_over_ranks();
  void queue_momentum(int index);
  void queue_gather(int index, float* gathered);
  void queue_products(int index, float* gathered);
  void queue_return(int index, float* gathered);
  void take_momentum(int index);
  void orthogonalise(const StepContext::Matrix& matrix);
  bool is_applied() const;

  const Decision& decision_;
  Updater& updater_;
  std::vector<Work> work_;
  std::vector<std::vector<Product>> products_;  // By unit, in order of the matrices.
  std::vector<GroupHyperparameters> groups_;    // The step's.
  std::vector<EngineEvent> taken_;              // By unit: this rank's momentum,
  std::vector<EngineEvent> gathered_;           // that of all ranks,
  std::vector<EngineEvent> done_;               // and the products of this rank.
  EngineEvent decided_;                         // Whether the step is applied, and the clipping factor.
  EngineStream stream_;                         // The products.
};

}  // namespace forebay
