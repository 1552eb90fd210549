// The trainer of samples/01-first-trainer over forebay.hpp, in C++17, with ranks as threads. It prints the
// digest of each stage.

#include <cmath>
#include <cstdio>
#include <thread>
#include <vector>

#include "forebay/forebay.hpp"

namespace {

using namespace forebay::c;

constexpr int kRanks = 3, kSteps = 200, kInputs = 8, kHidden = 32, kBatch = 16;

struct Work {
  float x[kBatch][kInputs], y[kBatch], hidden[kBatch][kHidden], error[kBatch],
      hidden_gradient[kBatch][kHidden];

  void first_forward(int rank, int step, const float* w1) {
    for (int b = 0; b < kBatch; ++b) {
      y[b] = 0;
      for (int i = 0; i < kInputs; ++i) {
        x[b][i] = std::sin(static_cast<float>(((step * kRanks + rank) * kBatch + b) * kInputs + i));
        y[b] += x[b][i] * static_cast<float>(i - 3) / 4;
      }
      for (int h = 0; h < kHidden; ++h) {
        float sum = 0;
        for (int i = 0; i < kInputs; ++i) sum += w1[h * kInputs + i] * x[b][i];
        hidden[b][h] = std::tanh(sum);
      }
    }
  }
  double second_forward(const float* w2) {
    double loss = 0;
    for (int b = 0; b < kBatch; ++b) {
      float sum = 0;
      for (int h = 0; h < kHidden; ++h) sum += w2[h] * hidden[b][h];
      error[b] = sum - y[b];
      loss += error[b] * error[b] / kBatch;
    }
    return loss;
  }
  void second_backward(const float* w2, float* gradient) {
    for (int h = 0; h < kHidden; ++h) {
      gradient[h] = 0;
      for (int b = 0; b < kBatch; ++b) {
        const float slope = 2 * error[b] / kBatch;
        gradient[h] += slope * hidden[b][h];
        hidden_gradient[b][h] = slope * w2[h] * (1 - hidden[b][h] * hidden[b][h]);
      }
    }
  }
  void first_backward(float* gradient) const {
    for (int h = 0; h < kHidden; ++h) {
      for (int i = 0; i < kInputs; ++i) {
        float sum = 0;
        for (int b = 0; b < kBatch; ++b) sum += hidden_gradient[b][h] * x[b][i];
        gradient[h * kInputs + i] = sum;
      }
    }
  }
};

void train(int rank, int stage, forebay_local_group* group) {
  const Options options{{"stage", std::to_string(stage)}};
  const auto device = make<Device>(forebay_device_open, "host", options);
  const auto ranks = make<Communicator>(forebay_local_group_communicator, group, rank, device);
  const auto engine = make<Engine>(forebay_engine_create, device, ranks, nullptr, nullptr, options);
  const auto first =
      get<std::int32_t>(forebay_engine_add_unit, engine, "first", FOREBAY_BACKWARD_READS_NOTHING);
  const auto second = get<std::int32_t>(forebay_engine_add_unit, engine, "second", 0);
  const auto w1 =
      get<std::int32_t>(forebay_engine_add_parameter, engine, first, "w1", kHidden * kInputs, 0, 0);
  const auto w2 = get<std::int32_t>(forebay_engine_add_parameter, engine, second, "w2", kHidden, 0, 0);
  call(forebay_engine_commit, engine);
  std::vector<float> values(kHidden * kInputs);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.3f * std::sin(7.0f * static_cast<float>(i));
  // In two parts, which must make no difference.
  call(forebay_engine_set, engine, first, w1, FOREBAY_FP32, values.data(), 0, 100);
  call(forebay_engine_set, engine, first, w1, FOREBAY_FP32, values.data() + 100, 100, values.size() - 100);
  call(forebay_engine_set, engine, second, w2, FOREBAY_FP32, values.data(), 0, kHidden);
  call(forebay_hyperparameter, engine, 0, "lr", 0.02);
  call(forebay_hyperparameter, engine, FOREBAY_WHOLE_STEP, "clip", 1.0);

  Work work;
  for (int s = 0; s < kSteps; ++s) {
    call(forebay_step_begin, engine);
    call(forebay_micro_step_begin, engine, 0);
    const auto with = [&](std::int32_t unit, Pass pass, auto compute) {
      const Lease lease(engine, unit, pass, nullptr);
      call(forebay_stream_synchronize, device, nullptr);
      compute(lease);
    };
    double loss = 0;
    with(first, Pass::kForward, [&](const Lease& l) { work.first_forward(rank, s, l.parameter<float>(0)); });
    with(second, Pass::kForward, [&](const Lease& l) { loss = work.second_forward(l.parameter<float>(0)); });
    with(second, Pass::kBackward,
         [&](const Lease& l) { work.second_backward(l.parameter<float>(0), l.gradient<float>(0).address); });
    with(first, Pass::kBackward, [&](const Lease& l) { work.first_backward(l.gradient<float>(0).address); });
    call(forebay_hyperparameter, engine, FOREBAY_WHOLE_STEP, "metric", loss / kRanks);
    step(engine);
  }
  char digest[33];
  call(forebay_engine_digest, engine, digest);
  if (rank == 0) std::printf("stage %d: digest %s\n", stage, digest);
}

}  // namespace

int main() {
  for (const int stage : {0, 3}) {
    const auto group = make<LocalGroup>(forebay_local_group_create, kRanks, nullptr);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          train(rank, stage, group);
        } catch (const Error& error) {
          std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
          std::exit(1);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}
