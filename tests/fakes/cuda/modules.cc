// Modules and launches: an image is accepted by its first bytes, and its kernels are host builds found by
// name, or its own PTX where there is no host build.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

constexpr int kLargestDynamicSharedBytes = 227 << 10;
constexpr int kUsualSharedBytes = 48 << 10;
constexpr std::size_t kArgumentAlignment = 16;

// The first bytes of an image: an ELF cubin, a fat binary, its wrapper, PTX, or the names that a build
// without nvcc embeds.
bool is_image(const void* image) {
  const auto begins = [&](const char* text, std::size_t bytes) {
    return std::memcmp(image, text, bytes) == 0;
  };
  return begins("\177ELF", 4) || begins("\120\355\125\272", 4) || begins("\261\103\142\106", 4) ||
         begins("//", 2) || begins(".version", 8) || begins("forebay kernels", 15);
}

void open_kernel_libraries() {
  Driver& state = driver();
  if (std::exchange(state.kernel_libraries_opened, true)) return;
  const char* const paths = std::getenv("FAKE_CUDA_KERNELS");
  for (std::string rest = paths != nullptr ? paths : ""; !rest.empty();) {
    const std::string path = rest.substr(0, rest.find(':'));
    rest.erase(0, std::min(rest.size(), path.size() + 1));
    if (path.empty()) continue;
    void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    auto* const kernels =
        library == nullptr
            ? nullptr
            : reinterpret_cast<FakeKernelsFunction*>(::dlsym(library, FOREBAY_FAKE_KERNELS_SYMBOL));
    if (kernels == nullptr) {
      report("FAKE_CUDA_KERNELS: %s is not a library of kernels: %s", path.c_str(), ::dlerror());
      continue;
    }
    register_kernels(*kernels());
  }
}

// One launch's arguments: their values, each at its place, and where each is.
struct Arguments {
  std::vector<std::byte> values;
  std::vector<void*> pointers;
};

// Host builds take their arguments one by one, and compiled kernels at the offsets that their text gives.
std::shared_ptr<Arguments> copy_arguments(const Function& function, void** parameters) {
  const auto arguments = std::make_shared<Arguments>();
  std::vector<std::size_t> offsets;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < function.argument_bytes.size(); ++i) {
    if (function.compiled != nullptr) bytes = function.compiled->parameters[i].offset;
    bytes = function.compiled != nullptr
                ? bytes
                : (bytes + kArgumentAlignment - 1) / kArgumentAlignment * kArgumentAlignment;
    offsets.push_back(bytes);
    bytes += function.argument_bytes[i];
  }
  arguments->values.resize(bytes);
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    std::byte* const place = arguments->values.data() + offsets[i];
    std::memcpy(place, parameters[i], function.argument_bytes[i]);
    arguments->pointers.push_back(place);
  }
  return arguments;
}

CuResult run_host_build(Lock& lock, const FakeKernel& kernel, const FakeLaunch& launch,
                        const Arguments& arguments) {
  Memory& memory = driver().memory;
  memory.enter_kernel();
  lock.unlock();
  bool called_driver = false;
  {
    const ForeignScope scope("a kernel");
    kernel.run(launch, arguments.pointers.data());
    called_driver = scope.called_driver();
  }
  lock.lock();
  memory.leave_kernel();
  return called_driver ? CuResult::kNotPermitted : CuResult::kSuccess;
}

CuResult launch(CuFunction function, const FakeLaunch& wanted, CuStream stream_handle, void** parameters,
                void** extra) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  StreamPtr stream;
  CuResult result = find_stream(stream_handle, &stream);
  if (result != CuResult::kSuccess) return result;
  const auto found = state.functions.find(function);
  if (found == state.functions.end()) return CuResult::kInvalidHandle;
  const Function& called = found->second;
  if (state.modules.at(called.module).context != stream->context) return CuResult::kInvalidContext;
  const auto& [grid, block, shared_bytes, device] = wanted;
  if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || block[0] == 0 || block[1] == 0 || block[2] == 0) {
    return CuResult::kInvalidValue;
  }
  const std::uint64_t thread_count = std::uint64_t{block[0]} * block[1] * block[2];
  if (grid[0] > 0x7FFFFFFF || grid[1] > 65535 || grid[2] > 65535 || block[2] > 64 || thread_count > 1024) {
    return CuResult::kInvalidValue;
  }
  if (called.compiled != nullptr && thread_count > called.compiled->most_threads)
    return CuResult::kInvalidValue;
  if (shared_bytes > static_cast<unsigned>(called.dynamic_shared_bytes)) return CuResult::kInvalidValue;
  if (extra != nullptr) return CuResult::kNotSupported;  // Packed arguments: ours are passed one by one.
  if (parameters == nullptr && !called.argument_bytes.empty()) return CuResult::kInvalidValue;

  const std::shared_ptr<const Arguments> arguments = copy_arguments(called, parameters);
  const char* const name = called.host != nullptr ? called.host->name : called.compiled->name.c_str();
  Operation operation;
  operation.what = name;
  // A value that is an address of device memory is taken for a pointer the kernel uses.
  for (std::size_t i = 0; i < arguments->pointers.size(); ++i) {
    for (std::size_t at = 0; at + sizeof(Address) <= called.argument_bytes[i]; at += sizeof(Address)) {
      Address address = 0;
      std::memcpy(&address, static_cast<const std::byte*>(arguments->pointers[i]) + at, sizeof(address));
      const Mapping* const mapping = state.memory.find(address);
      if (mapping == nullptr) continue;
      if (mapping->freed) {
        hazard(*stream->context, name, "memory is used after cuMemFreeAsync was called on it");
        return CuResult::kIllegalAddress;
      }
      operation.touches.push_back({mapping->begin, mapping->end()});
    }
  }
  FakeLaunch launched = wanted;
  launched.device = stream->context->device;
  operation.run = [name, host = called.host, compiled = called.compiled, launched, arguments,
                   context = stream->context, touches = operation.touches](Lock& running) {
    for (const Range& range : touches) {
      const Mapping* const mapping = driver().memory.find(range.begin);
      if (mapping == nullptr || !accessible(*context, *mapping, false) || !mapping->available) {
        hazard(*context, name, "an argument points to memory that its device cannot use when it runs");
        return CuResult::kIllegalAddress;
      }
    }
    return host != nullptr ? run_host_build(running, *host, launched, *arguments)
                           : run_program(running, *context, *compiled, launched, arguments->values);
  };
  return enqueue(stream, std::move(operation));
}

CuResult load_module(CuModule* module, const void* image, std::string* compiler_log) {
  Driver& state = driver();
  Lock lock(state.mutex);
  if (module == nullptr || image == nullptr) return CuResult::kInvalidValue;
  ContextPtr context;
  const CuResult result = current_context(&context);
  if (result != CuResult::kSuccess) return result;
  if (!is_image(image)) return CuResult::kInvalidImage;
  open_kernel_libraries();
  std::shared_ptr<const ptx::Module> program;
  const CuResult loaded = load_program(image, &program, compiler_log);
  if (loaded != CuResult::kSuccess) return loaded;
  wait_as_a_driver_may(lock);
  *module = next_handle<CuModule>();
  state.modules[*module] = {context, std::move(program)};
  return CuResult::kSuccess;
}

}  // namespace

void register_kernels(const FakeKernelTable& table) {
  for (std::size_t i = 0; i < table.count; ++i) driver().kernels[table.kernels[i].name] = &table.kernels[i];
}

CuResult cuModuleLoadData(CuModule* module, const void* image) {
  std::string compiler_log;
  return load_module(module, image, &compiler_log);
}

// The other options steer the compilation of PTX, which does not happen here.
CuResult cuModuleLoadDataEx(CuModule* module, const void* image, unsigned option_count, CuJitOption* options,
                            void** option_values) {
  std::string compiler_log;
  const CuResult result = load_module(module, image, &compiler_log);
  char* buffer = nullptr;
  std::size_t buffer_bytes = 0;
  for (unsigned i = 0; i < option_count; ++i) {
    if (options[i] == CuJitOption::kErrorLogBuffer) buffer = static_cast<char*>(option_values[i]);
    if (options[i] == CuJitOption::kErrorLogBufferSizeBytes)
      buffer_bytes = reinterpret_cast<std::uintptr_t>(option_values[i]);
  }
  if (buffer != nullptr && !compiler_log.empty()) compiler_log.copy(buffer, buffer_bytes);
  return result;
}

CuResult cuModuleUnload(CuModule module) {
  Driver& state = driver();
  Lock lock(state.mutex);
  if (state.modules.count(module) == 0) return CuResult::kInvalidHandle;
  wait_as_a_driver_may(lock);
  if (state.modules.erase(module) == 0) return CuResult::kInvalidHandle;
  std::erase_if(state.functions, [&](const auto& entry) { return entry.second.module == module; });
  return CuResult::kSuccess;
}

CuResult cuModuleGetFunction(CuFunction* function, CuModule module, const char* name) {
  Driver& state = driver();
  Lock lock(state.mutex);
  if (function == nullptr || name == nullptr) return CuResult::kInvalidValue;
  const auto loaded = state.modules.find(module);
  if (loaded == state.modules.end()) return CuResult::kInvalidHandle;
  for (const auto& [handle, known] : state.functions) {
    if (known.module == module && known.name == name) {
      *function = handle;
      return CuResult::kSuccess;
    }
  }
  Function found{module, name, {}, nullptr, nullptr, kUsualSharedBytes};
  const std::shared_ptr<const ptx::Module>& program = loaded->second.program;
  if (const auto host = state.kernels.find(name); host != state.kernels.end()) {
    found.host = host->second;
    found.argument_bytes.assign(found.host->argument_bytes,
                                found.host->argument_bytes + found.host->argument_count);
  } else if (program != nullptr && program->kernels.find(name) != program->kernels.end()) {
    found.compiled = {program, &program->kernels.find(name)->second};
    for (const ptx::Parameter& parameter : found.compiled->parameters)
      found.argument_bytes.push_back(parameter.bytes);
  } else {
    report("%s: the image has no PTX of this kernel, and there is no host build of it; %s", name,
           state.kernels.empty() ? "name the libraries that have some in FAKE_CUDA_KERNELS"
                                 : "the libraries of kernels have others");
    return CuResult::kNotFound;
  }
  // A driver that loads lazily loads the kernel here.
  wait_as_a_driver_may(lock);
  if (state.modules.count(module) == 0) return CuResult::kInvalidHandle;
  *function = next_handle<CuFunction>();
  state.functions[*function] = std::move(found);
  return CuResult::kSuccess;
}

// Host builds have no device variables.
CuResult cuModuleGetGlobal_v2(CuDevicePtr*, std::size_t*, CuModule module, const char* name) {
  const Lock lock(driver().mutex);
  if (name == nullptr) return CuResult::kInvalidValue;
  return driver().modules.count(module) == 0 ? CuResult::kInvalidHandle : CuResult::kNotFound;
}

CuResult cuFuncGetAttribute(int* value, CuFunctionAttribute attribute, CuFunction function) {
  const Lock lock(driver().mutex);
  const auto found = driver().functions.find(function);
  if (value == nullptr) return CuResult::kInvalidValue;
  if (found == driver().functions.end()) return CuResult::kInvalidHandle;
  using enum CuFunctionAttribute;
  switch (attribute) {
    case kMaxThreadsPerBlock:
      *value =
          found->second.compiled != nullptr ? static_cast<int>(found->second.compiled->most_threads) : 1024;
      break;
    case kNumRegs:
      *value = 32;
      break;
    case kPtxVersion:
    case kBinaryVersion:
      *value = 90;
      break;
    case kMaxDynamicSharedSizeBytes:
      *value = found->second.dynamic_shared_bytes;
      break;
    case kPreferredSharedMemoryCarveout:
      *value = -1;
      break;
    case kSharedSizeBytes:
      *value = found->second.compiled != nullptr ? static_cast<int>(found->second.compiled->shared_bytes) : 0;
      break;
    case kLocalSizeBytes:
      *value = found->second.compiled != nullptr ? static_cast<int>(found->second.compiled->local_bytes) : 0;
      break;
    case kConstSizeBytes:
    case kCacheModeCa:
      *value = 0;
      break;
    default:
      return CuResult::kInvalidValue;
  }
  return CuResult::kSuccess;
}

CuResult cuFuncSetAttribute(CuFunction function, CuFunctionAttribute attribute, int value) {
  const Lock lock(driver().mutex);
  const auto found = driver().functions.find(function);
  if (found == driver().functions.end()) return CuResult::kInvalidHandle;
  if (attribute == CuFunctionAttribute::kPreferredSharedMemoryCarveout) return CuResult::kSuccess;
  if (attribute != CuFunctionAttribute::kMaxDynamicSharedSizeBytes || value < 0 ||
      value > kLargestDynamicSharedBytes) {
    return CuResult::kInvalidValue;
  }
  found->second.dynamic_shared_bytes = value;
  return CuResult::kSuccess;
}

CuResult cuLaunchKernel(CuFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CuStream stream, void** parameters, void** extra) {
  const FakeLaunch wanted{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, 0};
  return launch(function, wanted, stream, parameters, extra);
}

CuResult cuLaunchKernelEx(const CuLaunchConfig* config, CuFunction function, void** parameters,
                          void** extra) {
  if (config == nullptr) return CuResult::kInvalidValue;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    // Clusters and cooperative grids need blocks that run together, which host builds do not.
    const CuLaunchAttributeId id = config->attributes[i].id;
    if (id != CuLaunchAttributeId::kIgnore && id != CuLaunchAttributeId::kPriority)
      return CuResult::kNotSupported;
  }
  const FakeLaunch wanted{{config->grid_x, config->grid_y, config->grid_z},
                          {config->block_x, config->block_y, config->block_z},
                          config->shared_bytes,
                          0};
  return launch(function, wanted, config->stream, parameters, extra);
}

}  // namespace forebay::fake_cuda
