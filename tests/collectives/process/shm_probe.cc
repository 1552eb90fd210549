// A rank for shm_process_test to start, and to kill: joins over shm as its environment says, prints "ready"
// once all have, and then does one thing:
//
//   exchange | reduce_scatter | all_gather | idle
//                    until that fails; prints "lost: " or "failed: " and the cause, ends with 7
//   bits SEED        a random series of collectives, each compared with the definition
//   mismatch         rank 1 gathers where the others reduce, and so on as above
//   late DEADLINE_MS the last rank stops itself; the others wait for it
//   leave            leaves in order; ends with 0 if nothing failed
//   place            joins over shm or Gloo, as the ranks' places allow; prints which
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "forebay/bootstrap.h"
#include "forebay/error.h"
#include "forebay/host_backend.h"
#include "forebay/process_communicator.h"
#include "forebay/shm_communicator.h"
#include "tests/support/elements.h"
#include "tests/support/let_others_run.h"

namespace forebay {
namespace {

using testing::load;
using testing::mix;
using testing::round_to;
using testing::store;

constexpr int kFailedExit = 7;
constexpr int kWrongBitsExit = 8;
constexpr std::size_t kElements = 512 * 1024;  // Several rounds.

class Rank {
 public:
  Rank(std::unique_ptr<HostBackend> backend, std::unique_ptr<Communicator> communicator)
      : backend_(std::move(backend)),
        communicator_(std::move(communicator)),
        stream_(value_or_throw(backend_->stream_create())) {}
  ~Rank() {
    communicator_.reset();
    static_cast<void>(backend_->stream_destroy(stream_));
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  Communicator& communicator() { return *communicator_; }
  int rank() const { return communicator_->rank(); }
  std::size_t size() const { return static_cast<std::size_t>(communicator_->size()); }

  // Ordinary memory is host memory, and so the host backend's device memory.
  Status reduce_scatter(const std::byte* source, std::size_t stride, std::size_t count, DataType type,
                        float* target, bool first) {
    std::byte unused{};
    FOREBAY_RETURN_IF_ERROR(communicator_->reduce_scatter({.source = source,
                                                           .source_stride_bytes = stride,
                                                           .count = count,
                                                           .type = type,
                                                           .receive = &unused,
                                                           .target = target,
                                                           .first = first},
                                                          stream_));
    return finish();
  }
  Status all_gather(const std::byte* source, std::byte* target, std::size_t stride, std::size_t bytes) {
    FOREBAY_RETURN_IF_ERROR(communicator_->all_gather(
        {.source = source, .target = target, .target_stride_bytes = stride, .bytes = bytes}, stream_));
    return finish();
  }

 private:
  Status finish() {
    throw_if_error(backend_->stream_synchronize(stream_));
    return communicator_->status();
  }

  const std::unique_ptr<HostBackend> backend_;
  std::unique_ptr<Communicator> communicator_;
  const Stream stream_;
};

Status until_failed(const std::string& operation, Rank& rank) {
  std::vector<std::byte> small(4096);
  std::vector<std::byte> all(small.size() * rank.size());
  std::vector<float> source(kElements * rank.size());
  std::vector<float> target(kElements * rank.size());
  Status status;
  while (status.ok()) {
    if (operation == "exchange") {
      status = rank.communicator().exchange(small, all);
    } else if (operation == "reduce_scatter") {
      status = rank.reduce_scatter(reinterpret_cast<const std::byte*>(source.data()), kElements * 4,
                                   kElements, DataType::kFloat32, target.data(), true);
    } else if (operation == "all_gather") {
      status = rank.all_gather(reinterpret_cast<const std::byte*>(source.data()),
                               reinterpret_cast<std::byte*>(target.data()), kElements * 4, kElements * 4);
    } else {
      testing::let_others_run();
      status = rank.communicator().status();
    }
  }
  return status;
}

float value_of(DataType type, std::uint64_t seed, int rank, std::size_t i) {
  const std::uint64_t x = mix(seed + static_cast<std::uint64_t>(rank) * 1'000'003 + i);
  return round_to(type, static_cast<float>(static_cast<std::int64_t>(x) >> 20) * 0x1p-30f);
}

// All ranks draw the same series; every element of every result is compared.
bool has_right_bits(Rank& rank, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](std::size_t first, std::size_t last) {
    return std::uniform_int_distribution<std::size_t>(first, last)(random);
  };
  for (const DataType type : {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16}) {
    for (const std::size_t most : {std::size_t{7}, std::size_t{60'000}, std::size_t{700'000}}) {
      const std::size_t count = pick(1, most);
      const std::size_t offset = pick(0, 17);
      const bool first = pick(0, 1) == 1;
      const std::uint64_t values = random();
      const std::size_t stride = count + pick(0, 5);
      const std::size_t element = element_bytes(type);
      std::vector<std::byte> source((offset + stride * rank.size()) * element);
      for (std::size_t i = 0; i < stride * rank.size(); ++i)
        store(type, source.data(), offset + i, value_of(type, values, rank.rank(), i));
      std::vector<float> sums(count + offset, 0.375f);
      throw_if_error(rank.reduce_scatter(source.data() + offset * element, stride * element, count, type,
                                         sums.data() + offset, first));
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t index = static_cast<std::size_t>(rank.rank()) * stride + i;
        float sum = value_of(type, values, 0, index);
        for (std::size_t r = 1; r < rank.size(); ++r)
          sum += value_of(type, values, static_cast<int>(r), index);
        if (!first) sum = 0.375f + sum;
        if (std::memcmp(&sum, &sums[offset + i], sizeof(sum)) != 0) return false;
      }
      std::vector<float> gathered(stride * rank.size());
      throw_if_error(rank.all_gather(reinterpret_cast<const std::byte*>(sums.data() + offset),
                                     reinterpret_cast<std::byte*>(gathered.data()), stride * 4, count * 4));
      for (std::size_t r = 0; r < rank.size(); ++r) {
        float sum = value_of(type, values, 0, r * stride);
        for (std::size_t other = 1; other < rank.size(); ++other)
          sum += value_of(type, values, static_cast<int>(other), r * stride);
        if (!first) sum = 0.375f + sum;
        if (std::memcmp(&sum, &gathered[r * stride], sizeof(sum)) != 0) return false;
      }
    }
  }
  return true;
}

int run(const std::vector<std::string>& arguments) {
  const LaunchEnvironment environment = value_or_throw(read_launch_environment());
  ShmOptions options{.rank = environment.rank, .size = environment.size, .store = environment.store};
  const std::string& mode = arguments[0];
  if (mode == "late") options.deadline = std::chrono::milliseconds(std::atoi(arguments[1].c_str()));
  std::unique_ptr<HostBackend> backend = value_or_throw(HostBackend::create({}));
  if (mode == "place") {
    options.interface = environment.interface;
    const auto placed = value_or_throw(create_process_communicator(options, *backend));
    throw_if_error(placed->barrier());
    std::printf("%s\n", placed->name());
    return 0;
  }
  std::unique_ptr<Communicator> communicator = value_or_throw(create_shm_communicator(options, *backend));
  throw_if_error(communicator->barrier());
  Rank rank(std::move(backend), std::move(communicator));
  std::printf("ready\n");
  std::fflush(stdout);
  if (mode == "leave") return rank.communicator().status().ok() ? 0 : kFailedExit;
  if (mode == "bits") {
    if (!has_right_bits(rank, std::strtoull(arguments[1].c_str(), nullptr, 10))) return kWrongBitsExit;
    throw_if_error(rank.communicator().barrier());
    return 0;
  }
  if (mode == "late" && rank.rank() == environment.size - 1) raise(SIGSTOP);
  Status status;
  if (mode == "late") {
    status = until_failed("exchange", rank);
  } else if (mode == "mismatch") {
    status = until_failed(rank.rank() == 1 ? "all_gather" : "reduce_scatter", rank);
  } else {
    status = until_failed(mode, rank);
  }
  std::printf("%s: %s\n", status.code() == StatusCode::kPeerLost ? "lost" : "failed",
              status.message().c_str());
  return kFailedExit;
}

}  // namespace
}  // namespace forebay

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.empty()) return 98;
  try {
    return forebay::run(arguments);
  } catch (const std::exception& error) {
    std::printf("failed: %s\n", error.what());
    return 99;
  }
}
