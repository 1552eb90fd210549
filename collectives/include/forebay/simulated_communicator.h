// SimulatedCommunicator: a communicator of any number of ranks, of which one exists. It moves no bytes. Its
// operations take virtual time on a model backend (model_backend.h) by a topology, so the schedule of an
// engine can be timed for 100,000 ranks on a laptop.
//
// All other ranks are taken to do the same at the same time: they come to every collective when this rank
// does, give the bytes that this rank gives to control operations, and load the links that ranks share.
//
// Time of a collective, on each level of the topology that its ranks span, all levels at once:
//   reduce_scatter  each rank sends each slice to its owner: peers * slice / bandwidth, then the owner's sum
//   all_gather      a ring (NCCL), in which each domain receives the bytes of the others once over all links
//                   of its ranks; or direct, in which each rank sends its slice to every other
// after the latency of the hops. Operations of one rank that overlap share its links.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "forebay/communicator.h"
#include "forebay/kernels.h"
#include "forebay/model_backend.h"

namespace forebay {

// A set of domains of consecutive ranks, and the links that join the smaller domains in one.
struct SimulatedLevel {
  std::string name;             // "node"
  int ranks = 1;                // Ranks of one domain; a multiple of those of the level before.
  double bytes_per_second = 0;  // One link, each way.
  int ranks_per_link = 1;       // Ranks that share a link.
  double latency_seconds = 0;   // One hop.
  double message_seconds = 0;   // Each message, while others wait behind it.
  int resource = 0;             // On the model backend: the share of the link that this rank has.
};

enum class GatherAlgorithm : std::uint8_t { kRing, kDirect };

struct SimulatedOptions {
  int rank = 0;
  int size = 1;
  std::vector<SimulatedLevel> levels;  // From the innermost; the last one has all ranks. At most 4.
  GatherAlgorithm gather = GatherAlgorithm::kRing;
  double control_seconds =
      20e-6;  // One hop of a control operation; a collective one takes 2 log2(size) hops.
};

class SimulatedCommunicator : public Communicator {
 public:
  // The color and key that a rank of this communicator gives to split().
  using SplitRule = std::function<std::pair<int, int>(int rank)>;

  // Requires: `backend` and `kernels` outlive it and those split from it.
  // Errors: kInvalidArgument naming the level, the figure and the allowed values; a backend without a timing.
  static Result<std::unique_ptr<SimulatedCommunicator>> create(const SimulatedOptions& options,
                                                               ModelBackend& backend, Kernels& kernels);

  // The color and key of the other ranks are not known, so each call of split() takes one rule, in the order
  // given here. Communicators that were split off take theirs from the same list.
  // Errors of split(): kUnsupported without a rule, kInvalidArgument for a rule that does not give this
  //                    rank's own color and key.
  virtual void expect_split(SplitRule rule) = 0;
};

}  // namespace forebay
