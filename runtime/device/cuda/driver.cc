#include "runtime/device/cuda/driver.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>

namespace forebay {
namespace {

using cuda::CuResult;

constexpr const char* kVariable = "FOREBAY_LIBCUDA";
constexpr const char* kDefaultLibrary = "libcuda.so.1";

// A page that fork gives the child empty: one load tells the child from its parent, without a system call and
// without a handler that would outlive us. Where the kernel cannot do that, the process's number is compared.
class ForkMark {
 public:
  void set() noexcept {
    if (page_.load(std::memory_order_acquire) != nullptr ||
        process_.load(std::memory_order_relaxed) == ::getpid()) {
      return;
    }
    const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    void* page = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page != MAP_FAILED && ::madvise(page, bytes, MADV_WIPEONFORK) == 0) {
      auto* mark = static_cast<volatile unsigned char*>(page);
      *mark = 1;
      volatile unsigned char* none = nullptr;
      if (page_.compare_exchange_strong(none, mark, std::memory_order_acq_rel)) return;
    } else {
      process_.store(::getpid(), std::memory_order_relaxed);
    }
    if (page != MAP_FAILED) ::munmap(page, bytes);
  }

  bool is_child() const noexcept {
    if (const volatile unsigned char* mark = page_.load(std::memory_order_acquire)) return *mark == 0;
    const pid_t process = process_.load(std::memory_order_relaxed);
    return process != 0 && process != ::getpid();
  }

 private:
  std::atomic<volatile unsigned char*> page_{nullptr};
  std::atomic<pid_t> process_{0};
};

constinit ForkMark fork_mark;
constinit std::atomic<const CudaDriver*> loaded_driver{nullptr};

// How an entry point is found: by name and version where the driver has cuGetProcAddress, else by symbol.
struct Resolver {
  using ByVersion = CuResult(const char*, void**, int, std::uint64_t, cuda::CuProcAddressQueryResult*);
  using ByVersion11 = CuResult(const char*, void**, int, std::uint64_t);

  explicit Resolver(void* opened) noexcept
      : library(opened),
        by_version(reinterpret_cast<ByVersion*>(::dlsym(opened, "cuGetProcAddress_v2"))),
        by_version_11(reinterpret_cast<ByVersion11*>(::dlsym(opened, "cuGetProcAddress"))) {}

  void* find(const char* name, const char* symbol, int version) const noexcept {
    void* function = nullptr;
    CuResult result = CuResult::kNotFound;
    if (by_version != nullptr) {
      cuda::CuProcAddressQueryResult found = cuda::CuProcAddressQueryResult::kSuccess;
      result = by_version(name, &function, version, cuda::kProcAddressDefault, &found);
    } else if (by_version_11 != nullptr) {
      result = by_version_11(name, &function, version, cuda::kProcAddressDefault);
    }
    if (result == CuResult::kSuccess && function != nullptr) return function;
    return ::dlsym(library, symbol);
  }

  void* library;
  ByVersion* by_version;
  ByVersion11* by_version_11;
};

std::string path_of(void* library, const char* name) {
  link_map* map = nullptr;
  if (::dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_name != nullptr &&
      map->l_name[0] != '\0') {
    return map->l_name;
  }
  return name;
}

// Adds "NAME=value", once in the life of the process, unless there is a variable of that name. Other threads
// may be reading the environment, and setenv would free the list that they walk along; here the old list
// stays.
void add_to_environment(const char* name, char* variable) {
  static std::atomic<bool> is_added{false};
  static char** list = nullptr;  // Kept, as `variable` is.
  if (std::getenv(name) != nullptr || is_added.exchange(true)) return;
  char** const before = __atomic_load_n(&environ, __ATOMIC_ACQUIRE);
  std::size_t count = 0;
  while (before != nullptr && before[count] != nullptr) ++count;
  list = new char*[count + 2];
  std::copy_n(before, count, list);
  list[count] = variable;
  list[count + 1] = nullptr;
  __atomic_store_n(&environ, list, __ATOMIC_RELEASE);
}

// Hardware queues that the driver gives the process, before it starts: the most there are. A stream that
// waits for the host holds back the streams of its queue, and 8 queues, the driver's default, are fewer than
// a rank has streams. A user's own choice stays. Where the driver runs already, as in a program that uses
// CUDA itself, the variable is not touched: it would do nothing.
void ask_for_connections(const Resolver& resolver) {
  using Question = CuResult(cuda::CuDevice*);
  auto* const ask = reinterpret_cast<Question*>(resolver.find("cuCtxGetDevice", "cuCtxGetDevice", 2000));
  cuda::CuDevice device = 0;
  if (ask == nullptr || ask(&device) != CuResult::kNotInitialized) return;
  static char variable[] = "CUDA_DEVICE_MAX_CONNECTIONS=32";
  add_to_environment("CUDA_DEVICE_MAX_CONNECTIONS", variable);
}

Result<const CudaDriver*> load() {
  const char* chosen = std::getenv(kVariable);
  const bool is_chosen = chosen != nullptr && chosen[0] != '\0';
  const char* name = is_chosen ? chosen : kDefaultLibrary;
  void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    const std::string found = std::string(": ") + (why == nullptr ? "it cannot be opened" : why);
    return Status(StatusCode::kUnavailable,
                  is_chosen ? "cannot open the CUDA driver that " + std::string(kVariable) + " names" +
                                  found + "; correct or unset it"
                            : "cannot open the CUDA driver" + found +
                                  "; install NVIDIA's driver, or use the host backend");
  }
  const Resolver resolver(library);
  const std::string try_this =
      is_chosen
          ? "have " + std::string(kVariable) + " name a driver for CUDA 11.4 or newer (470), or unset it"
          : "install a driver for CUDA 11.4 or newer (470), or use the host backend";
  auto driver = std::make_unique<CudaDriver>();
  driver->path = path_of(library, name);
#define FOREBAY_CUDA_RESOLVE(name, called, version, parameters)                                           \
  driver->called = reinterpret_cast<cuda::called##_function*>(resolver.find(#name, #called, version));    \
  if (driver->called == nullptr) {                                                                        \
    return Status(StatusCode::kUnsupported,                                                               \
                  "cannot use the CUDA driver " + driver->path + ": it has no " #called "; " + try_this); \
  }
  FOREBAY_CUDA_CALLED(FOREBAY_CUDA_RESOLVE)
#undef FOREBAY_CUDA_RESOLVE
#define FOREBAY_CUDA_RESOLVE(name, called, version, parameters) \
  driver->called = reinterpret_cast<cuda::called##_function*>(resolver.find(#name, #called, version));
  FOREBAY_CUDA_OPTIONAL(FOREBAY_CUDA_RESOLVE)
#undef FOREBAY_CUDA_RESOLVE
  ask_for_connections(resolver);
  const CudaDriver* none = nullptr;
  if (loaded_driver.compare_exchange_strong(none, driver.get(), std::memory_order_acq_rel)) {
    return const_cast<const CudaDriver*>(driver.release());  // For the life of the process.
  }
  return none;  // Another thread was faster.
}

const char* table_name(CuResult result) noexcept {
  switch (result) {
#define FOREBAY_CUDA_NAME(name, real, value) \
  case CuResult::name:                       \
    return #real;
    FOREBAY_CUDA_RESULTS(FOREBAY_CUDA_NAME)
#undef FOREBAY_CUDA_NAME
  }
  return nullptr;
}

struct Meaning {
  StatusCode code;
  const char* try_this;
};

Meaning meaning(CuResult result) noexcept {
  if (is_context_lost(result)) {
    return {StatusCode::kInternal,
            "work queued earlier has failed and the CUDA context is lost; end the process, and run it under "
            "compute-sanitizer to find that work"};
  }
  switch (result) {
    case CuResult::kOutOfMemory:
      return {StatusCode::kOutOfMemory, "free some device memory, or ask for less"};
    case CuResult::kInvalidValue:
    case CuResult::kInvalidHandle:
    case CuResult::kInvalidDevice:
    case CuResult::kNotFound:
    case CuResult::kNotMapped:
    case CuResult::kAlreadyMapped:
    case CuResult::kLaunchOutOfResources:
      return {StatusCode::kInvalidArgument, "check the arguments"};
    case CuResult::kInvalidContext:
    case CuResult::kContextIsDestroyed:
      return {StatusCode::kInvalidArgument,
              "check that the handle belongs to this device and that its context was not reset"};
    case CuResult::kHostMemoryAlreadyRegistered:
      return {StatusCode::kInvalidArgument, "pin each page once; another part of the program has pinned it"};
    case CuResult::kHostMemoryNotRegistered:
      return {StatusCode::kInvalidArgument, "give the address that was pinned, once"};
    case CuResult::kInvalidImage:
    case CuResult::kInvalidPtx:
    case CuResult::kInvalidSource:
      return {StatusCode::kInvalidArgument, "give a cubin, fatbin or PTX image that is whole"};
    case CuResult::kNoBinaryForGpu:
    case CuResult::kUnsupportedPtxVersion:
    case CuResult::kJitCompilerNotFound:
    case CuResult::kJitCompilationDisabled:
      return {StatusCode::kUnsupported,
              "compile the image for this device's architecture, or install a newer driver"};
    case CuResult::kNotSupported:
    case CuResult::kCallRequiresNewerDriver:
    case CuResult::kPeerAccessUnsupported:
      return {StatusCode::kUnsupported, "this device or driver cannot do it; install a newer driver"};
    case CuResult::kNoDevice:
      return {StatusCode::kUnavailable, "see nvidia-smi and CUDA_VISIBLE_DEVICES, or use the host backend"};
    case CuResult::kNotInitialized:
      return {StatusCode::kUnavailable, "do not use CUDA after fork; start the process anew"};
    case CuResult::kDeinitialized:
      return {StatusCode::kUnavailable, "the process is ending; finish with CUDA before main returns"};
    case CuResult::kDeviceUnavailable:
      return {StatusCode::kUnavailable, "another process may hold the device exclusively; see nvidia-smi"};
    case CuResult::kSystemNotReady:
    case CuResult::kSystemDriverMismatch:
    case CuResult::kCompatNotSupportedOnDevice:
    case CuResult::kStubLibrary:
    case CuResult::kDeviceNotLicensed:
    case CuResult::kMpsConnectionFailed:
    case CuResult::kMpsRpcFailure:
    case CuResult::kMpsServerNotReady:
    case CuResult::kMpsMaxClientsReached:
    case CuResult::kMpsMaxConnectionsReached:
      return {StatusCode::kUnavailable, "see that the driver is installed and running (nvidia-smi)"};
    case CuResult::kStreamCaptureUnsupported:
    case CuResult::kStreamCaptureInvalidated:
    case CuResult::kStreamCaptureIsolation:
    case CuResult::kStreamCaptureImplicit:
    case CuResult::kStreamCaptureWrongThread:
    case CuResult::kCapturedEvent:
      return {StatusCode::kUnavailable, "a CUDA graph is being captured; do this outside the capture"};
    case CuResult::kNotPermitted:
      return {StatusCode::kInternal, "a host function must not call the driver"};
    case CuResult::kTimeout:
      return {StatusCode::kTimeout, "see the system log (dmesg) for the device's state"};
    case CuResult::kOperatingSystem:
      return {StatusCode::kIoError, "see the system's limits (ulimit -a) and its log (dmesg)"};
    default:
      return {StatusCode::kInternal, "see the CUDA driver's documentation of this error"};
  }
}

}  // namespace

bool is_context_lost(CuResult result) noexcept {
  switch (result) {
    case CuResult::kEccUncorrectable:
    case CuResult::kNvlinkUncorrectable:
    case CuResult::kContained:
    case CuResult::kIllegalAddress:
    case CuResult::kLaunchTimeout:
    case CuResult::kAssert:
    case CuResult::kHardwareStackError:
    case CuResult::kIllegalInstruction:
    case CuResult::kMisalignedAddress:
    case CuResult::kInvalidAddressSpace:
    case CuResult::kInvalidPc:
    case CuResult::kLaunchFailed:
    case CuResult::kTensorMemoryLeak:
    case CuResult::kMpsClientTerminated:
    case CuResult::kExternalDevice:
      return true;
    default:
      return false;
  }
}

bool cuda_lost_in_fork() noexcept {
  return fork_mark.is_child();
}

Status cuda_fork_status(const std::string& what) {
  return Status(StatusCode::kUnavailable,
                "cannot " + what +
                    ": this process was made by fork after its parent had used CUDA, which does not survive "
                    "that; start it with exec or Python's 'spawn'");
}

std::string cuda_error_name(const CudaDriver& driver, CuResult result) {
  if (const char* name = table_name(result)) return name;
  const char* text = nullptr;
  if (driver.cuGetErrorName != nullptr && driver.cuGetErrorName(result, &text) == CuResult::kSuccess &&
      text != nullptr) {
    return text;
  }
  return "CUDA error " + std::to_string(static_cast<unsigned>(result));
}

Status cuda_failure(const CudaDriver& driver, CuResult result, const char* call, const std::string& what) {
  const Meaning known = meaning(result);
  return Status(known.code, "cannot " + what + ": " + call + ": " + cuda_error_name(driver, result) + "; " +
                                known.try_this);
}

Result<const CudaDriver*> CudaDriver::get() {
  if (cuda_lost_in_fork()) return cuda_fork_status("use the CUDA driver");
  const CudaDriver* driver = loaded_driver.load(std::memory_order_acquire);
  if (driver == nullptr) {
    Result<const CudaDriver*> loaded = load();
    if (!loaded.ok()) return loaded;
    driver = loaded.value();
  }
  // Cheap when it has been done; after a failure (a driver that is just starting) it is tried again.
  if (const CuResult result = driver->cuInit(0); result != CuResult::kSuccess) {
    return cuda_failure(*driver, result, "cuInit", "initialise the CUDA driver " + driver->path);
  }
  fork_mark.set();
  return driver;
}

}  // namespace forebay
