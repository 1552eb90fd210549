// The model of the first trainer: y = W2 tanh(W1 x), on the host. It knows nothing of forebay: the passes
// read weights and write gradients at addresses that they are given.
#pragma once

#include <cmath>

inline constexpr int kRanks = 3, kSteps = 200, kInputs = 8, kHidden = 32, kBatch = 16;

// The data of one rank's forward and backward passes.
struct Work {
  float x[kBatch][kInputs], y[kBatch], hidden[kBatch][kHidden], error[kBatch],
      hidden_gradient[kBatch][kHidden];
  double loss = 0;
};

// Makes inputs from a formula, different for each rank and step.
inline void make_batch(Work& work, int rank, int step) {
  for (int b = 0; b < kBatch; ++b) {
    work.y[b] = 0;
    for (int i = 0; i < kInputs; ++i) {
      work.x[b][i] = std::sin(static_cast<float>(((step * kRanks + rank) * kBatch + b) * kInputs + i));
      work.y[b] += work.x[b][i] * static_cast<float>(i - 3) / 4;
    }
  }
}

inline void first_layer_forward(Work& work, const float* w1) {
  for (int b = 0; b < kBatch; ++b) {
    for (int h = 0; h < kHidden; ++h) {
      float sum = 0;
      for (int i = 0; i < kInputs; ++i) sum += w1[h * kInputs + i] * work.x[b][i];
      work.hidden[b][h] = std::tanh(sum);
    }
  }
}

inline void second_layer_forward(Work& work, const float* w2) {
  work.loss = 0;
  for (int b = 0; b < kBatch; ++b) {
    float sum = 0;
    for (int h = 0; h < kHidden; ++h) sum += w2[h] * work.hidden[b][h];
    work.error[b] = sum - work.y[b];
    work.loss += work.error[b] * work.error[b] / kBatch;
  }
}

inline void second_layer_backward(Work& work, const float* w2, float* gradient) {
  for (int h = 0; h < kHidden; ++h) {
    gradient[h] = 0;
    for (int b = 0; b < kBatch; ++b) {
      const float slope = 2 * work.error[b] / kBatch;
      gradient[h] += slope * work.hidden[b][h];
      work.hidden_gradient[b][h] = slope * w2[h] * (1 - work.hidden[b][h] * work.hidden[b][h]);
    }
  }
}

inline void first_layer_backward(const Work& work, float* gradient) {
  for (int h = 0; h < kHidden; ++h) {
    for (int i = 0; i < kInputs; ++i) {
      float sum = 0;
      for (int b = 0; b < kBatch; ++b) sum += work.hidden_gradient[b][h] * work.x[b][i];
      gradient[h * kInputs + i] = sum;
    }
  }
}
