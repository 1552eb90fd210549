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
#include <map>
#include <memory>
#include <mutex>
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
  // Time on SimulatedOptions::processor_resource for each byte that the rank receives.
  double processor_seconds_per_byte = 0;
};

enum class GatherAlgorithm : std::uint8_t { kRing, kDirect };

// Messages between ranks that threads of this process simulate at the same time, each on a backend of its
// own, on one virtual clock. A receive ends when the send has ended. Threads: any.
class SimulatedMail {
 public:
  // Requires: `clock` outlives this and the signals.
  explicit SimulatedMail(HostClock& clock) : clock_(clock) {}

  // The arrival of the message of that name; the same for the sender and the receiver.
  std::shared_ptr<ModelSignal> message(const std::string& name);
  // A rank ended early: all messages count as arrived, so that nobody waits for it.
  void abandon();

 private:
  HostClock& clock_;
  std::mutex mutex_;
  bool abandoned_ = false;
  std::map<std::string, std::shared_ptr<ModelSignal>> messages_;
};

struct SimulatedOptions {
  int rank = 0;
  int size = 1;
  std::vector<SimulatedLevel> levels;  // From the innermost; the last one has all ranks. At most 4.
  GatherAlgorithm gather = GatherAlgorithm::kRing;
  std::shared_ptr<SimulatedMail> mail;  // Null: sends and receives take the time of the links alone.
  int processor_resource = 0;           // That carries the bytes of levels with processor_seconds_per_byte.
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
