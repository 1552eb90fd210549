// The passes of samples/01-first-trainer as CUDA kernels: one thread for each result, each sum in the order of the host's
// loops. Compiled with -fmad=false (CMakeLists.txt), they differ from the host in tanhf alone.

constexpr int kInputs = 8, kHidden = 32, kBatch = 16;

__device__ inline int thread_index() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

// For each of kBatch * kHidden: hidden = tanh(W1 x).
extern "C" __global__ void first_layer_forward(const float* w1, const float* x, float* hidden) {
  const int b = thread_index() / kHidden, h = thread_index() % kHidden;
  float sum = 0;
  for (int i = 0; i < kInputs; ++i) sum += w1[h * kInputs + i] * x[b * kInputs + i];
  hidden[b * kHidden + h] = tanhf(sum);
}

// For each of kBatch: error = W2 hidden - y.
extern "C" __global__ void second_layer_forward(const float* w2, const float* hidden, const float* y, float* error) {
  const int b = thread_index();
  float sum = 0;
  for (int h = 0; h < kHidden; ++h) sum += w2[h] * hidden[b * kHidden + h];
  error[b] = sum - y[b];
}

// For each of kHidden: the gradient of W2, and of the first layer before its tanh.
extern "C" __global__ void second_layer_backward(const float* w2, const float* hidden, const float* error, float* gradient,
                                                 float* hidden_gradient) {
  const int h = thread_index();
  float sum = 0;
  for (int b = 0; b < kBatch; ++b) {
    const float value = hidden[b * kHidden + h], slope = 2 * error[b] / kBatch;
    sum += slope * value;
    hidden_gradient[b * kHidden + h] = slope * w2[h] * (1 - value * value);
  }
  gradient[h] = sum;
}

// For each of kHidden * kInputs: the gradient of W1.
extern "C" __global__ void first_layer_backward(const float* hidden_gradient, const float* x, float* gradient) {
  const int h = thread_index() / kInputs, i = thread_index() % kInputs;
  float sum = 0;
  for (int b = 0; b < kBatch; ++b) sum += hidden_gradient[b * kHidden + h] * x[b * kInputs + i];
  gradient[h * kInputs + i] = sum;
}
