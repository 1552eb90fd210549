// Compares the CUDA kernels with the memory bandwidth of the device: each beside a large device-to-device
// copy of the same run.
//
//   cuda_kernels_bench [--elements N] [--rounds N] [--device N] [--memory KIND] [--json FILE]
//                                                                              default 268435456 15 0 plain
//
// KIND of the arrays: plain, as cuMemAlloc gives; small, mapped chunks of 2 MiB; large, mapped chunks of 1
// GiB; stitched, second mappings of chunks of 2 MiB in a mixed order, as the arena joins free chunks.
//
// Method: all rows run interleaved, A B C ... A B C ..., after one untimed round. A round queues enough
// launches to take about 20 ms, waits for all and divides the time by their number. A figure is the median of
// the rounds; a ratio is the median of the rounds' ratios. GB/s counts the bytes that the formula reads and
// writes; a copy reads and writes each byte.
//
// It needs a CUDA device; without one it says so and exits with 77.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "forebay/cuda_backend.h"
#include "forebay/kernels.h"

namespace forebay {
namespace {

constexpr int kCannotRun = 77;
constexpr double kBatchSeconds = 0.02;  // Shorter: the time to queue shows. Longer: no benefit.
constexpr int kLargestBatch = 512;      // The launches that a stream's queue takes without waiting.

struct Options {
  std::size_t elements = std::size_t{1} << 28;
  int rounds = 15;
  int device = 0;
  std::string memory = "plain";
  std::string json;
};

constexpr std::size_t kSmallChunk = std::size_t{2} << 20, kLargeChunk = std::size_t{1} << 30;
constexpr std::size_t kStitchStride = 7;  // Neighbours in the second mapping lie so many chunks apart.

struct Row {
  const char* name;
  double bytes;  // Bytes of one launch, by the formula.
  std::function<Status()> queue;
  int batch = 1;
  std::vector<double> seconds = {};
  std::vector<double> ratios = {};
};

void must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "cuda_kernels_bench: %s\n", status.to_string().c_str());
  std::exit(1);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Seconds of one launch of a row.
double measure(Backend& backend, Stream stream, const Row& row) {
  must(backend.stream_synchronize(stream));
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < row.batch; ++i) must(row.queue());
  must(backend.stream_synchronize(stream));
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count() / row.batch;
}

template <typename T>
T must(Result<T> result) {
  must(result.status());
  return result.value();
}

// Device memory for the length of the program.
class Block {
 public:
  Block(Backend& backend, std::size_t bytes, const std::string& memory) : backend_(backend) {
    if (memory == "plain") {
      address_ = must(backend.alloc(bytes));
      return;
    }
    const std::size_t granule = backend.capabilities().granularity;
    const std::size_t chunk = std::max(memory == "large" ? kLargeChunk : kSmallChunk, granule);
    const std::size_t count = (bytes + chunk - 1) / chunk;
    // The last chunk of a large array is no larger than it needs to be.
    const std::size_t last =
        memory == "large" ? (bytes - (count - 1) * chunk + granule - 1) / granule * granule : chunk;
    mapped_bytes_ = (count - 1) * chunk + last;
    std::vector<Chunk> chunks;
    for (std::size_t i = 0; i < count; ++i)
      chunks.push_back(must(backend.chunk_create(i + 1 < count ? chunk : last)));
    const auto map = [&](const std::vector<Chunk>& order) {
      const DevicePtr address = must(backend.reserve(mapped_bytes_, granule));
      for (std::size_t i = 0; i < count; ++i)
        must(backend.map(static_cast<std::byte*>(address) + i * chunk, order[i]));
      must(backend.set_access(address, mapped_bytes_));
      mappings_.push_back(address);
      address_ = address;
    };
    map(chunks);
    if (memory == "stitched") {
      std::vector<Chunk> mixed;
      for (std::size_t first = 0; first < kStitchStride; ++first) {
        for (std::size_t i = first; i < count; i += kStitchStride) mixed.push_back(chunks[i]);
      }
      map(mixed);
    }
    for (const Chunk one : chunks) must(backend.chunk_destroy(one));
  }
  ~Block() {
    if (mappings_.empty()) static_cast<void>(backend_.free(address_).ok());
    for (const DevicePtr mapping : mappings_) {
      static_cast<void>(backend_.unmap(mapping, mapped_bytes_).ok());
      static_cast<void>(backend_.release(mapping, mapped_bytes_).ok());
    }
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(address_);
  }

 private:
  Backend& backend_;
  DevicePtr address_ = nullptr;
  std::vector<DevicePtr> mappings_;
  std::size_t mapped_bytes_ = 0;
};

void write_json(const Options& options, std::size_t count, const char* description,
                const std::vector<Row>& rows, double control_seconds) {
  std::FILE* const file = std::fopen(options.json.c_str(), "w");
  if (file == nullptr) {
    std::fprintf(stderr, "cuda_kernels_bench: cannot write %s\n", options.json.c_str());
    std::exit(1);
  }
  std::fprintf(file,
               "{\"kernels\": \"%s\", \"memory\": \"%s\", \"elements\": %zu, \"rounds\": %d, "
               "\"step_control_us\": %.3f, "
               "\"rows\": [\n",
               description, options.memory.c_str(), count, options.rounds, control_seconds * 1e6);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double seconds = median(rows[i].seconds);
    std::fprintf(file, "  {\"name\": \"%s\", \"ms\": %.6f, \"gb_per_s\": %.1f, \"of_copy\": %.4f}%s\n",
                 rows[i].name, seconds * 1e3, rows[i].bytes / seconds * 1e-9, median(rows[i].ratios),
                 i + 1 < rows.size() ? "," : "");
  }
  std::fprintf(file, "]}\n");
  std::fclose(file);
}

int run(const Options& options) {
  CudaBackendOptions backend_options;
  backend_options.ordinal = options.device;
  Result<std::unique_ptr<CudaBackend>> created = CudaBackend::create(backend_options);
  if (!created.ok()) {
    std::printf("cuda_kernels_bench: cannot run: %s\n", created.status().to_string().c_str());
    return kCannotRun;
  }
  Backend& backend = *created.value();
  Result<std::unique_ptr<Kernels>> loaded = Kernels::create(backend);
  if (!loaded.ok()) {
    std::printf("cuda_kernels_bench: cannot run: %s\n", loaded.status().to_string().c_str());
    return kCannotRun;
  }
  Kernels& kernels = *loaded.value();
  Result<Stream> stream_created = backend.stream_create();
  must(stream_created.status());
  const Stream stream = stream_created.value();

  const std::size_t count = options.elements / (4 * kLeafCount) * (4 * kLeafCount);
  const double n = static_cast<double>(count);
  const std::size_t needed = count * 20 + count / kLeafCount * sizeof(double) + (std::size_t{64} << 20);
  if (needed > backend.memory_info().free_bytes) {
    std::printf(
        "cuda_kernels_bench: cannot run: %zu elements need %zu MiB, %zu MiB are free; pass --elements\n",
        count, needed >> 20, backend.memory_info().free_bytes >> 20);
    return kCannotRun;
  }
  constexpr DataType f32 = DataType::kFloat32, bf16 = DataType::kBfloat16;
  const auto block = [&](std::size_t bytes) { return Block(backend, bytes, options.memory); };
  const Block g = block(count * 4), p = block(count * 4), m = block(count * 4), v = block(count * 4);
  const Block narrow = block(count * 2), narrow_target = block(count * 2);
  const Block scratch = block(count / kLeafCount * sizeof(double)), result = block(sizeof(double));
  const Block state = block(sizeof(StepState)), correction = block(sizeof(BiasCorrection));
  must(kernels.fill({g.as<float>(), count, 0.01f, f32}, stream));
  must(kernels.fill({p.as<float>(), count, 1.0f, f32}, stream));
  must(kernels.fill({m.as<float>(), count, 0.0f, f32}, stream));
  must(kernels.fill({v.as<float>(), count, 1.0f, f32}, stream));
  must(kernels.fill({narrow.as<void>(), count, 0.01f, bf16}, stream));
  // The state after a step was applied.
  StepState applied;
  applied.outcome = StepOutcome::kApplied;
  applied.factor = 1.0f, applied.c1 = 0.9f, applied.s2 = 0.9f;
  const BiasCorrection some = {0.9f, 0.9f};
  must(backend.copy_async(state.as<void>(), &applied, sizeof applied, stream));
  must(backend.copy_async(correction.as<void>(), &some, sizeof some, stream));
  must(backend.stream_synchronize(stream));

  AdamWArguments adamw = {};
  adamw.gradient = g.as<void>(), adamw.master = p.as<float>(), adamw.m = m.as<float>(),
  adamw.v = v.as<float>();
  adamw.count = count, adamw.gradient_type = adamw.parameter_type = f32;
  adamw.factor = 1.0f, adamw.lr = 1e-4f, adamw.weight_decay = 0.1f, adamw.beta1 = 0.9f, adamw.beta2 = 0.999f;
  adamw.eps = 1e-8f, adamw.a1 = 0.1f, adamw.a2 = 0.001f, adamw.c1 = 0.9f, adamw.s2 = 0.9f;
  AdamWArguments mixed = adamw;
  mixed.parameter = narrow_target.as<void>(), mixed.parameter_type = bf16;
  AdamWArguments both_narrow = mixed;
  both_narrow.gradient = narrow.as<void>(), both_narrow.gradient_type = bf16;
  const std::size_t slice = count / 4;
  const AccumulateArguments sum4 = {
      narrow.as<void>(), narrow.as<std::byte>(), slice * 2, p.as<float>(), slice, 0, 4, bf16, false};

  std::vector<Row> rows = {
      {"copy device to device", 8 * n,
       [&] { return backend.copy_async(m.as<void>(), g.as<void>(), count * 4, stream); }},
      {"adamw bf16 gradient, bf16 parameter, control on the device", 28 * n,
       [&] {
         return kernels.adamw_controlled({both_narrow, state.as<StepState>(), nullptr}, stream);
       }},
      {"adamw bf16 gradient, bf16 parameter", 28 * n, [&] { return kernels.adamw(both_narrow, stream); }},
      {"adamw fp32 gradient, bf16 parameter", 30 * n, [&] { return kernels.adamw(mixed, stream); }},
      {"adamw fp32", 28 * n, [&] { return kernels.adamw(adamw, stream); }},
      {"accumulate 4 ranks of bf16", 4 * n, [&] { return kernels.accumulate(sum4, stream); }},
      {"cast fp32 to bf16", 6 * n,
       [&] {
         return kernels.cast({g.as<void>(), narrow_target.as<void>(), count, f32, bf16}, stream);
       }},
      {"cast bf16 to fp32", 6 * n,
       [&] {
         return kernels.cast({narrow.as<void>(), m.as<void>(), count, bf16, f32}, stream);
       }},
      {"cast fp32 to fp16", 6 * n,
       [&] {
         return kernels.cast({g.as<void>(), narrow_target.as<void>(), count, f32, DataType::kFloat16},
                             stream);
       }},
      {"scale fp32 in place", 8 * n,
       [&] {
         return kernels.scale({p.as<float>(), p.as<void>(), count, 1.0f, f32, f32}, stream);
       }},
      {"add bf16", 6 * n,
       [&] {
         return kernels.add({narrow.as<void>(), narrow_target.as<void>(), count, bf16}, stream);
       }},
      {"norm fp32", 4 * n,
       [&] {
         return kernels.norm({g.as<void>(), scratch.as<double>(), result.as<double>(), count, f32}, stream);
       }},
      {"norm bf16", 2 * n,
       [&] {
         return kernels.norm({narrow.as<void>(), scratch.as<double>(), result.as<double>(), count, bf16},
                             stream);
       }},
      {"fill fp32", 4 * n,
       [&] {
         return kernels.fill({m.as<void>(), count, 0.0f, f32}, stream);
       }},
  };

  for (Row& row : rows) {
    static_cast<void>(measure(backend, stream, row));
    const double once = measure(backend, stream, row);
    row.batch = std::clamp(static_cast<int>(kBatchSeconds / once), 1, kLargestBatch);
  }
  for (int round = 0; round < options.rounds; ++round) {
    for (Row& row : rows) row.seconds.push_back(measure(backend, stream, row));
    for (Row& row : rows) {
      const double copied = rows[0].bytes / rows[0].seconds.back();
      row.ratios.push_back(row.bytes / row.seconds.back() / copied);
    }
  }

  // The decision of a step is small: it must only take microseconds.
  StepControlArguments control = {};
  control.state = state.as<StepState>(), control.squares = result.as<double>(),
  control.scratch = scratch.as<double>();
  control.rank_stride = control.unit_count = 1, control.rank_count = 1;
  control.corrections = correction.as<BiasCorrection>(), control.first_step = 1, control.correction_count = 1;
  Row control_row = {"step_control", 0, [&] { return kernels.step_control(control, stream); }, 200};
  static_cast<void>(measure(backend, stream, control_row));
  const double control_seconds = measure(backend, stream, control_row);

  std::printf("%s, %zu elements, %d rounds\n", kernels.description(), count, options.rounds);
  std::printf("%-60s %9s %9s %8s\n", "", "ms", "GB/s", "of copy");
  for (const Row& row : rows) {
    const double seconds = median(row.seconds);
    std::printf("%-60s %9.3f %9.1f %8.3f\n", row.name, seconds * 1e3, row.bytes / seconds * 1e-9,
                median(row.ratios));
  }
  std::printf("%-60s %9.4f\n", "step_control", control_seconds * 1e3);
  if (!options.json.empty()) write_json(options, count, kernels.description(), rows, control_seconds);
  must(backend.stream_destroy(stream));
  return 0;
}

}  // namespace
}  // namespace forebay

int main(int argc, char** argv) {
  forebay::Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    const char* const value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (value != nullptr && name == "--elements") {
      options.elements = std::strtoull(value, nullptr, 10);
    } else if (value != nullptr && name == "--rounds") {
      options.rounds = std::atoi(value);
    } else if (value != nullptr && name == "--device") {
      options.device = std::atoi(value);
    } else if (value != nullptr && name == "--memory") {
      options.memory = value;
    } else if (value != nullptr && name == "--json") {
      options.json = value;
    } else {
      options.rounds = 0;
    }
  }
  if (const std::string& memory = options.memory;
      memory != "plain" && memory != "small" && memory != "large" && memory != "stitched") {
    options.rounds = 0;
  }
  if (options.rounds < 1 || options.elements < 4 * forebay::kLeafCount) {
    std::fprintf(stderr,
                 "usage: %s [--elements N (at least 2048)] [--rounds N] [--device N]\n"
                 "       [--memory plain|small|large|stitched] [--json FILE]\n"
                 "  needs a CUDA device; exits with %d where there is none\n",
                 argv[0], forebay::kCannotRun);
    return 2;
  }
  return forebay::run(options);
}
