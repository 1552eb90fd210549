// The smallest trainer: it fits y = W2 tanh(W1 x) on three ranks, which are threads, at ZeRO stages 0 and 3.
//
//   build/release/bin/first-trainer
//
// A trainer does five things: describe the model in units, commit, set the initial values, lease each unit
// for its forward and backward pass on a stream, and step. Both stages print the same digest: their weights
// are bit for bit the same.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "forebay/engine.h"
#include "forebay/error.h"
#include "forebay/host_backend.h"
#include "forebay/kernels.h"
#include "forebay/local_communicator.h"
#include "forebay/stream_call.h"

namespace {

constexpr int kRanks = 3, kSteps = 200, kInputs = 8, kHidden = 32, kBatch = 16;

// The data of one rank's forward and backward passes; used on the stream's thread only.
struct Work {
  float x[kBatch][kInputs], y[kBatch], hidden[kBatch][kHidden], error[kBatch],
      hidden_gradient[kBatch][kHidden];
  double loss = 0;
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

void first_layer_forward(Work& work, const float* w1) {
  for (int b = 0; b < kBatch; ++b) {
    for (int h = 0; h < kHidden; ++h) {
      float sum = 0;
      for (int i = 0; i < kInputs; ++i) sum += w1[h * kInputs + i] * work.x[b][i];
      work.hidden[b][h] = std::tanh(sum);
    }
  }
}

void second_layer_forward(Work& work, const float* w2) {
  work.loss = 0;
  for (int b = 0; b < kBatch; ++b) {
    float sum = 0;
    for (int h = 0; h < kHidden; ++h) sum += w2[h] * work.hidden[b][h];
    work.error[b] = sum - work.y[b];
    work.loss += work.error[b] * work.error[b] / kBatch;
  }
}

void second_layer_backward(Work& work, const float* w2, float* gradient) {
  for (int h = 0; h < kHidden; ++h) {
    gradient[h] = 0;
    for (int b = 0; b < kBatch; ++b) {
      const float slope = 2 * work.error[b] / kBatch;
      gradient[h] += slope * work.hidden[b][h];
      work.hidden_gradient[b][h] = slope * w2[h] * (1 - work.hidden[b][h] * work.hidden[b][h]);
    }
  }
}

void first_layer_backward(const Work& work, float* gradient) {
  for (int h = 0; h < kHidden; ++h) {
    for (int i = 0; i < kInputs; ++i) {
      float sum = 0;
      for (int b = 0; b < kBatch; ++b) sum += work.hidden_gradient[b][h] * work.x[b][i];
      gradient[h * kInputs + i] = sum;
    }
  }
}

void train(int rank, int stage, forebay::LocalGroup& group) {
  using namespace forebay;
  auto backend = value_or_throw(HostBackend::create({}));
  auto kernels = value_or_throw(Kernels::create(*backend));
  auto communicator = value_or_throw(group.communicator(rank, *backend, *kernels));

  // Describe. The first layer's backward pass reads no weights, so nothing is gathered for it.
  EngineOptions options;
  options.stage = stage;
  Engine engine(*backend, *kernels, *communicator, options);
  const UnitId first = engine.add_unit("first", /*backward_reads_parameters=*/false);
  const UnitId second = engine.add_unit("second");
  const ParameterId w1 = engine.add_parameter(first, "w1", kHidden * kInputs);
  const ParameterId w2 = engine.add_parameter(second, "w2", kHidden);
  engine.commit();

  // Initial values: whole parameters, the same on every rank. Each rank keeps the shard that its ZeRO stage
  // gives it.
  std::vector<float> values(kHidden * kInputs);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.3f * std::sin(7.0f * static_cast<float>(i));
  engine.set_parameter(w1, values);
  engine.set_parameter(w2, std::span(values).first(kHidden));

  const Stream stream = value_or_throw(backend->stream_create());
  const auto run = [&](auto function) { throw_if_error(call_on(*backend, stream, function)); };
  const auto floats = [](DevicePtr address) { return reinterpret_cast<float*>(address); };
  Work work;
  StepResult result;
  double first_loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    engine.step_begin();
    engine.micro_step_begin(0);
    {
      const Lease lease = engine.forward(first, stream);
      run([&work, rank, step, w = lease.view<float>(w1).data] {
        make_batch(work, rank, step);
        first_layer_forward(work, w);
      });
    }
    {
      const Lease lease = engine.forward(second, stream);
      run([&work, w = lease.view<float>(w2).data] { second_layer_forward(work, w); });
    }
    {
      Lease lease = engine.backward(second, stream);
      // Each gradient is written once per step here, so its mode is always kWrite.
      run([&work, w = lease.view<float>(w2).data, g = floats(lease.gradient(w2).data)] {
        second_layer_backward(work, w, g);
      });
    }
    {
      Lease lease = engine.backward(first, stream);
      run([&work, g = floats(lease.gradient(w1).data)] { first_layer_backward(work, g); });
    }
    throw_if_error(backend->stream_synchronize(stream));  // Now the host may read the loss.
    result = engine.step({.groups = {{.lr = 0.02}}, .clip = 1.0, .metric = work.loss / kRanks});
    if (step == 0) first_loss = result.metric_sum;
  }
  const std::string digest = engine.digest();
  if (rank == 0) {
    std::printf("stage %d: loss %.4f -> %.4f, %llu bytes of model states per rank, digest %s\n", stage,
                first_loss, result.metric_sum,
                static_cast<unsigned long long>(engine.plan().bytes.model_states()), digest.c_str());
  }
  throw_if_error(backend->stream_destroy(stream));
}

}  // namespace

int main() {
  for (const int stage : {0, 3}) {
    const auto group = forebay::LocalGroup::create(kRanks);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&, rank] {
        try {
          train(rank, stage, *group);
        } catch (const forebay::Error& error) {
          std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
          std::exit(1);
        }
      });
    }
    for (std::thread& thread : ranks) thread.join();
  }
}
