// Kernels without a host build: the PTX of their image, executed.
//
// They reach device memory by its aliases, so the host's access to it does not matter.
#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/fakes/cuda/driver.h"
#include "tests/fakes/cuda/ptx/executor.h"
#include "tests/fakes/cuda/ptx/image.h"
#include "tests/fakes/cuda/ptx/parser.h"

namespace forebay::fake_cuda {
namespace {

CuResult result_of(ptx::FaultKind kind) {
  switch (kind) {
    case ptx::FaultKind::kAddress:
      return CuResult::kIllegalAddress;
    case ptx::FaultKind::kAlignment:
      return CuResult::kMisalignedAddress;
    case ptx::FaultKind::kEndless:
      return CuResult::kLaunchTimeout;
    default:
      return CuResult::kLaunchFailed;
  }
}

}  // namespace

CuResult load_program(const void* image, std::shared_ptr<const ptx::Module>* program,
                      std::string* compiler_log) {
  try {
    std::string text = ptx::text_of_image(image);
    const FakeOptions& options = driver().options;
    const int needed = ptx::needed_driver(image, options.compute_capability);
    if (needed == ptx::kNoDriver) return CuResult::kNoBinaryForGpu;
    if (needed > options.driver_version) {
      const bool is_text = !text.empty() && std::memcmp(image, text.data(), 4) == 0;
      return is_text ? CuResult::kUnsupportedPtxVersion : CuResult::kInvalidImage;
    }
    const std::vector<std::string> names = ptx::kernel_names(text);
    const auto& host = driver().kernels;
    if (std::all_of(names.begin(), names.end(),
                    [&](const std::string& name) { return host.count(name) != 0; })) {
      return CuResult::kSuccess;
    }
    *program = std::make_shared<const ptx::Module>(ptx::parse(std::move(text)));
  } catch (const ptx::Fault& fault) {
    report("the image is refused: %s", fault.what());
    *compiler_log = fault.what();
    return CuResult::kInvalidPtx;
  }
  return CuResult::kSuccess;
}

CuResult run_program(Lock& lock, Context& context, const ptx::Kernel& kernel, const FakeLaunch& launch,
                     const std::vector<std::byte>& parameters) {
  Driver& state = driver();
  ptx::GlobalMemory memory;
  std::vector<PhysicalPtr> kept;  // Memory that goes away meanwhile.
  for (const auto& [begin, mapping] : state.memory.mappings()) {
    if (!mapping.available || !accessible(context, mapping, false)) continue;
    const std::size_t bytes = mapping.kind == MappingKind::kVirtual ? mapping.bytes : mapping.requested_bytes;
    memory.add({begin, begin + bytes, mapping.physical->alias, accessible(context, mapping, true)});
    kept.push_back(mapping.physical);
  }
  for (const auto& [begin, range] : state.host_ranges) {
    if (is_mapped(range)) memory.add({begin, begin + range.bytes, reinterpret_cast<std::byte*>(begin), true});
  }
  ptx::Launch wanted;
  std::copy(std::begin(launch.grid), std::end(launch.grid), wanted.grid.begin());
  std::copy(std::begin(launch.block), std::end(launch.block), wanted.block.begin());
  wanted.dynamic_shared_bytes = launch.shared_bytes;
  lock.unlock();
  CuResult result = CuResult::kSuccess;
  std::string defect;
  try {
    ptx::execute(kernel, wanted, parameters.data(), memory);
  } catch (const ptx::Fault& fault) {
    result = result_of(fault.kind);
    defect = fault.what();
  }
  lock.lock();
  if (result == CuResult::kSuccess) return result;
  ++state.hazards;
  report("%s", defect.c_str());
  fail_context(context, result);
  return result;
}

}  // namespace forebay::fake_cuda
