// bucket_auto: how large a bucket is, from measurements.
//
// A collective over b bytes takes a latency and b over a bandwidth. Two sizes give both, and the bucket is
// such that the latency is a twentieth of the whole: larger ones gain little and take memory.

#include <algorithm>
#include <bit>
#include <chrono>

#include "forebay/units.h"
#include "runtime/engine/engine_impl.h"

namespace forebay {
namespace {

constexpr std::uint64_t kBucketBytesMin = 256u << 10;
constexpr std::uint64_t kBucketBytesMax = 64u << 20;
// Large enough for the bandwidth to show, small enough for a moment and for any device.
constexpr std::uint64_t kLargeBytes = 4u << 20;
constexpr int kRepetitions = 5;
constexpr double kTransfersPerLatency = 19;
constexpr std::uint64_t kAlignment = 512;

}  // namespace

// Device memory and a stream, for as long as it measures.
struct Engine::Impl::BucketProbe {
  explicit BucketProbe(Impl& impl_in) : impl(impl_in) {}
  // Room for slices of `count` elements. What has been taken when this throws is given back at the end.
  void open(std::uint64_t count) {
    const std::uint64_t bucket =
        round_up(count * static_cast<std::uint64_t>(impl.shards()) * impl.element(), kAlignment);
    const std::uint64_t received =
        round_up(impl.sharded().staging_bytes(count, impl.options.dtype), kAlignment);
    stream = value_or_throw(impl.backend.stream_create());
    memory = value_or_throw(impl.backend.alloc(bucket + received + count * sizeof(float)));
    receive = memory + bucket;
    target = reinterpret_cast<float*>(receive + received);
    throw_if_error(impl.backend.fill_async(memory, 0, bucket + received + count * sizeof(float), stream));
    throw_if_error(impl.backend.stream_synchronize(stream));
  }
  ~BucketProbe() {
    if (stream.handle != nullptr) {
      static_cast<void>(impl.backend.stream_synchronize(stream));
      static_cast<void>(impl.backend.stream_destroy(stream));
    }
    if (memory != nullptr) static_cast<void>(impl.backend.free(memory));
  }
  BucketProbe(const BucketProbe&) = delete;
  BucketProbe& operator=(const BucketProbe&) = delete;

  // Seconds of a reduce_scatter of slices of `count` elements: the fastest of a few, after one that is not
  // counted.
  double seconds_of(std::uint64_t count) {
    double best = 0;
    for (int i = 0; i <= kRepetitions; ++i) {
      impl.must(impl.communicator.barrier());
      const std::chrono::nanoseconds begin = impl.now();
      impl.must(impl.sharded().reduce_scatter({.source = memory,
                                               .source_stride_bytes = count * impl.element(),
                                               .count = count,
                                               .type = impl.options.dtype,
                                               .receive = receive,
                                               .target = target,
                                               .first = true},
                                              stream));
      impl.must(impl.backend.stream_synchronize(stream));
      impl.must(impl.communicator.status());
      const double seconds = std::chrono::duration<double>(impl.now() - begin).count();
      if (i == 1 || (i > 1 && seconds < best)) best = seconds;
    }
    return best;
  }

  Impl& impl;
  Stream stream;
  DevicePtr memory = nullptr;
  std::byte* receive = nullptr;
  float* target = nullptr;
};

std::uint64_t Engine::Impl::choose_bucket_bytes() {
  const std::uint64_t per_column = static_cast<std::uint64_t>(shards()) * element();
  const std::uint64_t small = static_cast<std::uint64_t>(replicas()) * kLeafCount;
  const std::uint64_t large = std::max<std::uint64_t>(kLargeBytes / per_column / small, 2) * small;
  BucketProbe probe(*this);
  Status ready;
  try {
    probe.open(large);
  } catch (const Error& error) {
    ready = error.status();
  }
  agree(ready);
  const double small_seconds = probe.seconds_of(small);
  const double large_seconds = probe.seconds_of(large);
  WireSpeed mine;
  mine.bytes_per_second =
      static_cast<double>((large - small) * per_column) / std::max(large_seconds - small_seconds, 1e-9);
  mine.latency_seconds =
      std::max(small_seconds - static_cast<double>(small * per_column) / mine.bytes_per_second, 0.0);
  std::vector<WireSpeed> all(static_cast<std::size_t>(ranks()));
  must(communicator.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all))));
  wire_speed = all[0];  // Rank 0's, so that every rank chooses the same.
  const double wanted = kTransfersPerLatency * wire_speed.latency_seconds * wire_speed.bytes_per_second;
  const auto bytes = static_cast<std::uint64_t>(
      std::clamp(wanted, static_cast<double>(kBucketBytesMin), static_cast<double>(kBucketBytesMax)));
  return std::min(std::bit_ceil(bytes), kBucketBytesMax);
}

}  // namespace forebay
