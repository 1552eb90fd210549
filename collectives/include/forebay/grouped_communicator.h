// GroupedCommunicator: reductions in two levels, first within groups of consecutive ranks, then across the
// groups. That is the order "group(g)": the sum of a slice is the rank-ordered fp32 sum of each group, and
// those added in the order of the groups, in fp32 again.
//
// Where a group is a host, most bytes stay inside: between hosts travels one partial sum for each group
// instead of one contribution for each rank. A partial sum is fp32 whatever the type of the contributions.
//
// Two ways to keep what is reduced:
// - whole: a slice for every rank of the world, as without groups. The ranks are the world's.
// - replicated (hybrid sharding): a slice for every rank of a group, the same in all groups. The ranks are
//   those of the group; sums are over the whole world all the same.
//
// Source of hybrid sharding: Zhang et al., "MiCS", arXiv 2205.00119; Zhao et al., "PyTorch FSDP", arXiv
// 2304.11277, section 3.2.2.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "forebay/communicator.h"

namespace forebay {

struct GroupedOptions {
  int group = 1;           // Ranks of one group: consecutive ones of the world. Divides its size.
  bool replicate = false;  // False: whole.
};

// Splits `world`, which must outlive the result and goes on to be used for itself. Collective over it.
//
// Data operations go over the groups and across them; each of the two is a communicator of its own, whose
// operations count in traffic() here and not in the world's. Failure, votes and the other control operations
// are the world's; `exchange`, `barrier`, `send`, `recv` and `split` are among the ranks of this one.
//
// Replicated, the count of a reduce_scatter is a multiple of the number of groups, and each group holds the
// same values in `target` where `first` is false.
//
// Errors: kInvalidArgument when the groups do not divide the world; those of Communicator::split.
Result<std::unique_ptr<Communicator>> create_grouped_communicator(Communicator& world,
                                                                  const GroupedOptions& options);

// What staging_bytes() of such a communicator says, before there is one.
std::size_t grouped_staging_bytes(const GroupedOptions& options, int world_size, std::size_t count,
                                  DataType type);

// Adds the accounts of a communicator of some of `size` ranks, whose rank r is rank_of(r) of them, to `sum`.
void add_operation_traffic(std::vector<OperationTraffic>& sum, const std::vector<OperationTraffic>& part,
                           int size, const std::function<int(int)>& rank_of);

}  // namespace forebay
