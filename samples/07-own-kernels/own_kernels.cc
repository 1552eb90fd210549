// The model of samples/01-first-trainer on GPUs: own CUDA kernels (own_kernels.cu) read parameters and write
// gradients where a lease says. Three ranks share one device, at ZeRO stages 0 and 3. Both stages print the
// same digest.
//
//   build/release/bin/own-kernels [IMAGE]      IMAGE: the kernels as nvcc compiled them (cubin, fatbin or
//   PTX)
//
// The kernels are launched through the backend, so this program links no CUDA library. One that nvcc links
// may as well write kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream.handle)>>>(...).

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "forebay/cuda_backend.h"
#include "forebay/engine.h"
#include "forebay/error.h"
#include "forebay/kernels.h"
#include "forebay/local_communicator.h"

namespace {

using namespace forebay;

constexpr int kRanks = 3, kSteps = 200, kInputs = 8, kHidden = 32, kBatch = 16;

// The data of the passes, in the activation memory of the engine.
struct Work {
  float x[kBatch][kInputs], y[kBatch], hidden[kBatch][kHidden], error[kBatch],
      hidden_gradient[kBatch][kHidden];
};

// Makes inputs from a formula, different for each rank and step.
void make_batch(Work& work, int rank, int step) {
  for (int b = 0; b < kBatch; ++b) {
    work.y[b] = 0;
    for (int i = 0; i < kInputs; ++i) {
      work.x[b][i] = std::sin(static_cast<float>(((step * kRanks + rank) * kBatch + b) * kInputs + i));
      work.y[b] += work.x[b][i] * static_cast<float>(i - 3) / 4;
    }
  }
}

// The kernels of the image, loaded on one backend.
class OwnKernels {
 public:
  OwnKernels(Backend& backend, const std::string& image)
      : backend_(backend),
        module_(value_or_throw(backend.load_module({.image = image.data(), .image_bytes = image.size()}))) {}
  ~OwnKernels() { static_cast<void>(backend_.unload_module(module_)); }

  // Queues `name` with one thread for each of `count` results. All arguments are addresses.
  template <typename... Pointers>
  void launch(const char* name, unsigned count, Stream stream, Pointers... pointers) {
    constexpr unsigned kBlock = 16;  // Divides every count here.
    const Kernel kernel = value_or_throw(backend_.get_kernel(module_, name));
    const void* const arguments[] = {&pointers...};
    const std::size_t argument_bytes[] = {sizeof(pointers)...};
    throw_if_error(backend_.launch(kernel, {count / kBlock}, {kBlock}, arguments, argument_bytes,
                                   sizeof...(pointers), stream));
  }

 private:
  Backend& backend_;
  Module module_;
};

void train(int rank, int stage, const std::string& image, LocalGroup& group) {
  auto backend = value_or_throw(CudaBackend::create({}));
  auto kernels = value_or_throw(Kernels::create(*backend));
  auto communicator = value_or_throw(group.communicator(rank, *backend, *kernels));
  OwnKernels own(*backend, image);

  EngineOptions options;
  options.stage = stage;
  Engine engine(*backend, *kernels, *communicator, options);
  const UnitId first = engine.add_unit("first", /*backward_reads_parameters=*/false);
  const UnitId second = engine.add_unit("second");
  const ParameterId w1 = engine.add_parameter(first, "w1", kHidden * kInputs);
  const ParameterId w2 = engine.add_parameter(second, "w2", kHidden);
  engine.declare_activations(sizeof(Work));
  engine.commit();
  std::vector<float> values(kHidden * kInputs);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.3f * std::sin(7.0f * static_cast<float>(i));
  engine.set_parameter(w1, values);
  engine.set_parameter(w2, Span(values).first(kHidden));

  // Addresses on the device: the host computes with them and reads nothing there.
  const Stream stream = value_or_throw(backend->stream_create());
  Work& there = *reinterpret_cast<Work*>(engine.activations());
  Work here;
  StepResult result;
  double first_loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    make_batch(here, rank, step);
    throw_if_error(backend->copy_async(&there, &here, sizeof here, stream));
    engine.step_begin();
    engine.micro_step_begin(0);
    {
      const Lease lease = engine.forward(first, stream);
      own.launch("first_layer_forward", kBatch * kHidden, stream, lease.parameter(0), &there.x,
                 &there.hidden);
    }
    {
      const Lease lease = engine.forward(second, stream);
      own.launch("second_layer_forward", kBatch, stream, lease.parameter(0), &there.hidden, &there.y,
                 &there.error);
    }
    bool accumulate = false;  // Each gradient is written once per step here, so this is never set.
    {
      Lease lease = engine.backward(second, stream);
      own.launch("second_layer_backward", kHidden, stream, lease.parameter(0), &there.hidden, &there.error,
                 lease.gradient(0, &accumulate), &there.hidden_gradient);
    }
    {
      Lease lease = engine.backward(first, stream);
      own.launch("first_layer_backward", kHidden * kInputs, stream, &there.hidden_gradient, &there.x,
                 lease.gradient(0, &accumulate));
    }
    throw_if_error(backend->copy_async(here.error, &there.error, sizeof here.error, stream));
    throw_if_error(backend->stream_synchronize(stream));
    double loss = 0;
    for (const float error : here.error) loss += error * error / kBatch;
    result = engine.step({.groups = {{.lr = 0.02}}, .clip = 1.0, .metric = loss / kRanks});
    if (step == 0) first_loss = result.metric_sum;
  }
  const std::string digest = engine.digest();
  if (rank == 0) {
    std::printf("stage %d: loss %.4f -> %.4f, digest %s\n", stage, first_loss, result.metric_sum,
                digest.c_str());
  }
  throw_if_error(backend->stream_destroy(stream));
}

}  // namespace

int main(int argc, char** argv) {
  const char* const path = argc > 1 ? argv[1] : OWN_KERNELS_IMAGE;
  std::string image;
  if (std::filesystem::is_regular_file(path)) {
    std::ifstream file(path, std::ios::binary);
    image.assign(std::istreambuf_iterator<char>(file), {});
  }
  if (image.empty()) {
    std::fprintf(stderr, "own-kernels: cannot read kernels from %s; give the image that nvcc made\n", path);
    return 1;
  }
  for (const int stage : {0, 3}) {
    const auto group = LocalGroup::create(kRanks);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&, rank] {
        try {
          train(rank, stage, image, *group);
        } catch (const Error& error) {
          std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
          std::exit(1);
        }
      });
    }
    for (std::thread& thread : ranks) thread.join();
  }
}
