// gpu-questions: asks a CUDA driver questions that its documentation leaves open and that the arena's design
// depends on: the cost of mapping memory, the calls that wait, and the operations allowed on mapped memory
// and under capture.
//
//   gpu-questions [--quick] [--json FILE] [--limit-s SECONDS] [NAME...]     asks all questions, or some
//   gpu-questions --list
//
// Each question runs in its own process with a time limit, because some end in an error that breaks the
// context, and some might hang. The driver is FOREBAY_LIBCUDA, or libcuda.so.1. Prints the answers as text.
// Exits with 1 if a question got no answer.
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/fakes/cuda/abi.h"

namespace {

using namespace forebay::cuda;
using Json = nlohmann::ordered_json;

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kGiB = std::size_t{1} << 30;

// --- the driver ---------------------------------------------------

// Every entry point of the table, by its exported symbol; null if the library does not export it.
struct Driver {
#define FOREBAY_QUESTIONS_MEMBER(name, symbol, version, VARIANT, variant_version, parameters, arguments) \
  symbol##_function* symbol = nullptr;
  FOREBAY_CUDA_ENTRY_POINTS(FOREBAY_QUESTIONS_MEMBER)
#undef FOREBAY_QUESTIONS_MEMBER
  void* library = nullptr;
  int version = 0;
};

Driver driver;

const char* name_of(CuResult result) {
  switch (result) {
#define FOREBAY_QUESTIONS_NAME(name, real, value) \
  case CuResult::name:                            \
    return #real;
    FOREBAY_CUDA_RESULTS(FOREBAY_QUESTIONS_NAME)
#undef FOREBAY_QUESTIONS_NAME
  }
  return "an unknown error";
}

void check(CuResult result, const char* call) {
  if (result != CuResult::kSuccess) throw std::runtime_error(std::string(call) + ": " + name_of(result));
}
#define CHECK(call) check(driver.call, #call)

void open_driver() {
  const char* path = std::getenv("FOREBAY_LIBCUDA");
  if (path == nullptr || *path == '\0') path = "libcuda.so.1";
  driver.library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (driver.library == nullptr)
    throw std::runtime_error(std::string("there is no CUDA driver: ") + ::dlerror());
#define FOREBAY_QUESTIONS_LOAD(name, symbol, version, VARIANT, variant_version, parameters, arguments) \
  driver.symbol = reinterpret_cast<symbol##_function*>(::dlsym(driver.library, #symbol));
  FOREBAY_CUDA_ENTRY_POINTS(FOREBAY_QUESTIONS_LOAD)
#undef FOREBAY_QUESTIONS_LOAD
  if (driver.cuInit == nullptr) throw std::runtime_error(std::string(path) + " has no cuInit");
  CHECK(cuInit(0));
  CHECK(cuDriverGetVersion(&driver.version));
}

// A kernel that keeps the device busy for a time and then writes to an address, if it has one.
constexpr const char kSpin[] = R"(.version 6.0
.target sm_60
.address_size 64
.visible .entry forebay_spin(.param .u64 duration_ns, .param .u64 target)
{
  .reg .u64 %start, %now, %passed, %duration, %address;
  .reg .u32 %value;
  .reg .pred %more, %none;
  ld.param.u64 %duration, [duration_ns];
  ld.param.u64 %address, [target];
  mov.u64 %start, %globaltimer;
again:
  mov.u64 %now, %globaltimer;
  sub.u64 %passed, %now, %start;
  setp.lt.u64 %more, %passed, %duration;
  @%more bra again;
  setp.eq.u64 %none, %address, 0;
  @%none bra done;
  cvta.to.global.u64 %address, %address;
  mov.u32 %value, 1;
  st.global.u32 [%address], %value;
done:
  ret;
}
)";

// --- times --------------------------------------------------------

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

template <typename Call>
double timed_us(Call&& call) {
  const Clock::time_point start = Clock::now();
  call();
  return microseconds_since(start);
}

double rounded(double value) {
  return static_cast<double>(static_cast<long long>(value * 100 + 0.5)) / 100;
}

Json summary_us(std::vector<double> values) {
  if (values.empty()) return nullptr;
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    return rounded(values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))]);
  };
  return {{"count", values.size()},
          {"min_us", at(0)},
          {"median_us", at(0.5)},
          {"p90_us", at(0.9)},
          {"max_us", at(1)}};
}

// --- the device ---------------------------------------------------

bool quick = false;
constexpr const char* kConnectionsVariable = "CUDA_DEVICE_MAX_CONNECTIONS";

struct Gpu {
  CuDevice device = 0;
  CuContext context = nullptr;
  std::size_t granularity = 0;
  CuMemAllocationProp properties{};
  CuMemAccessDesc access{};

  Gpu() {
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    properties.type = CuMemAllocationType::kPinned;
    properties.location = {CuMemLocationType::kDevice, device};
    if (attribute(CuDeviceAttribute::kHandleTypePosixFileDescriptorSupported) != 0) {
      properties.requested_handle_types = CuMemHandleType::kPosixFileDescriptor;
    }
    if (attribute(CuDeviceAttribute::kGpuDirectRdmaWithCudaVmmSupported) != 0) {
      properties.flags.gpu_direct_rdma_capable = 1;
    }
    access = {{CuMemLocationType::kDevice, device}, CuMemAccessFlags::kReadWrite};
    CHECK(cuMemGetAllocationGranularity(&granularity, &properties, CuMemGranularity::kMinimum));
    // The first use of a context takes longer.
    CuDevicePtr warm = 0;
    CHECK(cuMemAlloc_v2(&warm, kMiB));
    CHECK(cuMemsetD8_v2(warm, 0, kMiB));
    CHECK(cuCtxSynchronize());
    CHECK(cuMemFree_v2(warm));
  }

  int attribute(CuDeviceAttribute which) const {
    int value = 0;
    return driver.cuDeviceGetAttribute(&value, which, device) == CuResult::kSuccess ? value : 0;
  }
  std::size_t free_bytes() const {
    std::size_t free = 0;
    std::size_t total = 0;
    CHECK(cuMemGetInfo_v2(&free, &total));
    return free;
  }
  CuStream stream() const {
    CuStream made = nullptr;
    CHECK(cuStreamCreate(&made, kStreamNonBlocking));
    return made;
  }
  CuDevicePtr reserve(std::size_t bytes) const {
    CuDevicePtr address = 0;
    CHECK(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    return address;
  }
  CuMemHandle create(std::size_t bytes) const {
    CuMemHandle handle = 0;
    CHECK(cuMemCreate(&handle, bytes, &properties, 0));
    return handle;
  }
  // One chunk of `bytes` at fresh addresses, ready for use.
  CuDevicePtr mapped(std::size_t bytes, CuMemHandle* handle = nullptr) const {
    const CuDevicePtr address = reserve(bytes);
    const CuMemHandle made = create(bytes);
    CHECK(cuMemMap(address, bytes, 0, made, 0));
    CHECK(cuMemSetAccess(address, bytes, &access, 1));
    if (handle != nullptr) *handle = made;
    return address;
  }
  CuFunction spin() const {
    CuModule module = nullptr;
    CHECK(cuModuleLoadDataEx(&module, kSpin, 0, nullptr, nullptr));
    CuFunction function = nullptr;
    CHECK(cuModuleGetFunction(&function, module, "forebay_spin"));
    return function;
  }
};

void launch_spin(CuFunction function, CuStream stream, std::uint64_t duration_ns, CuDevicePtr target) {
  void* arguments[] = {&duration_ns, &target};
  CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
}

// --- the questions ------------------------------------------------

Json ask_addresses(const Gpu&) {
  std::size_t same = 0;
  std::size_t absent = 0;
  Json different = Json::array();
  const auto compare = [&](const char* name, int version, std::uint64_t flags, const char* symbol) {
    void* found = nullptr;
    CuProcAddressQueryResult how = CuProcAddressQueryResult::kSuccess;
    const CuResult result = driver.cuGetProcAddress_v2(name, &found, version, flags, &how);
    void* exported = ::dlsym(driver.library, symbol);
    if (result != CuResult::kSuccess || found == nullptr || exported == nullptr) {
      ++absent;
    } else if (found == exported) {
      ++same;
    } else {
      different.push_back(std::string(symbol) + " of version " + std::to_string(version));
    }
  };
  for (const EntryPoint& entry : kEntryPoints) {
    compare(entry.name, entry.version, kProcAddressDefault, entry.symbol);
    if (entry.variant != StreamVariant::kNone) {
      compare(entry.name, entry.variant_version, kProcAddressPerThreadStream, entry.variant_symbol);
    }
  }
  return {{"same", same}, {"not_in_this_driver", absent}, {"different", different}};
}

Json ask_granularity(const Gpu& gpu) {
  std::size_t recommended = 0;
  CHECK(cuMemGetAllocationGranularity(&recommended, &gpu.properties, CuMemGranularity::kRecommended));
  Json reserve = Json::object();
  for (const std::size_t gib : {1, 64, 1024, 16 * 1024}) {
    CuDevicePtr address = 0;
    CuResult result = CuResult::kSuccess;
    const double us = timed_us([&] { result = driver.cuMemAddressReserve(&address, gib * kGiB, 0, 0, 0); });
    Json answer = {{"reserve_us", rounded(us)}, {"result", name_of(result)}};
    if (result == CuResult::kSuccess) {
      answer["free_us"] = rounded(timed_us([&] { CHECK(cuMemAddressFree(address, gib * kGiB)); }));
    }
    reserve[std::to_string(gib) + "_GiB"] = answer;
  }
  return {{"minimum_bytes", gpu.granularity},
          {"recommended_bytes", recommended},
          {"posix_fd", gpu.properties.requested_handle_types == CuMemHandleType::kPosixFileDescriptor},
          {"gpu_direct_rdma", gpu.properties.flags.gpu_direct_rdma_capable == 1},
          {"reservations", reserve}};
}

// The price list: each call on chunks of each size.
Json ask_costs(const Gpu& gpu) {
  Json answers = Json::object();
  const std::size_t budget = std::min<std::size_t>(gpu.free_bytes() / 2, quick ? 128 * kMiB : 8 * kGiB);
  for (const std::size_t mib : {2, 16, 32, 64, 128}) {
    const std::size_t bytes = mib * kMiB;
    const std::size_t count = std::clamp<std::size_t>(budget / bytes, 1, quick ? 4 : 64);
    const CuDevicePtr base = gpu.reserve(count * bytes);
    std::vector<CuMemHandle> handles(count);
    std::vector<double> create, map, set_access, unmap, release;
    for (std::size_t i = 0; i < count; ++i) {
      create.push_back(timed_us([&] { handles[i] = gpu.create(bytes); }));
    }
    for (std::size_t i = 0; i < count; ++i) {
      map.push_back(timed_us([&] { CHECK(cuMemMap(base + i * bytes, bytes, 0, handles[i], 0)); }));
    }
    for (std::size_t i = 0; i < count; ++i) {
      set_access.push_back(timed_us([&] { CHECK(cuMemSetAccess(base + i * bytes, bytes, &gpu.access, 1)); }));
    }
    CHECK(cuMemsetD8_v2(base, 1, count * bytes));
    CHECK(cuCtxSynchronize());
    for (std::size_t i = 0; i < count; ++i) {
      unmap.push_back(timed_us([&] { CHECK(cuMemUnmap(base + i * bytes, bytes)); }));
    }
    for (const CuMemHandle handle : handles) {
      release.push_back(timed_us([&] { CHECK(cuMemRelease(handle)); }));
    }
    CHECK(cuMemAddressFree(base, count * bytes));
    answers[std::to_string(mib) + "_MiB"] = {{"create", summary_us(create)},
                                             {"map", summary_us(map)},
                                             {"set_access", summary_us(set_access)},
                                             {"unmap", summary_us(unmap)},
                                             {"release", summary_us(release)}};
  }
  return answers;
}

// Is one call over many mappings cheaper than one call per mapping?
Json ask_batches(const Gpu& gpu) {
  Json answers = Json::object();
  const std::size_t bytes = std::max(gpu.granularity, 2 * kMiB);
  const std::size_t most = std::min<std::size_t>(gpu.free_bytes() / 4 / bytes, quick ? 64 : 1024);
  for (std::size_t count = 1; count <= most; count *= 4) {
    const CuDevicePtr base = gpu.reserve(count * bytes);
    std::vector<CuMemHandle> handles(count);
    for (CuMemHandle& handle : handles) handle = gpu.create(bytes);
    const auto map_all = [&] {
      for (std::size_t i = 0; i < count; ++i) CHECK(cuMemMap(base + i * bytes, bytes, 0, handles[i], 0));
    };
    const double map = timed_us(map_all);
    const double one_by_one = timed_us([&] {
      for (std::size_t i = 0; i < count; ++i) CHECK(cuMemSetAccess(base + i * bytes, bytes, &gpu.access, 1));
    });
    const double unmap_one_by_one = timed_us([&] {
      for (std::size_t i = 0; i < count; ++i) CHECK(cuMemUnmap(base + i * bytes, bytes));
    });
    map_all();
    const double at_once = timed_us([&] { CHECK(cuMemSetAccess(base, count * bytes, &gpu.access, 1)); });
    const double unmap_at_once = timed_us([&] { CHECK(cuMemUnmap(base, count * bytes)); });
    for (const CuMemHandle handle : handles) CHECK(cuMemRelease(handle));
    CHECK(cuMemAddressFree(base, count * bytes));
    answers[std::to_string(count) + "_mappings"] = {{"map_us", rounded(map)},
                                                    {"set_access_each_us", rounded(one_by_one)},
                                                    {"set_access_once_us", rounded(at_once)},
                                                    {"unmap_each_us", rounded(unmap_one_by_one)},
                                                    {"unmap_once_us", rounded(unmap_at_once)}};
  }
  return answers;
}

// The same chunk at two addresses: does it work, at which cost, and do both show the same bytes?
Json ask_aliases(const Gpu& gpu) {
  const std::size_t bytes = std::max(gpu.granularity, 2 * kMiB);
  const CuDevicePtr addresses = gpu.reserve(2 * bytes);
  const CuMemHandle handle = gpu.create(bytes);
  CHECK(cuMemMap(addresses, bytes, 0, handle, 0));
  CuResult second = CuResult::kSuccess;
  const double map_us = timed_us([&] { second = driver.cuMemMap(addresses + bytes, bytes, 0, handle, 0); });
  Json answer = {{"second_map", name_of(second)}, {"second_map_us", rounded(map_us)}};
  if (second != CuResult::kSuccess) return answer;
  answer["set_access_us"] =
      rounded(timed_us([&] { CHECK(cuMemSetAccess(addresses, 2 * bytes, &gpu.access, 1)); }));
  CHECK(cuMemsetD8_v2(addresses, 0x5A, bytes));
  unsigned char value = 0;
  CHECK(cuMemcpyDtoH_v2(&value, addresses + bytes + bytes - 1, 1));
  answer["shows_the_same_bytes"] = value == 0x5A;
  CHECK(cuMemUnmap(addresses, bytes));
  CHECK(cuMemcpyDtoH_v2(&value, addresses + bytes, 1));
  answer["stays_when_the_other_is_unmapped"] = value == 0x5A;
  return answer;
}

// How long does a call take while an unrelated kernel of 100 ms runs?
Json during_a_kernel(const Gpu& gpu, const std::function<void()>& call) {
  constexpr std::uint64_t kDurationNs = 100'000'000;
  const CuStream stream = gpu.stream();
  const CuFunction spin = gpu.spin();
  launch_spin(spin, stream, 1000, 0);
  CHECK(cuStreamSynchronize(stream));
  launch_spin(spin, stream, kDurationNs, 0);
  const double us = timed_us(call);
  const bool ran_on = driver.cuStreamQuery(stream) == CuResult::kNotReady;
  CHECK(cuStreamSynchronize(stream));
  return {{"us", rounded(us)}, {"waits", !ran_on}};
}

Json ask_waits(const Gpu& gpu) {
  const std::size_t bytes = std::max(gpu.granularity, 2 * kMiB);
  Json answers = Json::object();
  CuMemHandle handle = 0;
  const CuDevicePtr address = gpu.mapped(bytes, &handle);
  answers["cuMemUnmap"] = during_a_kernel(gpu, [&] { CHECK(cuMemUnmap(address, bytes)); });
  answers["cuMemMap"] = during_a_kernel(gpu, [&] { CHECK(cuMemMap(address, bytes, 0, handle, 0)); });
  answers["cuMemSetAccess"] =
      during_a_kernel(gpu, [&] { CHECK(cuMemSetAccess(address, bytes, &gpu.access, 1)); });
  CHECK(cuMemUnmap(address, bytes));
  answers["cuMemRelease"] = during_a_kernel(gpu, [&] { CHECK(cuMemRelease(handle)); });
  answers["cuMemCreate"] = during_a_kernel(gpu, [&] { handle = gpu.create(bytes); });
  CuDevicePtr plain = 0;
  answers["cuMemAlloc"] = during_a_kernel(gpu, [&] { CHECK(cuMemAlloc_v2(&plain, 64 * kMiB)); });
  answers["cuMemFree"] = during_a_kernel(gpu, [&] { CHECK(cuMemFree_v2(plain)); });
  void* host = std::aligned_alloc(4096, kMiB);
  std::memset(host, 1, kMiB);
  answers["cuMemHostRegister"] = during_a_kernel(gpu, [&] { CHECK(cuMemHostRegister_v2(host, kMiB, 0)); });
  answers["cuMemHostUnregister"] = during_a_kernel(gpu, [&] { CHECK(cuMemHostUnregister(host)); });
  std::free(host);
  void* pinned = nullptr;
  answers["cuMemHostAlloc"] = during_a_kernel(gpu, [&] { CHECK(cuMemHostAlloc(&pinned, kMiB, 0)); });
  answers["cuMemFreeHost"] = during_a_kernel(gpu, [&] { CHECK(cuMemFreeHost(pinned)); });
  CuModule module = nullptr;
  CuFunction function = nullptr;
  answers["cuModuleLoadData"] =
      during_a_kernel(gpu, [&] { CHECK(cuModuleLoadDataEx(&module, kSpin, 0, nullptr, nullptr)); });
  answers["cuModuleGetFunction"] =
      during_a_kernel(gpu, [&] { CHECK(cuModuleGetFunction(&function, module, "forebay_spin")); });
  answers["cuModuleUnload"] = during_a_kernel(gpu, [&] { CHECK(cuModuleUnload(module)); });
  CuEvent event = nullptr;
  CHECK(cuEventCreate(&event, kEventDisableTiming));
  const CuStream other = gpu.stream();
  answers["cuEventRecord"] = during_a_kernel(gpu, [&] { CHECK(cuEventRecord(event, other)); });
  answers["cuEventQuery"] = during_a_kernel(gpu, [&] { (void)driver.cuEventQuery(event); });
  return answers;
}

// Unmaps memory that a running kernel is about to write to. The call may wait, fail, or let the kernel fault.
Json ask_unmap_in_use(const Gpu& gpu) {
  const std::size_t bytes = std::max(gpu.granularity, 2 * kMiB);
  const CuDevicePtr address = gpu.mapped(bytes);
  const CuStream stream = gpu.stream();
  const CuFunction spin = gpu.spin();
  launch_spin(spin, stream, 1000, address);
  CHECK(cuStreamSynchronize(stream));
  launch_spin(spin, stream, 100'000'000, address);
  CuResult unmapped = CuResult::kSuccess;
  const double us = timed_us([&] { unmapped = driver.cuMemUnmap(address, bytes); });
  const CuResult after = driver.cuStreamSynchronize(stream);
  return {{"unmap", name_of(unmapped)},
          {"us", rounded(us)},
          {"waits", us > 50'000.0},
          {"kernel", name_of(after)}};
}

// Copies to memory that is mapped, and that nobody has access to.
Json ask_no_access(const Gpu& gpu) {
  const std::size_t bytes = std::max(gpu.granularity, 2 * kMiB);
  const CuDevicePtr address = gpu.reserve(bytes);
  CHECK(cuMemMap(address, bytes, 0, gpu.create(bytes), 0));
  const int value = 1;
  const CuResult copied = driver.cuMemcpyHtoD_v2(address, &value, sizeof(value));
  return {{"copy", name_of(copied)}, {"context_after_it", name_of(driver.cuCtxSynchronize())}};
}

// The cost of small calls that the arena makes often.
Json ask_events(const Gpu& gpu) {
  const CuStream stream = gpu.stream();
  CuEvent event = nullptr;
  std::vector<double> create, record, query, wait, context;
  for (int i = 0; i < (quick ? 20 : 500); ++i) {
    create.push_back(timed_us([&] { CHECK(cuEventCreate(&event, kEventDisableTiming)); }));
    record.push_back(timed_us([&] { CHECK(cuEventRecord(event, stream)); }));
    query.push_back(timed_us([&] { (void)driver.cuEventQuery(event); }));
    wait.push_back(timed_us([&] { CHECK(cuStreamWaitEvent(stream, event, 0)); }));
    CuContext current = nullptr;
    context.push_back(timed_us([&] { CHECK(cuCtxGetCurrent(&current)); }));
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuEventDestroy_v2(event));
  }
  return {{"cuEventCreate", summary_us(create)},
          {"cuEventRecord", summary_us(record)},
          {"cuEventQuery", summary_us(query)},
          {"cuStreamWaitEvent", summary_us(wait)},
          {"cuCtxGetCurrent", summary_us(context)}};
}

// All attributes that a library may ask of an address.
Json describe(const Gpu& gpu, CuDevicePtr address) {
  Json attributes = Json::object();
  const auto ask = [&](const char* name, CuPointerAttribute attribute) {
    std::uint64_t value[8] = {};
    const CuResult result = driver.cuPointerGetAttribute(value, attribute, address);
    if (result != CuResult::kSuccess) {
      attributes[name] = name_of(result);
    } else {
      char text[32];
      std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value[0]));
      attributes[name] = text;
    }
  };
#define FOREBAY_QUESTIONS_ASK(name, real, value) ask(#real, CuPointerAttribute::name);
  FOREBAY_CUDA_POINTER_ATTRIBUTES(FOREBAY_QUESTIONS_ASK)
#undef FOREBAY_QUESTIONS_ASK

  Json answers = {{"attributes", attributes}};
  CuDevicePtr base = 0;
  std::size_t bytes = 0;
  const CuResult range = driver.cuMemGetAddressRange_v2(&base, &bytes, address);
  answers["cuMemGetAddressRange"] =
      range == CuResult::kSuccess ? Json{{"offset", address - base}, {"bytes", bytes}} : Json(name_of(range));
  CuIpcMemHandle ipc{};
  answers["cuIpcGetMemHandle"] = name_of(driver.cuIpcGetMemHandle(&ipc, address));
  CuMemHandle retained = 0;
  const CuResult retain = driver.cuMemRetainAllocationHandle(&retained, reinterpret_cast<void*>(address));
  answers["cuMemRetainAllocationHandle"] = name_of(retain);
  if (retain == CuResult::kSuccess) {
    int descriptor = -1;
    answers["cuMemExportToShareableHandle"] = name_of(
        driver.cuMemExportToShareableHandle(&descriptor, retained, CuMemHandleType::kPosixFileDescriptor, 0));
    if (descriptor >= 0) ::close(descriptor);
    CHECK(cuMemRelease(retained));
  }
  if (driver.cuMemGetHandleForAddressRange != nullptr) {
    int descriptor = -1;
    answers["cuMemGetHandleForAddressRange"] = name_of(driver.cuMemGetHandleForAddressRange(
        &descriptor, address, gpu.granularity, CuMemRangeHandleType::kDmaBufFd, 0));
    if (descriptor >= 0) ::close(descriptor);
  }
  const unsigned on = 1;
  answers["cuPointerSetAttribute(SYNC_MEMOPS)"] =
      name_of(driver.cuPointerSetAttribute(&on, CuPointerAttribute::kSyncMemops, address));
  return answers;
}

Json ask_pointers(const Gpu& gpu) {
  const std::size_t bytes = 2 * std::max(gpu.granularity, 2 * kMiB);
  // Two chunks side by side, asked about in the middle of the second.
  const CuDevicePtr base = gpu.reserve(2 * bytes);
  for (std::size_t i = 0; i < 2; ++i) CHECK(cuMemMap(base + i * bytes, bytes, 0, gpu.create(bytes), 0));
  CHECK(cuMemSetAccess(base, 2 * bytes, &gpu.access, 1));
  CuDevicePtr plain = 0;
  CHECK(cuMemAlloc_v2(&plain, bytes));
  return {{"mapped_chunk_start", describe(gpu, base + bytes)},
          {"mapped_chunk_middle", describe(gpu, base + bytes + bytes / 2)},
          {"cuMemAlloc", describe(gpu, plain)}};
}

// The identity of a buffer, before and after other memory is mapped at its address.
Json ask_buffer_id(const Gpu& gpu) {
  const std::size_t bytes = std::max(gpu.granularity, 2 * kMiB);
  const CuDevicePtr address = gpu.reserve(bytes);
  const CuMemHandle first = gpu.create(bytes);
  const CuMemHandle second = gpu.create(bytes);
  const auto id = [&](CuMemHandle handle) -> Json {
    CHECK(cuMemMap(address, bytes, 0, handle, 0));
    CHECK(cuMemSetAccess(address, bytes, &gpu.access, 1));
    std::uint64_t value = 0;
    const CuResult result = driver.cuPointerGetAttribute(&value, CuPointerAttribute::kBufferId, address);
    CHECK(cuMemUnmap(address, bytes));
    return result == CuResult::kSuccess ? Json(value) : Json(name_of(result));
  };
  const Json before = id(first);
  const Json same_chunk = id(first);
  const Json other_chunk = id(second);
  return {{"first", before},
          {"same_chunk_mapped_again", same_chunk},
          {"other_chunk", other_chunk},
          {"changes_when_mapped_again", before != same_chunk},
          {"changes_with_the_chunk", same_chunk != other_chunk}};
}

// The result of each call while a stream of this thread is being captured, and does the capture survive?
Json ask_capture(const Gpu& gpu) {
  const std::size_t bytes = std::max(gpu.granularity, 2 * kMiB);
  const CuStream captured = gpu.stream();
  const CuStream other = gpu.stream();
  const CuDevicePtr spare = gpu.reserve(bytes);
  const CuMemHandle chunk = gpu.create(bytes);
  void* host = std::aligned_alloc(4096, kMiB);
  std::memset(host, 1, kMiB);
  CuEvent event = nullptr;
  CHECK(cuEventCreate(&event, kEventDisableTiming));
  CHECK(cuEventRecord(event, other));
  CuDevicePtr plain = 0;
  CuMemHandle made = 0;
  std::size_t free = 0;
  std::size_t total = 0;
  CuStream stream = nullptr;
  CuEvent fresh = nullptr;

  // Each call prepares the next one. After a refusal, the code in between restores the state.
  const std::vector<std::pair<const char*, std::function<CuResult()>>> calls = {
      {"cuMemCreate", [&] { return driver.cuMemCreate(&made, bytes, &gpu.properties, 0); }},
      {"cuMemRelease", [&] { return made != 0 ? driver.cuMemRelease(made) : CuResult::kInvalidValue; }},
      {"cuMemMap", [&] { return driver.cuMemMap(spare, bytes, 0, chunk, 0); }},
      {"cuMemSetAccess", [&] { return driver.cuMemSetAccess(spare, bytes, &gpu.access, 1); }},
      {"cuMemUnmap", [&] { return driver.cuMemUnmap(spare, bytes); }},
      {"cuMemGetInfo", [&] { return driver.cuMemGetInfo_v2(&free, &total); }},
      {"cuMemAlloc", [&] { return driver.cuMemAlloc_v2(&plain, kMiB); }},
      {"cuMemFree", [&] { return plain != 0 ? driver.cuMemFree_v2(plain) : CuResult::kInvalidValue; }},
      {"cuMemHostRegister", [&] { return driver.cuMemHostRegister_v2(host, kMiB, 0); }},
      {"cuMemHostUnregister", [&] { return driver.cuMemHostUnregister(host); }},
      {"cuStreamCreate", [&] { return driver.cuStreamCreate(&stream, kStreamNonBlocking); }},
      {"cuEventCreate", [&] { return driver.cuEventCreate(&fresh, kEventDisableTiming); }},
      {"cuEventQuery(of another stream)", [&] { return driver.cuEventQuery(event); }},
      {"cuEventRecord(on another stream)", [&] { return driver.cuEventRecord(event, other); }},
      {"cuEventSynchronize(of another stream)", [&] { return driver.cuEventSynchronize(event); }},
      {"cuStreamQuery(another)", [&] { return driver.cuStreamQuery(other); }},
      {"cuStreamSynchronize(another)", [&] { return driver.cuStreamSynchronize(other); }},
      {"cuStreamSynchronize(captured)", [&] { return driver.cuStreamSynchronize(captured); }},
      {"cuCtxSynchronize", [&] { return driver.cuCtxSynchronize(); }},
  };

  const auto ask_in = [&](CuCaptureMode mode, bool relax_thread) {
    Json answers = Json::object();
    for (const auto& [name, call] : calls) {
      CHECK(cuStreamBeginCapture_v2(captured, mode));
      CuCaptureMode thread_mode = CuCaptureMode::kRelaxed;
      if (relax_thread) CHECK(cuThreadExchangeStreamCaptureMode(&thread_mode));
      const CuResult result = call();
      if (relax_thread) CHECK(cuThreadExchangeStreamCaptureMode(&thread_mode));
      CuGraph graph = nullptr;
      const CuResult end = driver.cuStreamEndCapture(captured, &graph);
      if (graph != nullptr) CHECK(cuGraphDestroy(graph));
      answers[name] = {{"result", name_of(result)},
                       {"capture", end == CuResult::kSuccess ? "goes on" : name_of(end)}};
      // Does the refused call's work now, because the next call needs it.
      if (result != CuResult::kSuccess) (void)call();
    }
    return answers;
  };
  Json answers = {{"global", ask_in(CuCaptureMode::kGlobal, false)},
                  {"thread_local", ask_in(CuCaptureMode::kThreadLocal, false)},
                  {"relaxed", ask_in(CuCaptureMode::kRelaxed, false)},
                  {"global_with_a_relaxed_thread", ask_in(CuCaptureMode::kGlobal, true)}};
  std::free(host);
  return answers;
}

// Pinned memory: its cost, its benefit, and may a copy cross two pinned ranges?
Json ask_pinned(const Gpu& gpu) {
  Json answers = Json::object();
  const std::size_t bytes = quick ? 16 * kMiB : 512 * kMiB;
  const CuStream stream = gpu.stream();
  CuDevicePtr device = 0;
  CHECK(cuMemAlloc_v2(&device, bytes));
  for (const bool huge : {false, true}) {
    auto* host = static_cast<unsigned char*>(std::aligned_alloc(2 * kMiB, bytes));
    ::madvise(host, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    Json answer;
    answer["touch_us"] = rounded(timed_us([&] { std::memset(host, 1, bytes); }));
    const auto gigabytes_per_second = [&](const std::function<void()>& copy) {
      copy();
      double best_us = 1e30;
      for (int i = 0; i < 5; ++i) {
        best_us = std::min(best_us, timed_us([&] {
                             copy();
                             CHECK(cuStreamSynchronize(stream));
                           }));
      }
      return rounded(static_cast<double>(bytes) / best_us / 1000);
    };
    const auto up = [&] { CHECK(cuMemcpyHtoDAsync_v2(device, host, bytes, stream)); };
    const auto down = [&] { CHECK(cuMemcpyDtoHAsync_v2(host, device, bytes, stream)); };
    answer["pageable_to_device_GB_s"] = gigabytes_per_second(up);
    answer["pageable_to_host_GB_s"] = gigabytes_per_second(down);
    answer["lock_us"] = rounded(timed_us([&] { CHECK(cuMemHostRegister_v2(host, bytes, 0)); }));
    answer["to_device_GB_s"] = gigabytes_per_second(up);
    answer["to_host_GB_s"] = gigabytes_per_second(down);
    answer["unlock_us"] = rounded(timed_us([&] { CHECK(cuMemHostUnregister(host)); }));
    // Two adjacent pinned halves.
    CHECK(cuMemHostRegister_v2(host, bytes / 2, 0));
    CHECK(cuMemHostRegister_v2(host + bytes / 2, bytes / 2, 0));
    answer["copy_across_two_locked_ranges"] =
        name_of(driver.cuMemcpyHtoDAsync_v2(device, host, bytes, stream));
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuMemHostUnregister(host));
    CHECK(cuMemHostUnregister(host + bytes / 2));
    std::free(host);
    answers[huge ? "huge_pages" : "small_pages"] = answer;
  }
  answers["bytes"] = bytes;
  return answers;
}

// The bandwidth of the fastest copy on the device, the limit for kernels.
Json ask_bandwidth(const Gpu& gpu) {
  const std::size_t bytes = quick ? 8 * kMiB : std::min<std::size_t>(4 * kGiB, gpu.free_bytes() / 4);
  CuDevicePtr source = 0;
  CuDevicePtr target = 0;
  CHECK(cuMemAlloc_v2(&source, bytes));
  CHECK(cuMemAlloc_v2(&target, bytes));
  const CuStream stream = gpu.stream();
  double best_us = 1e30;
  for (int i = 0; i < 10; ++i) {
    best_us = std::min(best_us, timed_us([&] {
                         CHECK(cuMemcpyDtoDAsync_v2(target, source, bytes, stream));
                         CHECK(cuStreamSynchronize(stream));
                       }));
  }
  return {{"bytes", bytes},
          {"read_and_written_GB_s", rounded(2.0 * static_cast<double>(bytes) / best_us / 1000)}};
}

// --- the order of work, and rules of which the documentation leaves the consequence open ---

// A flag that a host function sets, or waits for. The wait ends by itself, so no driver hangs.
struct Gate {
  std::atomic<bool> is_open{false};
  std::atomic<bool> timed_out{false};
  std::chrono::milliseconds limit{1000};

  static void open(void* gate) { static_cast<Gate*>(gate)->is_open = true; }
  static void wait(void* of) {
    auto* gate = static_cast<Gate*>(of);
    const Clock::time_point deadline = Clock::now() + gate->limit;
    while (!gate->is_open) {
      if (Clock::now() > deadline) {
        gate->timed_out = true;
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
};

// Host functions that wait for each other end only where the driver runs them at the same time.
Json ask_host_functions(const Gpu& gpu) {
  Gate gate;
  const CuStream first = gpu.stream();
  const CuStream second = gpu.stream();
  CHECK(cuLaunchHostFunc(first, Gate::wait, &gate));
  CHECK(cuLaunchHostFunc(second, Gate::open, &gate));
  CHECK(cuStreamSynchronize(second));
  CHECK(cuStreamSynchronize(first));
  return {{"serialised", gate.timed_out.load()}};
}

// Pairs of a host function and an event behind a kernel, until a call blocks.
Json ask_queue_depth(const Gpu& gpu) {
  constexpr double kBlockedUs = 100'000;
  const std::uint64_t held_ns = quick ? 300'000'000 : 2'000'000'000;
  const int most = quick ? 128 : 8192;
  const CuStream held = gpu.stream();
  const CuStream other = gpu.stream();
  const CuFunction spin = gpu.spin();
  CuEvent event = nullptr;
  CHECK(cuEventCreate(&event, kEventDisableTiming));
  launch_spin(spin, other, 1000, 0);
  CHECK(cuStreamSynchronize(other));
  launch_spin(spin, held, held_ns, 0);
  std::atomic<int> pairs{0};
  std::atomic<bool> done{false};
  double launch_us = 0;
  std::thread beside([&] {
    CHECK(cuCtxSetCurrent(gpu.context));
    int seen = -1;
    while (!done && seen != pairs) {
      seen = pairs;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    launch_us = timed_us([&] { launch_spin(spin, other, 1000, 0); });
  });
  double slowest_us = 0;
  int before_it_blocked = -1;
  Gate gate;
  for (int i = 0; i < most && before_it_blocked < 0; ++i) {
    const double us = timed_us([&] {
      CHECK(cuLaunchHostFunc(held, Gate::open, &gate));
      CHECK(cuEventRecord(event, held));
    });
    slowest_us = std::max(slowest_us, us);
    if (us > kBlockedUs) before_it_blocked = i;
    pairs = i + 1;
  }
  done = true;
  beside.join();
  CHECK(cuStreamSynchronize(held));
  return {{"pairs_queued", pairs.load()},
          {"blocks", before_it_blocked >= 0},
          {"pairs_before_it_blocked", before_it_blocked >= 0 ? Json(before_it_blocked) : Json(nullptr)},
          {"slowest_pair_us", rounded(slowest_us)},
          {"launch_of_another_thread_us", rounded(launch_us)}};
}

// Ten streams with a kernel each; a host function holds the first. Which others stall?
Json ask_held_stream(const Gpu& gpu) {
  const CuFunction spin = gpu.spin();
  std::vector<CuStream> streams;
  for (int i = 0; i < 10; ++i) streams.push_back(gpu.stream());
  for (const CuStream stream : streams) launch_spin(spin, stream, 1000, 0);
  CHECK(cuCtxSynchronize());
  Gate gate;
  CHECK(cuLaunchHostFunc(streams[0], Gate::wait, &gate));
  for (const CuStream stream : streams) launch_spin(spin, stream, 1000, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  Json stalled = Json::array();
  for (std::size_t i = 1; i < streams.size(); ++i) {
    if (driver.cuStreamQuery(streams[i]) == CuResult::kNotReady) stalled.push_back(i);
  }
  gate.is_open = true;
  CHECK(cuCtxSynchronize());
  const char* const connections = std::getenv(kConnectionsVariable);
  return {{"connections", connections == nullptr ? "the driver's choice" : connections},
          {"streams_stalled", stalled.size()},
          {"which", stalled}};
}

// Block b of the grid writes the 512 bytes number 2b + parity, again and again; the last value is `rounds`
// added to `value`.
constexpr const char kBlocks[] = R"(.version 6.0
.target sm_60
.address_size 64
.visible .entry forebay_blocks(.param .u64 base, .param .u32 parity, .param .u32 value, .param .u32 rounds)
{
  .reg .u64 %address, %offset;
  .reg .u32 %block, %thread, %parity, %value, %left, %word;
  .reg .pred %more;
  ld.param.u64 %address, [base];
  ld.param.u32 %parity, [parity];
  ld.param.u32 %value, [value];
  ld.param.u32 %left, [rounds];
  cvta.to.global.u64 %address, %address;
  mov.u32 %block, %ctaid.x;
  mov.u32 %thread, %tid.x;
  shl.b32 %block, %block, 1;
  add.u32 %block, %block, %parity;
  shl.b32 %block, %block, 7;
  add.u32 %word, %block, %thread;
  mul.wide.u32 %offset, %word, 4;
  add.u64 %address, %address, %offset;
again:
  add.u32 %value, %value, 1;
  st.volatile.global.u32 [%address], %value;
  sub.u32 %left, %left, 1;
  setp.ne.u32 %more, %left, 0;
  @%more bra again;
  ret;
}
)";

// Two kernels at once write alternate blocks of 512 bytes of one chunk through two aliases, and one alias is
// unmapped while the other is in use.
Json ask_alias_writes(const Gpu& gpu) {
  constexpr std::uint32_t kBlockWords = 128;
  const std::size_t bytes = quick ? std::max(gpu.granularity, 2 * kMiB) : 64 * kMiB;
  const std::uint32_t blocks = quick ? 16 : static_cast<std::uint32_t>(bytes / (2 * 512));
  const std::uint32_t rounds = quick ? 2 : 200;
  const CuDevicePtr aliases = gpu.reserve(2 * bytes);
  const CuMemHandle handle = gpu.create(bytes);
  CHECK(cuMemMap(aliases, bytes, 0, handle, 0));
  CHECK(cuMemMap(aliases + bytes, bytes, 0, handle, 0));
  CHECK(cuMemSetAccess(aliases, 2 * bytes, &gpu.access, 1));
  CHECK(cuMemsetD8_v2(aliases, 0, bytes));
  CHECK(cuCtxSynchronize());
  CuModule module = nullptr;
  CuFunction writer = nullptr;
  CHECK(cuModuleLoadDataEx(&module, kBlocks, 0, nullptr, nullptr));
  CHECK(cuModuleGetFunction(&writer, module, "forebay_blocks"));
  const CuStream streams[] = {gpu.stream(), gpu.stream()};
  constexpr std::uint32_t kValues[] = {0x10000, 0x20000};
  const auto write = [&](std::uint32_t which) {
    CuDevicePtr base = aliases + which * bytes;
    std::uint32_t parity = which, value = kValues[which], count = rounds;
    void* arguments[] = {&base, &parity, &value, &count};
    CHECK(cuLaunchKernel(writer, blocks, 1, 1, kBlockWords, 1, 1, 0, streams[which], arguments, nullptr));
  };
  const auto wrong = [&] {
    std::vector<std::uint32_t> words(std::size_t{blocks} * 2 * kBlockWords);
    CHECK(cuMemcpyDtoH_v2(words.data(), aliases + bytes, words.size() * sizeof(words[0])));
    std::size_t count = 0;
    for (std::size_t i = 0; i < words.size(); ++i) {
      if (words[i] != kValues[i / kBlockWords % 2] + rounds) ++count;
    }
    return count;
  };
  write(0);
  write(1);
  CHECK(cuCtxSynchronize());
  Json answer = {{"words_lost", wrong()}, {"words_written", std::size_t{blocks} * 2 * kBlockWords}};
  launch_spin(gpu.spin(), streams[1], 50'000'000, 0);
  write(1);
  answer["unmap_beside_use"] = name_of(driver.cuMemUnmap(aliases, bytes));
  answer["use_ended_with"] = name_of(driver.cuStreamSynchronize(streams[1]));
  answer["words_lost_after_unmap"] = wrong();
  return answer;
}

// A kernel with 32 KiB of local memory for each thread.
constexpr const char kLocal[] = R"(.version 6.0
.target sm_60
.address_size 64
.visible .entry forebay_local(.param .u64 target)
{
  .local .align 4 .b8 memory[32768];
  .reg .u64 %address, %place, %offset;
  .reg .u32 %thread, %value;
  mov.u32 %thread, %tid.x;
  mul.wide.u32 %offset, %thread, 4;
  mov.u64 %place, memory;
  add.u64 %place, %place, %offset;
  st.local.u32 [%place], %thread;
  ld.local.u32 %value, [memory+124];
  ld.param.u64 %address, [target];
  cvta.to.global.u64 %address, %address;
  add.u64 %address, %address, %offset;
  st.global.u32 [%address], %value;
  ret;
}
)";

// All memory of the device taken as an arena takes it. How much must be given back until the driver has room
// for its own work?
Json ask_room(const Gpu& gpu) {
  CuDevicePtr target = 0;
  CHECK(cuMemAlloc_v2(&target, kMiB));
  const std::size_t free_before = gpu.free_bytes();
  std::vector<std::pair<CuMemHandle, std::size_t>> taken;
  for (std::size_t bytes = 512 * kMiB; bytes >= std::max(gpu.granularity, 2 * kMiB); bytes /= 4) {
    CuMemHandle handle = 0;
    while (driver.cuMemCreate(&handle, bytes, &gpu.properties, 0) == CuResult::kSuccess) {
      taken.emplace_back(handle, bytes);
    }
  }
  std::size_t given_back = 0;
  const auto needed_for = [&](const std::function<CuResult()>& work) -> Json {
    Json answer;
    CuResult result = work();
    answer["when_full"] = name_of(result);
    const std::size_t before = given_back;
    while (result == CuResult::kOutOfMemory && !taken.empty()) {
      CHECK(cuMemRelease(taken.back().first));
      given_back += taken.back().second;
      taken.pop_back();
      result = work();
    }
    answer["bytes_given_back"] = given_back - before;
    answer["then"] = name_of(result);
    return answer;
  };
  Json answers = {{"free_before_bytes", free_before}, {"free_when_full_bytes", gpu.free_bytes()}};
  CuModule module = nullptr;
  const CuStream stream = gpu.stream();
  answers["module"] =
      needed_for([&] { return driver.cuModuleLoadDataEx(&module, kSpin, 0, nullptr, nullptr); });
  CuModule local = nullptr;
  answers["module_with_local_memory"] =
      needed_for([&] { return driver.cuModuleLoadDataEx(&local, kLocal, 0, nullptr, nullptr); });
  if (CuFunction function = nullptr;
      local != nullptr &&
      driver.cuModuleGetFunction(&function, local, "forebay_local") == CuResult::kSuccess) {
    void* arguments[] = {&target};
    answers["launch_with_local_memory"] = needed_for([&] {
      const CuResult launched =
          driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, arguments, nullptr);
      return launched == CuResult::kSuccess ? driver.cuStreamSynchronize(stream) : launched;
    });
  }
  void* cublas = nullptr;
  for (const char* name : {"libcublas.so.13", "libcublas.so.12"}) {
    if (cublas == nullptr) cublas = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  auto* create =
      cublas == nullptr ? nullptr : reinterpret_cast<int (*)(void**)>(::dlsym(cublas, "cublasCreate_v2"));
  if (create == nullptr) {
    answers["cublas"] = "not on this machine";
  } else {
    void* handle = nullptr;
    int status = 0;
    answers["cublas"] = needed_for([&] {
      status = create(&handle);
      return status == 0 ? CuResult::kSuccess : CuResult::kOutOfMemory;
    });
    answers["cublas"]["status"] = status;
  }
  answers["bytes_given_back_in_all"] = given_back;
  return answers;
}

// Copies up from ordinary memory behind a kernel: does the call block, and which bytes arrive if the source
// changes as soon as it returns?
Json ask_pageable(const Gpu& gpu) {
  constexpr auto kPageableMemoryAccess = static_cast<CuDeviceAttribute>(88);
  const CuFunction spin = gpu.spin();
  const CuStream stream = gpu.stream();
  CuDevicePtr target = 0;
  CHECK(cuMemAlloc_v2(&target, kMiB));
  Json answers = {{"pageable_memory_access", gpu.attribute(kPageableMemoryAccess)}};
  for (const std::size_t bytes : {std::size_t{4}, kMiB / 16, kMiB}) {
    std::vector<unsigned char> source(bytes, 1);
    launch_spin(spin, stream, 100'000'000, 0);
    const double us = timed_us([&] { CHECK(cuMemcpyHtoDAsync_v2(target, source.data(), bytes, stream)); });
    std::fill(source.begin(), source.end(), static_cast<unsigned char>(2));
    CHECK(cuStreamSynchronize(stream));
    unsigned char ends[2] = {};
    CHECK(cuMemcpyDtoH_v2(&ends[0], target, 1));
    CHECK(cuMemcpyDtoH_v2(&ends[1], target + bytes - 1, 1));
    answers[std::to_string(bytes) + "_bytes"] = {
        {"us", rounded(us)},
        {"blocks", us > 50'000},
        {"takes_the_bytes_at_the_call", ends[0] == 1 && ends[1] == 1}};
  }
  auto* host = static_cast<unsigned char*>(std::aligned_alloc(4096, kMiB));
  std::memset(host, 1, kMiB);
  CHECK(cuMemHostRegister_v2(host, kMiB / 2, 0));
  answers["copy_over_half_registered_memory"] =
      name_of(driver.cuMemcpyHtoDAsync_v2(target, host, kMiB, stream));
  answers["and_then"] = name_of(driver.cuStreamSynchronize(stream));
  return answers;
}

struct Question {
  const char* name;
  const char* text;
  Json (*ask)(const Gpu& gpu);
  const char* connections = nullptr;  // CUDA_DEVICE_MAX_CONNECTIONS of its process.
};

const Question kQuestions[] = {
    {"host-functions", "Does the driver run host functions of two streams at the same time?",
     ask_host_functions},
    {"queue-depth", "How many pairs of host function and event are queued before a call blocks?",
     ask_queue_depth},
    {"held-stream-8", "Which of ten streams stall when a host function holds one, with 8 connections?",
     ask_held_stream, "8"},
    {"held-stream-32", "Which of ten streams stall when a host function holds one, with 32 connections?",
     ask_held_stream, "32"},
    {"alias-writes", "Do kernels that write through two aliases of a chunk lose bytes?", ask_alias_writes},
    {"room", "How much memory must an arena leave for the driver's own work?", ask_room},
    {"pageable", "Do copies from ordinary memory wait for the stream?", ask_pageable},
    {"addresses", "Does cuGetProcAddress answer with the symbol that dlsym finds?", ask_addresses},
    {"granularity", "What are the granularities, and what does reserving addresses cost?", ask_granularity},
    {"costs", "What do create, map, set-access, unmap and release cost by chunk size?", ask_costs},
    {"batches", "Is one set-access or unmap over many mappings cheaper than one for each?", ask_batches},
    {"aliases", "May a chunk be mapped at two addresses, and at what cost?", ask_aliases},
    {"waits", "Which calls wait for a kernel that runs?", ask_waits},
    {"unmap-in-use", "What happens when memory is unmapped that a running kernel writes to?",
     ask_unmap_in_use},
    {"no-access", "What does a copy to mapped memory without access end with?", ask_no_access},
    {"events", "What do events cost?", ask_events},
    {"pointers", "What do pointer attributes, IPC and export say of mapped memory?", ask_pointers},
    {"buffer-id", "Does BUFFER_ID change when memory is mapped again?", ask_buffer_id},
    {"capture", "Which calls are allowed while a stream is captured?", ask_capture},
    {"pinned", "What does page-locking cost and bring, and may a copy cross two locked ranges?", ask_pinned},
    {"bandwidth", "What does a large copy on the device move?", ask_bandwidth},
};

// --- one process per question -------------------------------

int answer_one(const std::string& name) {
  for (const Question& question : kQuestions) {
    if (name != question.name) continue;
    Json answer;
    int status = 0;
    try {
      if (question.connections != nullptr) ::setenv(kConnectionsVariable, question.connections, 1);
      open_driver();
      answer["answer"] = question.ask(Gpu());
    } catch (const std::exception& error) {
      answer["error"] = error.what();
      status = 1;
    }
    const std::string text = answer.dump();
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
    // Not by return: after a context error, the driver's own cleanup may hang.
    std::_Exit(status);
  }
  std::fprintf(stderr, "gpu-questions: there is no question '%s'; --list names them\n", name.c_str());
  return 2;
}

struct Reply {
  Json value;
  bool answered = false;
};

Reply ask_in_child(const char* program, const Question& question, int limit_s) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return {{{"error", std::strerror(errno)}}, false};
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], STDOUT_FILENO);
    std::vector<const char*> arguments = {program, "--answer", question.name};
    if (quick) arguments.push_back("--quick");
    arguments.push_back(nullptr);
    ::execv(program, const_cast<char* const*>(arguments.data()));
    ::_exit(127);
  }
  ::close(ends[1]);
  if (child < 0) {
    ::close(ends[0]);
    return {{{"error", "no process for it"}}, false};
  }
  std::string text;
  const Clock::time_point deadline = Clock::now() + std::chrono::seconds(limit_s);
  bool late = false;
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd waiting{ends[0], POLLIN, 0};
    if (left <= 0 || ::poll(&waiting, 1, static_cast<int>(left)) <= 0) {
      late = true;
      break;
    }
    char buffer[4096];
    const ssize_t count = ::read(ends[0], buffer, sizeof(buffer));
    if (count <= 0) break;
    text.append(buffer, static_cast<std::size_t>(count));
  }
  ::close(ends[0]);
  if (late) ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (late) return {{{"error", "no answer within " + std::to_string(limit_s) + " s"}}, false};
  if (WIFSIGNALED(status)) return {{{"error", std::string("died: ") + ::strsignal(WTERMSIG(status))}}, false};
  Json value = Json::parse(text, nullptr, false);
  if (value.is_discarded()) return {{{"error", "no answer that can be read"}}, false};
  const bool answered = value.contains("answer");
  return {answered ? value["answer"] : value, answered};
}

std::string plain(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// Prints one line per innermost object, under its path.
void print(const Json& value, const std::string& path) {
  std::string line;
  if (value.is_object()) {
    for (const auto& [key, inner] : value.items()) {
      if (inner.is_object()) {
        print(inner, path.empty() ? key : path + "." + key);
      } else {
        line += (line.empty() ? "" : ", ") + key + " " + plain(inner);
      }
    }
    if (line.empty()) return;
  } else {
    line = plain(value);
  }
  std::printf("  %s%s%s\n", path.c_str(), path.empty() ? "" : ": ", line.c_str());
}

// Replaces the file at once: a reader finds the old content or the new.
bool write_file(const std::string& path, const std::string& content) {
  const std::string beside = path + ".new";
  std::ofstream file(beside);
  file << content;
  file.close();
  return file.good() && std::rename(beside.c_str(), path.c_str()) == 0;
}

int usage(const char* text) {
  std::fprintf(
      stderr,
      "gpu-questions: %s; usage: gpu-questions [--quick] [--json FILE] [--limit-s SECONDS] [NAME...]\n",
      text);
  return 2;
}

}  // namespace

int main(int argument_count, char** arguments) {
  std::vector<std::string> names;
  std::string json_path;
  std::string to_answer;
  int limit_s = 60;
  for (int i = 1; i < argument_count; ++i) {
    const std::string word = arguments[i];
    const bool has_value = i + 1 < argument_count;
    if (word == "--quick") {
      quick = true;
    } else if (word == "--list") {
      for (const Question& question : kQuestions) std::printf("%-14s %s\n", question.name, question.text);
      return 0;
    } else if (word == "--json" && has_value) {
      json_path = arguments[++i];
    } else if (word == "--limit-s" && has_value) {
      limit_s = std::atoi(arguments[++i]);
      if (limit_s <= 0) return usage("--limit-s wants seconds");
    } else if (word == "--answer" && has_value) {
      to_answer = arguments[++i];
    } else if (word.rfind("--", 0) == 0) {
      return usage(("what is " + word + "?").c_str());
    } else {
      names.push_back(word);
    }
  }
  if (!to_answer.empty()) return answer_one(to_answer);
  for (const std::string& name : names) {
    const bool known = std::any_of(std::begin(kQuestions), std::end(kQuestions),
                                   [&](const Question& question) { return name == question.name; });
    if (!known) return usage(("there is no question '" + name + "'").c_str());
  }

  Json all = Json::object();
  int unanswered = 0;
  for (const Question& question : kQuestions) {
    if (!names.empty() && std::find(names.begin(), names.end(), question.name) == names.end()) continue;
    std::printf("%s\n", question.text);
    std::fflush(stdout);
    const Reply reply = ask_in_child("/proc/self/exe", question, limit_s);
    if (!reply.answered) ++unanswered;
    print(reply.value, "");
    std::fflush(stdout);
    all[question.name] = reply.value;
    // After each answer, because the machine may be taken away before the last one.
    if (!json_path.empty() && !write_file(json_path, all.dump(1) + '\n')) {
      std::fprintf(stderr, "gpu-questions: cannot write %s\n", json_path.c_str());
      return 1;
    }
  }
  if (unanswered > 0) std::fprintf(stderr, "gpu-questions: %d questions got no answer\n", unanswered);
  return unanswered > 0 ? 1 : 0;
}
