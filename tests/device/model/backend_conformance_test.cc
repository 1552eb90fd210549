#include "tests/device/backend_conformance.h"

#include "runtime/device/model/script.h"

namespace forebay {
namespace {

const HostKernel kKernels[] = {
    {"store", [](const Dimensions&, const Dimensions&, void* const*) { FAIL() << "a model ran a kernel"; }},
    {nullptr, nullptr}};

// Work that is held back by a closed gate runs when somebody waits for it, so kManual: kAtOnce would stand at
// the gate within call_host.
INSTANTIATE_TEST_SUITE_P(
    Model, BackendConformance,
    ::testing::Values(BackendUnderTest{
        .name = "model",
        .make = []() -> std::unique_ptr<Backend> {
          ModelBackendOptions options;
          options.granularity = 64 << 10;
          options.memory_bytes = 16 << 20;
          options.queue_limit = 64;
          return ScriptedModelBackend::create(options, {.order = ModelOrder::kManual}).value();
        },
        .queue_limit = 64,
        .module = {.host_kernels = kKernels},
        .store_kernel = "store",
        .keeps_bytes = false}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace forebay
