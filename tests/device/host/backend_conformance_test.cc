#include "tests/device/backend_conformance.h"

#include "forebay/host_backend.h"

namespace forebay {
namespace {

const HostKernel kKernels[] = {{"store",
                                [](const Dimensions&, const Dimensions&, void* const* arguments) {
                                  **static_cast<int**>(arguments[0]) = *static_cast<int*>(arguments[1]);
                                }},
                               {nullptr, nullptr}};

INSTANTIATE_TEST_SUITE_P(Host, BackendConformance,
                         ::testing::Values(BackendUnderTest{.name = "host",
                                                            .make = []() -> std::unique_ptr<Backend> {
                                                              HostBackendOptions options;
                                                              options.granularity = 64 << 10;
                                                              options.memory_bytes = 16 << 20;
                                                              options.queue_limit = 64;
                                                              return HostBackend::create(options).value();
                                                            },
                                                            .queue_limit = 64,
                                                            .module = {.host_kernels = kKernels},
                                                            .store_kernel = "store"}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace forebay
