// LocalGroupImpl: the meeting place of all local ranks, or of those of one group that was split from them. It
// hands out the communicators, which share its parts: the ranks, their collectives and their messages.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "collectives/arguments.h"
#include "collectives/local/device_copies.h"
#include "collectives/local/messages.h"
#include "collectives/local/ranks.h"
#include "collectives/local/rounds.h"
#include "forebay/local_communicator.h"

namespace forebay::internal {

// Threads: any.
class LocalGroupImpl final : public LocalGroup, public std::enable_shared_from_this<LocalGroupImpl> {
 public:
  LocalGroupImpl(int size, const LocalOptions& options);
  LocalGroupImpl(LocalGroupImpl& origin, const std::vector<SplitWish>& members);

  Result<std::unique_ptr<Communicator>> communicator(int rank, Backend& backend, Kernels& kernels) override;

  LocalRanks& ranks() noexcept { return ranks_; }
  LocalRounds& rounds() noexcept { return rounds_; }
  LocalMessages& messages() noexcept { return messages_; }
  const LocalFault& fault() const noexcept { return fault_; }

  // The group of the ranks of `color` in the split that had control sequence `sequence`. Each of its ranks
  // asks once.
  std::shared_ptr<LocalGroupImpl> split_group(std::uint64_t sequence, int color,
                                              const std::vector<SplitWish>& members);

 private:
  // The host or the backends copy: the same for all ranks of a group.
  enum class Mover : std::uint8_t { kUndecided, kHost, kBackend };

  // Marks `rank` as handed out. Errors: kInvalidArgument, kUnsupported.
  Status claim(int rank, const Capabilities& device);

  struct Split {
    std::shared_ptr<LocalGroupImpl> group;
    int remaining_count;
  };

  LocalRanks ranks_;
  LocalRounds rounds_;
  LocalMessages messages_;
  const LocalFault fault_;
  // Guarded by the world's mutex.
  std::vector<char> handed_out_;     // By rank.
  Mover mover_ = Mover::kUndecided;  // As the first rank's backend needs it.
  std::map<std::pair<std::uint64_t, int>, Split> splits_;
};

// The communicator of `rank`; it takes the port's events, if it has any. Where the host copies, the port is
// empty.
std::unique_ptr<Communicator> create_local_communicator(std::shared_ptr<LocalGroupImpl> group, int rank,
                                                        Backend& backend, Kernels& kernels,
                                                        const DevicePort& port);

}  // namespace forebay::internal
