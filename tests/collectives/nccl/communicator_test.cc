// The conformance suite over NCCL: the fake one, on a GPU for each rank, and on one that all share with
// operations of different streams in any order and NCCL answering "in progress".
#include "tests/collectives/nccl/world.h"

namespace forebay::testing {
namespace {

CommunicatorFactory factory(const std::string& name, const NcclWorldOptions& options) {
  return {name, "", [options](int size, std::chrono::milliseconds deadline) {
            return std::make_unique<NcclWorld>(size, deadline, options);
          }};
}

NcclWorldOptions a_gpu_each() {
  NcclWorldOptions options;
  options.gpu = gpus(4);
  return options;
}

NcclWorldOptions one_reordering_gpu() {
  NcclWorldOptions options;
  options.gpu.seed = test_seed();
  options.nccl.shared_gpu = true;
  options.nccl.in_progress = 3;
  return options;
}

INSTANTIATE_TEST_SUITE_P(Nccl, CommunicatorConformance,
                         ::testing::Combine(::testing::Values(factory("a_gpu_each", a_gpu_each()),
                                                              factory("one_reordering_gpu",
                                                                      one_reordering_gpu())),
                                            ::testing::Values(1, 2, 3, 4)),
                         conformance_name);

}  // namespace
}  // namespace forebay::testing
