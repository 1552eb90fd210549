#include "runtime/command/machine/tier_measurement.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "forebay/block_runner.h"
#include "forebay/host_adam.h"
#include "forebay/pinned_pool.h"
#include "forebay/run_on_threads.h"
#include "forebay/thread_binding.h"
#include "forebay/units.h"
#include "runtime/command/machine/measured_update.h"

namespace forebay {
namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned kDepths[] = {1, 2, 4, 8, 16, 32};
constexpr std::size_t kBlockBytes[] = {256 << 10, 1 << 20, 4 << 20};

// The fewest rounds a median is taken of. Fewer: one interruption decides. More: a slow machine takes long.
constexpr int kRoundsMin = 3;

// Elements of the triad that one thread does at a time. Fewer: more of the scheduling is measured. More: the
// last thread is waited for.
constexpr std::size_t kTriadBlock = 64 << 10;

Status with_advice(const Status& status, const char* action) {
  if (status.code() != StatusCode::kOutOfMemory) return status.with_context(action);
  return Status(status.code(), std::string(action) + ": " + status.message() + "; use a smaller --bytes");
}

// The seconds of the median round of `work`, after one that is not counted.
template <typename Work>
Result<double> median_seconds(std::chrono::nanoseconds duration, const Work& work) {
  FOREBAY_RETURN_IF_ERROR(work());
  std::vector<double> seconds;
  const Clock::time_point begin = Clock::now();
  while (static_cast<int>(seconds.size()) < kRoundsMin || Clock::now() - begin < duration) {
    const Clock::time_point round = Clock::now();
    FOREBAY_RETURN_IF_ERROR(work());
    seconds.push_back(std::max(std::chrono::duration<double>(Clock::now() - round).count(), 1e-9));
  }
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

// Two device blocks and two streams; the pinned side is the pool's.
class CopyBench {
 public:
  explicit CopyBench(Backend& backend) : backend_(backend) {}
  CopyBench(const CopyBench&) = delete;
  CopyBench& operator=(const CopyBench&) = delete;
  // Giving back reports for itself.
  ~CopyBench() {
    for (const Stream stream : streams_) {
      if (stream.handle != nullptr) static_cast<void>(backend_.stream_destroy(stream));
    }
    for (const DevicePtr block : device_) {
      if (block != nullptr) static_cast<void>(backend_.free(block));
    }
  }

  Status allocate(const Placement& placement, std::uint64_t bytes) {
    bytes_ = bytes;
    FOREBAY_ASSIGN_OR_RETURN(
        pool_, PinnedPool::create(backend_, {.slab_bytes = 1, .numa_node = placement.memory_node}));
    for (int i = 0; i < 2; ++i) {
      FOREBAY_ASSIGN_OR_RETURN(device_[i], backend_.alloc(bytes));
      FOREBAY_ASSIGN_OR_RETURN(host_[i], pool_->allocate(bytes));
      std::memset(host_[i], 0x5A, bytes);
      FOREBAY_ASSIGN_OR_RETURN(streams_[i], backend_.stream_create());
    }
    return Status();
  }

  Status copy(bool to_device, bool from_device) const {
    if (to_device) FOREBAY_RETURN_IF_ERROR(backend_.copy_async(device_[0], host_[0], bytes_, streams_[0]));
    if (from_device) FOREBAY_RETURN_IF_ERROR(backend_.copy_async(host_[1], device_[1], bytes_, streams_[1]));
    if (to_device) FOREBAY_RETURN_IF_ERROR(backend_.stream_synchronize(streams_[0]));
    return from_device ? backend_.stream_synchronize(streams_[1]) : Status();
  }

 private:
  Backend& backend_;
  std::unique_ptr<PinnedPool> pool_;
  std::uint64_t bytes_ = 0;
  DevicePtr device_[2] = {};
  std::byte* host_[2] = {};
  Stream streams_[2];
};

// The threads of one NUMA node, and its part of the memory.
struct NodeBench {
  std::unique_ptr<BlockRunner> runner;
  std::byte* memory = nullptr;
  std::size_t bytes = 0;
};

// The sum of elements_per_second(node) over all nodes, measured at the same time.
template <typename Measure>
Result<double> on_all_nodes(const std::vector<NodeBench>& nodes, const Measure& elements_per_second) {
  std::mutex mutex;
  double sum = 0;
  Status failed;
  const auto measure = [&](int index) {
    const Result<double> rate = elements_per_second(nodes[static_cast<std::size_t>(index)]);
    const std::lock_guard lock(mutex);
    if (rate.ok()) sum += rate.value();
    if (failed.ok()) failed = rate.status();
  };
  FOREBAY_RETURN_IF_ERROR(internal::run_on_threads(static_cast<int>(nodes.size()), measure));
  if (!failed.ok()) return failed;
  return sum;
}

Result<double> triad_rate(const NodeBench& node, std::chrono::nanoseconds duration) {
  const std::size_t count = node.bytes / (3 * sizeof(double));
  double* const a = reinterpret_cast<double*>(node.memory);
  const double* const b = a + count;
  const double* const c = a + 2 * count;
  const auto seconds = median_seconds(duration, [&] {
    node.runner->run(count, kTriadBlock, [=](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) a[i] = b[i] + 3.0 * c[i];
    });
    return Status();
  });
  FOREBAY_RETURN_IF_ERROR(seconds.status());
  return static_cast<double>(count) / seconds.value();
}

Result<double> adamw_rate(const NodeBench& node, DataType dtype, std::chrono::nanoseconds duration) {
  const std::size_t state_bytes = 3 * sizeof(float);
  // Whole pages of elements, so that every array begins where the kernels like it.
  constexpr std::size_t kGranule = 4096;
  const std::size_t count = node.bytes / (state_bytes + element_bytes(dtype)) / kGranule * kGranule;
  auto* const states = reinterpret_cast<float*>(node.memory);
  HostAdamArguments step{};
  step.update = measured_update(states, states + 3 * count, count, dtype);
  step.moments = {MomentFormat::kFloat32, step.update.m, step.update.v, nullptr, nullptr};
  std::memset(node.memory, 0, count * (state_bytes + element_bytes(dtype)));
  const auto seconds = median_seconds(duration, [&] { return host_adam(step, *node.runner); });
  FOREBAY_RETURN_IF_ERROR(seconds.status());
  return static_cast<double>(count) / seconds.value();
}

Result<std::uint64_t> free_bytes_of(const std::string& directory) {
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(directory, error);
  if (!error) return space.available;
  return Status(StatusCode::kIoError, "cannot ask how much room there is in '" + directory +
                                          "': " + error.message() + "; name another directory");
}

FileStoreOptions store_options(const FileMeasurement& files) {
  FileStoreOptions options;
  for (const DirectoryFacts& one : files.directories) options.directories.push_back(one.path);
  return options;
}

}  // namespace

Result<CopyMeasurement> measure_copies(Backend& backend, const Placement& placement, std::uint64_t bytes,
                                       std::chrono::nanoseconds duration, const Progress& progress) {
  // Streams of a host backend are threads, which begin where this one is. Where that is refused, they are
  // anywhere.
  std::optional<ThreadBinding> bound;
  if (auto made = ThreadBinding::create(placement.processors); made.ok())
    bound.emplace(std::move(made).value());
  CopyBench bench(backend);
  if (const Status status = bench.allocate(placement, bytes); !status.ok())
    return with_advice(status, "memory for copies");
  const auto rate = [&](bool to_device, bool from_device) -> Result<double> {
    const auto seconds = median_seconds(duration / 3, [&] { return bench.copy(to_device, from_device); });
    FOREBAY_RETURN_IF_ERROR(seconds.status());
    return static_cast<double>(bytes) * (to_device && from_device ? 2 : 1) / seconds.value();
  };
  progress("copies from pinned memory to the device");
  FOREBAY_ASSIGN_OR_RETURN(const double to_device, rate(true, false));
  progress("copies from the device to pinned memory");
  FOREBAY_ASSIGN_OR_RETURN(const double from_device, rate(false, true));
  progress("copies both ways at once");
  FOREBAY_ASSIGN_OR_RETURN(const double both, rate(true, true));
  return CopyMeasurement{to_device, from_device, both};
}

Result<HostMeasurement> measure_host(Backend& backend, const Topology& topology, DataType dtype,
                                     std::uint64_t bytes, std::chrono::nanoseconds duration,
                                     const Progress& progress) {
  std::vector<const NumaNode*> used;
  std::size_t core_count = 0;
  for (const NumaNode& node : topology.nodes) {
    if (node.cores.empty()) continue;
    used.push_back(&node);
    core_count += node.cores.size();
  }
  HostMeasurement measured;
  measured.node_count = static_cast<int>(used.size());
  std::vector<std::unique_ptr<PinnedPool>> pools;
  std::vector<NodeBench> nodes;
  for (const NumaNode* node : used) {
    std::vector<int> cores;
    for (const std::vector<int>& core : node->cores) cores.push_back(core.front());
    if (topology.processor_quota) {
      const double part = static_cast<double>(cores.size()) / static_cast<double>(core_count);
      const auto worth =
          static_cast<std::size_t>(std::max(std::floor(*topology.processor_quota * part), 1.0));
      if (cores.size() > worth) cores.resize(worth);
    }
    FOREBAY_ASSIGN_OR_RETURN(auto runner, BlockRunner::create_on(cores));
    FOREBAY_ASSIGN_OR_RETURN(
        auto pool,
        PinnedPool::create(backend, {.slab_bytes = 1,
                                     .numa_node = used.size() > 1 && node->memory_usable ? node->node : -1}));
    pools.push_back(std::move(pool));
    NodeBench bench;
    bench.bytes = 3 * (bytes / used.size());
    bench.runner = std::move(runner);
    measured.thread_count += bench.runner->thread_count();
    Result<std::byte*> memory = pools.back()->allocate(bench.bytes);
    if (!memory.ok()) return with_advice(memory.status(), "memory for the host's measurements");
    bench.memory = memory.value();
    std::memset(bench.memory, 0, bench.bytes);
    nodes.push_back(std::move(bench));
  }
  progress("the host's memory");
  const Result<double> triad =
      on_all_nodes(nodes, [&](const NodeBench& node) { return triad_rate(node, duration / 2); });
  FOREBAY_RETURN_IF_ERROR(triad.status());
  progress("the host's AdamW step");
  const Result<double> adamw =
      on_all_nodes(nodes, [&](const NodeBench& node) { return adamw_rate(node, dtype, duration / 2); });
  FOREBAY_RETURN_IF_ERROR(adamw.status());
  measured.triad_bytes_per_second = 3 * sizeof(double) * triad.value();
  measured.adamw_elements_per_second = adamw.value();
  measured.adamw_bytes_per_element =
      6 * sizeof(float) + (dtype == DataType::kFloat32 ? 1 : 2) * element_bytes(dtype);
  return measured;
}

Result<FileMeasurement> prepare_files(const Topology& topology, const std::vector<std::string>& directories,
                                      std::uint64_t bytes) {
  FileMeasurement files;
  for (const std::string& directory : directories) {
    FOREBAY_ASSIGN_OR_RETURN(auto facts, locate_directory(topology, directory));
    files.directories.push_back(std::move(facts));
    FOREBAY_ASSIGN_OR_RETURN(const std::uint64_t room, free_bytes_of(directory));
    const std::uint64_t all = room * directories.size();
    files.free_bytes = files.directories.size() == 1 ? all : std::min(files.free_bytes, all);
    if (room < bytes / directories.size()) {
      return Status(StatusCode::kOutOfMemory,
                    "too little room in '" + directory + "': " + format_bytes(bytes / directories.size()) +
                        " are needed there and " + format_bytes(room) +
                        " are free; free some, name another directory, or use a smaller --bytes");
    }
  }
  // Makes a file of that size for a moment, so that a refusal comes before anything is measured.
  FOREBAY_ASSIGN_OR_RETURN(auto store, make_file_store(store_options(files)));
  files.is_direct = store->facts().alignment_bytes > 1;
  const Status made = store->create_range("trial", bytes).status();
  if (!made.ok()) return with_advice(made, "a scratch file for the measurement");
  return files;
}

Status measure_files(std::uint64_t bytes, std::chrono::nanoseconds duration, const Progress& progress,
                     FileMeasurement* files) {
  const FileStoreOptions options = store_options(*files);
  std::string names;
  for (const std::string& directory : options.directories)
    names += (names.empty() ? "" : " and ") + directory;
  for (const std::size_t block_bytes : kBlockBytes) {
    StoreMeasurementOptions measured;
    measured.block_bytes = {block_bytes};
    measured.depths.clear();
    for (const unsigned depth : kDepths) {
      // More in flight than there is to move would be another depth.
      if (depth * block_bytes <= bytes) measured.depths.push_back(depth);
    }
    if (measured.depths.empty()) continue;
    measured.range_bytes = bytes;
    measured.duration =
        std::chrono::duration_cast<std::chrono::milliseconds>(duration / std::size(kBlockBytes));
    progress("files in " + names + ", blocks of " + format_bytes(block_bytes));
    FOREBAY_ASSIGN_OR_RETURN(auto result, measure_file_store(options, measured));
    files->store.description = result.description;
    for (const StoreMeasurementPoint& point : result.points) files->store.points.push_back(point);
  }
  files->store.chosen = choose_point(files->store.points);
  return Status();
}

}  // namespace forebay
