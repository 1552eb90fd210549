#include "model/tensor_group.h"

#include "forebay/all_reduce.h"
#include "forebay/error.h"

namespace forebay::gpt {

TensorPart TensorGroup::part() const {
  if (options_.communicator == nullptr) return {};
  return {static_cast<std::size_t>(options_.communicator->rank()),
          static_cast<std::size_t>(options_.communicator->size())};
}

std::size_t TensorGroup::staging_bytes() const {
  return all_reduce_staging_bytes(static_cast<int>(part().size), options_.bucket_bytes, DataType::kFloat32);
}

void TensorGroup::all_reduce(float* data, std::size_t count, std::byte* staging) {
  if (is_alone()) return;
  throw_if_error(forebay::all_reduce(*options_.communicator, *options_.backend, *options_.kernels,
                                     {.data = reinterpret_cast<std::byte*>(data),
                                      .count = count,
                                      .type = DataType::kFloat32,
                                      .staging = staging,
                                      .bucket_bytes = options_.bucket_bytes},
                                     options_.stream));
}

void TensorGroup::all_gather(std::byte* data, std::size_t bytes) {
  if (is_alone()) return;
  throw_if_error(options_.communicator->all_gather(
      {.source = data + part().rank * bytes, .target = data, .target_stride_bytes = bytes, .bytes = bytes},
      options_.stream));
}

}  // namespace forebay::gpt
