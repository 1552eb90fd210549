#include "forebay/all_reduce.h"

#include <algorithm>

#include "forebay/units.h"

namespace forebay {
namespace {

constexpr std::uint64_t kAlignment =
    16;  // Alignment of the parts of the staging, for the kernels' vector loads.

// Elements of each rank's slice of a bucket.
std::uint64_t slice_count(int rank_count, std::uint64_t bucket_bytes, DataType type) {
  const std::uint64_t count = bucket_bytes / element_bytes(type);
  return std::max<std::uint64_t>(count / static_cast<std::uint64_t>(rank_count), 1);
}

std::uint64_t bucket_space(int rank_count, std::uint64_t slice, DataType type) {
  return round_up(static_cast<std::uint64_t>(rank_count) * slice * element_bytes(type), kAlignment);
}

// The parts of the staging, and the sum of one bucket through them.
struct Buckets {
  Communicator& communicator;
  Backend& backend;
  Kernels& kernels;
  DataType type;
  Stream stream;
  float* sum;          // One slice.
  std::byte* receive;  // A bucket.
  std::byte* padded;   // A bucket.

  // `data`: a slice for every rank, one after the other.
  Status add(std::byte* data, std::uint64_t slice) const {
    const std::uint64_t slice_bytes = slice * element_bytes(type);
    FOREBAY_RETURN_IF_ERROR(communicator.reduce_scatter({.source = data,
                                                         .source_stride_bytes = slice_bytes,
                                                         .count = slice,
                                                         .type = type,
                                                         .receive = receive,
                                                         .target = sum,
                                                         .first = true},
                                                        stream));
    const std::byte* rounded = reinterpret_cast<const std::byte*>(sum);
    if (type != DataType::kFloat32) {
      FOREBAY_RETURN_IF_ERROR(kernels.cast({.source = sum,
                                            .target = receive,
                                            .count = slice,
                                            .source_type = DataType::kFloat32,
                                            .target_type = type},
                                           stream));
      rounded = receive;
    }
    return communicator.all_gather(
        {.source = rounded, .target = data, .target_stride_bytes = slice_bytes, .bytes = slice_bytes},
        stream);
  }

  // `count` elements that are not a whole number of slices.
  Status add_padded(std::byte* data, std::uint64_t count) const {
    const auto ranks = static_cast<std::uint64_t>(communicator.size());
    const std::uint64_t slice = ceil_div(count, ranks);
    const std::uint64_t bytes = count * element_bytes(type);
    FOREBAY_RETURN_IF_ERROR(backend.copy_async(padded, data, bytes, stream));
    FOREBAY_RETURN_IF_ERROR(
        backend.fill_async(padded + bytes, 0, ranks * slice * element_bytes(type) - bytes, stream));
    FOREBAY_RETURN_IF_ERROR(add(padded, slice));
    return backend.copy_async(data, padded, bytes, stream);
  }
};

}  // namespace

std::uint64_t all_reduce_staging_bytes(int rank_count, std::uint64_t bucket_bytes, DataType type) noexcept {
  if (rank_count == 1) return 0;
  const std::uint64_t slice = slice_count(rank_count, bucket_bytes, type);
  return round_up(slice * sizeof(float), kAlignment) + 2 * bucket_space(rank_count, slice, type);
}

std::uint64_t all_reduce_sent_bytes(int rank_count, std::uint64_t bucket_bytes, DataType type,
                                    std::uint64_t count) noexcept {
  if (rank_count == 1) return 0;
  const auto ranks = static_cast<std::uint64_t>(rank_count);
  const std::uint64_t slice = slice_count(rank_count, bucket_bytes, type);
  const std::uint64_t full = count / (ranks * slice);
  // Each rank sends a slice to every other rank to be added, and then its sum.
  return 2 * (ranks - 1) * (full * slice + ceil_div(count % (ranks * slice), ranks)) * element_bytes(type);
}

Status all_reduce(Communicator& communicator, Backend& backend, Kernels& kernels, const AllReduceArguments& a,
                  Stream stream) {
  if (communicator.size() == 1) return communicator.status();
  const auto ranks = static_cast<std::uint64_t>(communicator.size());
  const std::uint64_t slice = slice_count(communicator.size(), a.bucket_bytes, a.type);
  std::byte* const receive = a.staging + round_up(slice * sizeof(float), kAlignment);
  const Buckets buckets{.communicator = communicator,
                        .backend = backend,
                        .kernels = kernels,
                        .type = a.type,
                        .stream = stream,
                        .sum = reinterpret_cast<float*>(a.staging),
                        .receive = receive,
                        .padded = receive + bucket_space(communicator.size(), slice, a.type)};
  for (std::uint64_t done = 0; done < a.count;) {
    const std::uint64_t count = std::min(ranks * slice, a.count - done);
    std::byte* const data = a.data + done * element_bytes(a.type);
    FOREBAY_RETURN_IF_ERROR(count % ranks == 0 ? buckets.add(data, count / ranks)
                                               : buckets.add_padded(data, count));
    done += count;
  }
  return {};
}

}  // namespace forebay
