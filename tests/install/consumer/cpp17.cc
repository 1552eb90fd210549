// A program that is C++17, as many CUDA programs are: values go into an engine and come out of it.

#include <cstdio>
#include <vector>

#include "forebay/runtime.h"

static_assert(__cplusplus < 202002L, "C++17 shall be enough");

int main() {
  try {
    forebay::HostBackendOptions host;
    host.memory_bytes = 64u << 20;
    const auto backend = forebay::value_or_throw(forebay::HostBackend::create(host));
    const auto kernels = forebay::value_or_throw(forebay::Kernels::create(*backend));
    const auto ranks = forebay::LocalGroup::create(1);
    const auto communicator = forebay::value_or_throw(ranks->communicator(0, *backend, *kernels));

    forebay::Engine engine(*backend, *kernels, *communicator, {});
    const forebay::ParameterId weight = engine.add_parameter(engine.add_unit("block"), "weight", 3);
    engine.commit();
    const std::vector<float> values{1, 2, 3};
    engine.set_parameter(weight, values);
    bool same = false;
    engine.visit_parameters([&](const forebay::ParameterShape&, forebay::Span<const float> found) {
      same = std::vector<float>(found.begin(), found.end()) == values;
    });
    if (!same || weight != forebay::ParameterId()) return 1;
  } catch (const forebay::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("forebay %s: consumer ok\n", forebay::version());
  return 0;
}
