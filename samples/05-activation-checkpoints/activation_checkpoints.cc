// Activation checkpointing without an engine. The forward pass of a chain of layers with dropout keeps one
// input per layer; the backward pass computes the rest again. Two ranks, which are threads, compute the same
// values, as tensor-parallel ranks do between their products.
//
//   build/release/bin/activation-checkpoints
//
// The inputs are kept whole, then half on each rank (Pa in the ZeRO paper), then the halves in pinned host
// memory (Pa+cpu). Each needs fewer bytes on the device, and the gradients are bit for bit the same as those
// of a run that keeps everything.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "forebay/activation_checkpointer.h"
#include "forebay/error.h"
#include "forebay/host_backend.h"
#include "forebay/kernels.h"
#include "forebay/local_communicator.h"
#include "forebay/stream_call.h"

namespace {

using namespace forebay;

constexpr int kRanks = 2, kLayers = 12, kWidth = 5001;  // Any width: the last slice may be short.
using Values = std::vector<float>;

// The state of dropout's random numbers. It is saved with each input, because the layer is computed again.
struct Random {
  std::uint64_t state = 88172645463325252u;
  float mask() {  // A quarter is dropped.
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % 4 == 0 ? 0.0f : 4.0f / 3.0f;
  }
};

float weight(int layer, int i) {
  return std::sin(static_cast<float>(layer * kWidth + i));
}

// x = x + mask tanh(w x'), x' being the neighbours of x.
void forward(int layer, Random& random, const float* input, float* output) {
  for (int i = 0; i < kWidth; ++i)
    output[i] = input[i] + random.mask() * std::tanh(weight(layer, i) * input[(i + 1) % kWidth]);
}

// Computes the values again that forward() did not keep. Replaces the output's gradient in `slope` by the
// input's.
void backward(int layer, Random random, const float* input, Values& slope, Values& gradient) {
  Values before = slope;
  for (int i = 0; i < kWidth; ++i) {
    const float neighbour = input[(i + 1) % kWidth];
    const float value = std::tanh(weight(layer, i) * neighbour);
    const float inner = slope[i] * random.mask() * (1 - value * value);
    gradient[layer * kWidth + i] = inner * neighbour;
    before[(i + 1) % kWidth] += inner * weight(layer, i);
  }
  slope = before;
}

// The gradients of a run that keeps all inputs in ordinary memory.
Values reference() {
  std::vector<Values> inputs(kLayers + 1, Values(kWidth, 0.5f));
  std::vector<Random> states(kLayers + 1);
  for (int l = 0; l < kLayers; ++l) {
    states[l + 1] = states[l];
    forward(l, states[l + 1], inputs[l].data(), inputs[l + 1].data());
  }
  Values slope(kWidth, 1.0f), gradient(kLayers * kWidth);
  for (int l = kLayers - 1; l >= 0; --l) backward(l, states[l], inputs[l].data(), slope, gradient);
  return gradient;
}

void train(LocalGroup& group, int rank, ActivationPlacement placement, const Values& expected) {
  const auto backend = value_or_throw(HostBackend::create({.granularity = 4096}));
  const auto kernels = value_or_throw(Kernels::create(*backend, {.thread_count = 1}));
  const auto ranks = value_or_throw(group.communicator(rank, *backend, *kernels));
  const Stream stream = value_or_throw(backend->stream_create());
  constexpr std::uint64_t kBytes = kWidth * sizeof(float);
  auto* const x = reinterpret_cast<float*>(value_or_throw(backend->alloc(2 * kBytes)));
  float* const next = x + kWidth;

  ActivationCheckpointer checkpointer(*backend, *ranks);
  for (int l = 0; l < kLayers; ++l)
    checkpointer.declare({.unit = l, .bytes = kBytes, .placement = placement, .state_bytes = sizeof(Random)});
  checkpointer.commit();  // Allocates all memory. checkpointer.plan() has its size.

  Random random;
  Values slope(kWidth, 1.0f), gradient(kLayers * kWidth);
  throw_if_error(call_on(*backend, stream, [&] { std::fill(x, x + kWidth, 0.5f); }));
  for (int l = 0; l < kLayers; ++l) {
    // The host is ahead of the stream, so it advances its own copy.
    const Random state = random;
    checkpointer.save({l, 0, 0}, reinterpret_cast<std::byte*>(x), kBytes, stream,
                      std::as_bytes(std::span(&state, 1)));
    for (int i = 0; i < kWidth; ++i) random.mask();
    throw_if_error(call_on(*backend, stream, [=] {
      Random own = state;
      forward(l, own, x, next);
      std::memcpy(x, next, kBytes);  // Overwrites the input; the checkpointer has a copy.
    }));
  }
  for (int l = kLayers - 1; l >= 0; --l) {
    const ActivationLease input = checkpointer.load({l, 0, 0}, stream);
    Random state;
    std::memcpy(&state, input.state().data(), sizeof(state));
    throw_if_error(call_on(*backend, stream, [&, l, state, data = input.data()] {
      backward(l, state, reinterpret_cast<const float*>(data), slope, gradient);
    }));
  }
  throw_if_error(backend->stream_synchronize(stream));
  checkpointer.check();

  const ActivationStatistics bytes = checkpointer.statistics();
  const bool same = std::memcmp(gradient.data(), expected.data(), expected.size() * sizeof(float)) == 0;
  if (rank == 0) {
    std::printf("%-16s %7llu bytes on the device, %6llu on the host, %6llu received: %s\n",
                activation_placement_name(placement), static_cast<unsigned long long>(bytes.device_bytes),
                static_cast<unsigned long long>(bytes.host_bytes),
                static_cast<unsigned long long>(bytes.traffic.received_bytes),
                same ? "the same gradients" : "OTHER GRADIENTS");
  }
  throw_if_error(backend->stream_destroy(stream));
  throw_if_error(backend->free(reinterpret_cast<std::byte*>(x)));
  if (!same) throw Error(StatusCode::kCorruption, "the gradients differ from those of a run that keeps all");
}

}  // namespace

int main() {
  const Values expected = reference();
  bool failed = false;
  for (const ActivationPlacement placement : {ActivationPlacement::kKeep, ActivationPlacement::kPartition,
                                              ActivationPlacement::kPartitionAndSpill}) {
    const auto group = LocalGroup::create(kRanks);
    std::vector<std::thread> threads;
    std::vector<int> failures(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          train(*group, rank, placement, expected);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "activation-checkpoints: rank %d: %s\n", rank, error.what());
          failures[rank] = 1;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const int one : failures) failed = failed || one != 0;
  }
  return failed ? 1 : 0;
}
