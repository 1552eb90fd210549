#include "forebay/host_gradients.h"

#include "kernels/argument_checks.h"
#include "kernels/definitions.h"
#include "kernels/float_environment.h"
#include "kernels/host_kernels.h"

namespace forebay {
namespace {

// As in host_module.cc.
constexpr std::size_t kBlockCount = 65536;

}  // namespace

void host_accumulate(const float* source, float* target, std::size_t count, bool first,
                     const BlockRunner& runner) {
  AccumulateArguments arguments{};
  arguments.own = source;
  arguments.target = target;
  arguments.count = count;
  arguments.rank_count = 1;
  arguments.type = DataType::kFloat32;
  arguments.first = first;
  runner.run(count, kBlockCount, [&](std::size_t begin, std::size_t end) {
    host_kernels::simd_kernels().accumulate(arguments, begin, end);
  });
}

Status host_accumulate(const AccumulateArguments& arguments) {
  FOREBAY_RETURN_IF_ERROR(check_arguments(arguments));
  const DefaultFloatEnvironment environment;
  host_kernels::simd_kernels().accumulate(arguments, 0, arguments.count);
  return Status();
}

Status host_scale(const ScaleArguments& arguments, const BlockRunner& runner) {
  FOREBAY_RETURN_IF_ERROR(check_arguments(arguments));
  runner.run(arguments.count, kBlockCount, [&](std::size_t begin, std::size_t end) {
    host_kernels::simd_kernels().scale(arguments, begin, end);
  });
  return Status();
}

Status host_norm(const NormArguments& arguments, const BlockRunner& runner) {
  FOREBAY_RETURN_IF_ERROR(check_arguments(arguments));
  const std::size_t leaf_count = arguments.count / kLeafCount;
  runner.run(leaf_count, kBlockCount / kLeafCount, [&](std::size_t begin, std::size_t end) {
    host_kernels::simd_kernels().norm_leaves(arguments, begin, end);
  });
  const DefaultFloatEnvironment environment;
  *arguments.result = definitions::canonical_double(pairwise_sum(arguments.scratch, leaf_count));
  return Status();
}

}  // namespace forebay
