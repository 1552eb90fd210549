// Trains a model that does not fit into its device: with states and parameters in host memory, then in files.
// Without offload the plan needs several times the budget. All runs print the same digest: their weights are
// bit for bit the same.
//
//   build/release/bin/beyond-the-device [DIRECTORY]      default: the temporary directory
//
// Only the engine's options change; the training loop stays the same. The model is a sequence of layers, y =
// x + tanh(W x) / 4, each a unit. It learns a fixed rotation of its input.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "forebay/engine.h"
#include "forebay/error.h"
#include "forebay/host_backend.h"
#include "forebay/kernels.h"
#include "forebay/local_communicator.h"
#include "forebay/stream_call.h"
#include "forebay/units.h"

namespace {

constexpr int kLayers = 24, kWidth = 128, kBatch = 4, kSteps = 10;

// The data of the passes; used on the stream's thread only.
struct Work {
  float x[kLayers + 1][kBatch][kWidth];  // The input of each layer, and the output of the last.
  float slope[kLayers][kBatch][kWidth];  // The derivative of tanh.
  float gradient[kBatch][kWidth];        // The loss's gradient at the current layer.
};

void begin_forward(Work& work, int step) {
  for (int b = 0; b < kBatch; ++b)
    for (int i = 0; i < kWidth; ++i)
      work.x[0][b][i] = std::sin(static_cast<float>((step * kBatch + b) * kWidth + i));
}

void forward(Work& work, int layer, const float* w) {
  for (int b = 0; b < kBatch; ++b) {
    for (int i = 0; i < kWidth; ++i) {
      float sum = 0;
      for (int k = 0; k < kWidth; ++k) sum += w[i * kWidth + k] * work.x[layer][b][k];
      const float t = std::tanh(sum);
      work.slope[layer][b][i] = (1 - t * t) / 4;
      work.x[layer + 1][b][i] = work.x[layer][b][i] + t / 4;
    }
  }
}

double begin_backward(Work& work) {
  double loss = 0;
  for (int b = 0; b < kBatch; ++b) {
    for (int i = 0; i < kWidth; ++i) {
      const float error = work.x[kLayers][b][i] - work.x[0][b][(i + 1) % kWidth];
      work.gradient[b][i] = 2 * error / (kBatch * kWidth);
      loss += error * error / (kBatch * kWidth);
    }
  }
  return loss;
}

void backward(Work& work, int layer, const float* w, float* w_gradient) {
  std::memset(w_gradient, 0, sizeof(float) * kWidth * kWidth);
  for (int b = 0; b < kBatch; ++b) {
    float through[kWidth];
    for (int i = 0; i < kWidth; ++i) through[i] = work.gradient[b][i] * work.slope[layer][b][i];
    for (int i = 0; i < kWidth; ++i) {
      for (int k = 0; k < kWidth; ++k) {
        w_gradient[i * kWidth + k] += through[i] * work.x[layer][b][k];
        work.gradient[b][k] += through[i] * w[i * kWidth + k];
      }
    }
  }
}

// Trains and returns the digest. Errors: throws Error(kOutOfMemory) if the plan exceeds the budget.
std::string train(const char* name, forebay::EngineOptions options) {
  using namespace forebay;
  const auto backend = value_or_throw(HostBackend::create({.granularity = 64 << 10}));
  const auto kernels = value_or_throw(Kernels::create(*backend));
  const auto group = LocalGroup::create(1);
  const auto communicator = value_or_throw(group->communicator(0, *backend, *kernels));
  options.stage = 3;
  options.bucket_bytes = 64 << 10;
  Engine engine(*backend, *kernels, *communicator, options);
  std::vector<ParameterId> weights;
  for (int layer = 0; layer < kLayers; ++layer) {
    const UnitId unit = engine.add_unit("layer " + std::to_string(layer));
    weights.push_back(engine.add_parameter(unit, "w" + std::to_string(layer), kWidth * kWidth));
  }
  engine.commit();

  std::vector<float> values(kWidth * kWidth);
  for (int layer = 0; layer < kLayers; ++layer) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = 0.1f * std::sin(7.0f * static_cast<float>(i) + static_cast<float>(layer));
    engine.set_parameter(weights[static_cast<std::size_t>(layer)], values);
  }
  const Stream stream = value_or_throw(backend->stream_create());
  const auto floats = [](DevicePtr address) { return reinterpret_cast<float*>(address); };
  const auto work = std::make_unique<Work>();
  double loss = 0, first_loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    engine.step_begin();
    engine.micro_step_begin(0);
    begin_forward(*work, step);
    for (int layer = 0; layer < kLayers; ++layer) {
      const Lease lease = engine.forward(layer, stream);
      throw_if_error(call_on(*backend, stream, [&work = *work, layer, w = floats(lease.parameter(0))] {
        forward(work, layer, w);
      }));
    }
    throw_if_error(call_on(*backend, stream, [&] { loss = begin_backward(*work); }));
    for (int layer = kLayers - 1; layer >= 0; --layer) {
      Lease lease = engine.backward(layer, stream);
      bool accumulate = false;  // Each gradient is written once per step here.
      throw_if_error(call_on(*backend, stream,
                             [&work = *work, layer, w = floats(lease.parameter(0)),
                              g = floats(lease.gradient(0, &accumulate))] { backward(work, layer, w, g); }));
    }
    throw_if_error(backend->stream_synchronize(stream));
    static_cast<void>(engine.step({.groups = {{.lr = 1e-3}}, .clip = 1.0}));
    if (step == 0) first_loss = loss;
  }
  const EngineStatistics statistics = engine.statistics();
  const std::string digest = engine.digest();
  std::printf("%-28s loss %.4f -> %.4f, device %s, host %s, files %s, digest %s\n", name, first_loss, loss,
              format_bytes(statistics.peak_reserved_bytes).c_str(),
              format_bytes(statistics.host_bytes).c_str(), format_bytes(statistics.file_bytes).c_str(),
              digest.c_str());
  throw_if_error(backend->stream_destroy(stream));
  return digest;
}

// The device memory of a plan that offloads everything except the units in use.
std::uint64_t smallest_budget() {
  using namespace forebay;
  ModelShape model;
  for (int layer = 0; layer < kLayers; ++layer) {
    model.units.push_back({.name = "layer " + std::to_string(layer),
                           .parameters = {{.name = "w" + std::to_string(layer), .count = kWidth * kWidth}}});
  }
  PlanOptions options{{.stage = 3, .bucket_bytes = 64 << 10, .offload = Offload::kOptimizerAndParameters}};
  options.chunk_bytes = 64 << 10;
  return value_or_throw(make_plan(model, options)).reserved_bytes;
}

bool run(const std::string& directory) {
  using namespace forebay;
  const std::string expected = train("room enough:", {});

  const std::uint64_t budget = smallest_budget();
  std::printf("now with a device of %s\n", format_bytes(budget).c_str());
  try {
    train("nothing offloaded:", {{.memory_bytes = budget}});
    return false;  // It fits, so this sample would show nothing.
  } catch (const Error& error) {
    if (error.code() != StatusCode::kOutOfMemory) throw;
    std::printf("%-28s %s\n", "nothing offloaded:", error.status().message().c_str());
  }
  EngineOptions options{{.offload = Offload::kOptimizerAndParameters, .memory_bytes = budget}};
  const std::string in_memory = train("offloaded to host memory:", options);
  options.tier = Tier::kFile;
  options.offload_directories = {directory};
  const std::string in_files = train("offloaded to files:", options);
  return in_memory == expected && in_files == expected;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2 || (argc == 2 && argv[1][0] == '-')) {
    std::fprintf(stderr, "usage: beyond-the-device [DIRECTORY]\n");
    return 2;
  }
  try {
    if (run(argc > 1 ? argv[1] : std::filesystem::temp_directory_path().string())) return 0;
    std::fprintf(stderr, "beyond-the-device: the digests differ, or the model fits\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "beyond-the-device: %s\n", error.what());
  }
  return 1;
}
