// Uses one thing of each library: a host device, an arena on it, and a plan.

#include <cstdio>

#include "forebay/runtime.h"

int main() {
  try {
    const auto backend = forebay::value_or_throw(forebay::HostBackend::create({.memory_bytes = 64u << 20}));
    const auto arena = forebay::value_or_throw(forebay::Arena::create(*backend));
    const forebay::DevicePtr block = forebay::value_or_throw(arena->allocate({.bytes = 1000}));
    forebay::throw_if_error(arena->free(block, {}));

    forebay::ModelShape model;
    model.units.push_back({.name = "block", .parameters = {{.name = "weight", .count = 4096}}});
    const forebay::Plan plan =
        forebay::value_or_throw(forebay::make_plan(model, {{.stage = 3}, /*ranks=*/4}));
    // fp32 at stage 3: 16 bytes a parameter over 4 ranks.
    if (plan.bytes.model_states() != 16u * 4096 / 4) return 1;
  } catch (const forebay::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("forebay %s: consumer ok\n", forebay::version());
  return 0;
}
