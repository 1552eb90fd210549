// GroupedCommunicator: reductions in two levels, first within all-reduce groups of consecutive ranks, then
// across the groups. This is the order "group(g)": a slice is added up within each group in rank order in
// fp32, and the sums of the groups are added in the order of the groups, in fp32 again.
//
// Where a group is a host, most bytes stay inside it: between hosts travels one partial sum for each group
// instead of one contribution for each rank. A partial sum is fp32 for every type of contributions.
//
// Two layouts of the result:
// - whole: one slice for every rank of the world, as without groups. The ranks are those of the world.
// - replicated (hybrid sharding): one slice for every rank of a group, the same in all groups. The ranks are
//   those of the group; sums still run over the whole world.
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
  int group = 1;           // Ranks of one all-reduce group. Divides the size of the world.
  bool replicate = false;  // True: replicated. False: whole.
};

// Splits `world`, which can still be used for itself.
//
// Data operations go within the groups and across them, over two communicators. Their operations count in the
// traffic() of the result and not in that of the world. Failure and votes are those of the world; `exchange`,
// `barrier`, `send`, `recv` and `split` run among the ranks of the result.
//
// Order:    collective over `world`; blocks.
// Requires: `world` outlives the result. Replicated: the count of a reduce_scatter is a multiple of the
//           number of groups, and where `first` is false, `target` holds the same values in each group.
// Errors:   kInvalidArgument when the group size does not divide the world; those of Communicator::split.
Result<std::unique_ptr<Communicator>> create_grouped_communicator(Communicator& world,
                                                                  const GroupedOptions& options);

// The staging_bytes() of such a communicator, before there is one.
std::size_t grouped_staging_bytes(const GroupedOptions& options, int world_size, std::size_t count,
                                  DataType type);

// Adds the accounts `part` of one communicator to the accounts `sum` of a larger one, which has `size` ranks:
// rank r of the one is rank rank_of(r) of the other.
void add_operation_traffic(std::vector<OperationTraffic>& sum, const std::vector<OperationTraffic>& part,
                           int size, const std::function<int(int)>& rank_of);

}  // namespace forebay
