// host_adam() for host_adam_vs_deepspeed.py, which calls it through ctypes in the process of its peer.
#include <cstdio>

#include "forebay/block_runner.h"
#include "forebay/host_adam.h"

namespace {

// One per process, with as many threads as the peer.
forebay::BlockRunner& runner(int thread_count) {
  static forebay::BlockRunner* const kRunner = new forebay::BlockRunner(thread_count);
  return *kRunner;
}

}  // namespace

extern "C" {

// One AdamW step. `gradient` is bf16 where `narrow_gradient` is not 0, else fp32; `parameter` is bf16 or
// null; m and v are fp32, or bf16 where `narrow_moments` is not 0. Returns 0, or 1 with a message on stderr.
__attribute__((visibility("default"))) int forebay_host_adam_step(
    const void* gradient, int narrow_gradient, float* master, void* m, void* v, int narrow_moments,
    void* parameter, unsigned long long count, unsigned long long step, float factor, double lr,
    double weight_decay, double beta1, double beta2, double eps, int thread_count) {
  using forebay::DataType;
  forebay::HostAdamArguments a = {};
  forebay::AdamWArguments& update = a.update;
  update.gradient = gradient, update.master = master, update.parameter = parameter, update.count = count;
  update.gradient_type = narrow_gradient != 0 ? DataType::kBfloat16 : DataType::kFloat32;
  update.parameter_type = DataType::kBfloat16;
  update.factor = factor, update.eps = static_cast<float>(eps);
  update.lr = static_cast<float>(lr), update.weight_decay = static_cast<float>(weight_decay);
  update.beta1 = static_cast<float>(beta1), update.beta2 = static_cast<float>(beta2);
  update.a1 = static_cast<float>(1.0 - beta1), update.a2 = static_cast<float>(1.0 - beta2);
  forebay::BiasCorrection correction;
  forebay::bias_corrections(beta1, beta2, step, &correction, 1);
  update.c1 = correction.c1, update.s2 = correction.s2;
  a.moments.format = narrow_moments != 0 ? forebay::MomentFormat::kBfloat16 : forebay::MomentFormat::kFloat32;
  a.moments.m = m, a.moments.v = v;
  a.step = step;
  const forebay::Status status = forebay::host_adam(a, runner(thread_count));
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.to_string().c_str());
  return status.ok() ? 0 : 1;
}
}
