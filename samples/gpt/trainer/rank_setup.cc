#include "trainer/rank_setup.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "forebay/cuda_backend.h"
#include "forebay/cuda_devices.h"
#include "forebay/error.h"
#include "forebay/host_backend.h"
#include "forebay/nccl_communicator.h"
#include "model/host_operations.h"

namespace forebay::gpt {
namespace {

// Checks that the first `count` GPUs reach each other's memory: ranks that are threads copy between them.
void check_peers_among(int count) {
  const CudaSystem system = value_or_throw(read_cuda_system());
  for (const CudaDevice& device : system.devices) {
    for (int other = 0; other < count; ++other) {
      if (device.ordinal >= count || other == device.ordinal) continue;
      const std::vector<int>& peers = device.peer_ordinals;
      if (std::find(peers.begin(), peers.end(), other) != peers.end()) continue;
      throw Error(StatusCode::kUnsupported,
                  "cuda:" + std::to_string(other) +
                      " cannot reach the memory of cuda:" + std::to_string(device.ordinal) +
                      ", which ranks on both need; put all on one (--device cuda:0), or name those that do "
                      "reach each other in CUDA_VISIBLE_DEVICES (forebay devices lists peers)");
    }
  }
}

// NCCL refuses two ranks on one GPU, unless NCCL_HOSTID makes them look like ranks of two hosts. Where
// CUDA_VISIBLE_DEVICES may show each process another GPU, NCCL itself has to judge.
void check_a_gpu_each(const DeviceChoice& choice, const LaunchEnvironment& place, int count) {
  const int gpus = choice.ordinal ? 1 : count;
  if (place.local_size <= gpus) return;
  const auto is_set = [](const char* variable) { return std::getenv(variable) != nullptr; };
  if (!place.launcher.empty() && (is_set("NCCL_HOSTID") || is_set("CUDA_VISIBLE_DEVICES"))) return;
  throw Error(StatusCode::kInvalidArgument,
              "--communicator nccl needs a GPU for each rank, because NCCL refuses two on one, and " +
                  std::to_string(place.local_size) + " ranks of this host have " + std::to_string(gpus) +
                  "; start fewer, name no single GPU in --device, or use --communicator local, whose ranks "
                  "share GPUs");
}

// The GPU of a rank: the one that --device names, or the GPUs in turn.
int choose_ordinal(const TrainerOptions& options, const LaunchEnvironment& place) {
  const DeviceChoice& choice = options.device;
  const int count = value_or_throw(CudaBackend::device_count());
  if (count == 0) {
    throw Error(StatusCode::kUnavailable,
                "the CUDA driver shows no GPU; unset CUDA_VISIBLE_DEVICES, or use --device host");
  }
  if (uses_nccl(options.communicator)) {
    check_a_gpu_each(choice, place, count);
    return choice.ordinal.value_or(place.local_rank % count);
  }
  if (choice.ordinal) return *choice.ordinal;
  if (const int used = std::min(count, place.size); used > 1) check_peers_among(used);
  return place.rank % count;
}

// A rank's share of the free memory of this host. A process that takes more may be killed by the kernel.
std::size_t free_memory_share(int local_size) {
  std::ifstream file("/proc/meminfo");
  for (std::string name, rest; file >> name && std::getline(file, rest);) {
    if (name != "MemAvailable:") continue;
    const std::size_t bytes = std::strtoull(rest.c_str(), nullptr, 10) * 1024;
    return std::max<std::size_t>(bytes / static_cast<std::size_t>(local_size), 1);
  }
  return SIZE_MAX;
}

void open_device(const TrainerOptions& options, Rank& rank) {
  if (!options.device.cuda) {
    rank.backend =
        value_or_throw(HostBackend::create({.name = "host of rank " + std::to_string(rank.place.rank),
                                            .memory_bytes = free_memory_share(rank.place.local_size)}));
    return;
  }
  try {
    const int ordinal = choose_ordinal(options, rank.place);
    rank.backend =
        value_or_throw(CudaBackend::create({.ordinal = ordinal, .room_bytes = options.room_bytes}));
    rank.ordinal = ordinal;
  } catch (const Error& error) {
    throw Error(error.status().with_context("--device cuda"));
  }
}

}  // namespace

Rank open_rank(const TrainerOptions& options, const LaunchEnvironment& place, const CommunicatorMaker& make) {
  Rank rank;
  rank.place = place;
  rank.threads =
      options.threads > 0 ? options.threads : std::max(1, default_compute_threads() / place.local_size);
  const auto open = [&] {
    open_device(options, rank);
    rank.kernels = value_or_throw(Kernels::create(*rank.backend, {.thread_count = rank.threads}));
  };
  if (!uses_nccl(options.communicator)) {
    open();
    rank.communicator = value_or_throw(make(*rank.backend, *rank.kernels));
    return rank;
  }
  rank.control_backend =
      value_or_throw(HostBackend::create({.name = "control of rank " + std::to_string(place.rank)}));
  rank.control_kernels = value_or_throw(Kernels::create(*rank.control_backend, {.thread_count = 1}));
  rank.communicator = value_or_throw(make(*rank.control_backend, *rank.control_kernels));
  try {
    open();
  } catch (const Error& error) {
    rank.communicator->abort(error.status().with_context("rank " + std::to_string(place.rank)));
    throw;
  }
  return rank;
}

void go_over_nccl(const TrainerOptions& options, Rank& rank) {
  const Result<NcclLibraryFacts> library = nccl_library(options.nccl_library);
  if (!library.ok()) {
    const Status cause =
        library.status().with_context("--communicator nccl, whose library --nccl-library names");
    rank.communicator->abort(cause.with_context("rank " + std::to_string(rank.place.rank)));
    throw Error(cause);
  }
  if (rank.place.rank == 0 && options.progress) {
    const int version = library.value().version;
    std::fprintf(stderr, "forebay-gpt: NCCL %d.%d.%d from %s\n", version / 10'000, version / 100 % 100,
                 version % 100, library.value().path.c_str());
  }
  rank.communicator = value_or_throw(create_nccl_communicator(
      std::move(rank.communicator), static_cast<CudaBackend&>(*rank.backend), *rank.kernels,
      {.library = options.nccl_library,
       .deadline = std::chrono::seconds(options.deadline_seconds),
       .order = options.fast_order ? NcclOrder::kFast : NcclOrder::kRank}));
}

}  // namespace forebay::gpt
