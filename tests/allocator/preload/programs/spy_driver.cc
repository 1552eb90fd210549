// A libcuda.so.1 that writes down every look-up and from which library it came, and passes it on to the
// driver that SPY_DRIVER names. The list goes to SPY_LOG: a line for each, with name, version, flags and the
// asking library.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/fakes/cuda/abi.h"

namespace {

using namespace forebay::cuda;  // NOLINT

void* driver() {
  static void* const opened = ::dlopen(std::getenv("SPY_DRIVER"), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) std::abort();
  return opened;
}

void write_down(const char* name, int version, std::uint64_t flags, void* caller) {
  Dl_info info{};
  const std::string path = ::dladdr(caller, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "?";
  static std::FILE* const log = std::fopen(std::getenv("SPY_LOG"), "a");
  std::fprintf(log, "%s %d %llu %s\n", name[0] != '\0' ? name : "(empty)", version,
               static_cast<unsigned long long>(flags), path.substr(path.rfind('/') + 1).c_str());
  std::fflush(log);
}

// It answers with its own function, so that later look-ups also come here.
void* place_of(const char* name, int version, void* found);

}  // namespace

// Asked for by name by the runtime of toolkit 13.2, before everything else.
extern "C" [[gnu::visibility("default")]] CuResult cuDriverGetVersion(int* version) {
  static auto* const real =
      reinterpret_cast<cuDriverGetVersion_function*>(::dlsym(driver(), "cuDriverGetVersion"));
  return real(version);
}

extern "C" [[gnu::visibility("default")]] CuResult cuGetProcAddress(const char* name, void** function,
                                                                    int version, std::uint64_t flags) {
  write_down(name, version, flags, __builtin_return_address(0));
  static auto* const real =
      reinterpret_cast<cuGetProcAddress_function*>(::dlsym(driver(), "cuGetProcAddress"));
  const CuResult result = real(name, function, version, flags);
  if (result == CuResult::kSuccess) *function = place_of(name, version, *function);
  return result;
}

extern "C" [[gnu::visibility("default")]] CuResult cuGetProcAddress_v2(const char* name, void** function,
                                                                       int version, std::uint64_t flags,
                                                                       CuProcAddressQueryResult* found) {
  write_down(name, version, flags, __builtin_return_address(0));
  static auto* const real =
      reinterpret_cast<cuGetProcAddress_v2_function*>(::dlsym(driver(), "cuGetProcAddress_v2"));
  const CuResult result = real(name, function, version, flags, found);
  if (result == CuResult::kSuccess) *function = place_of(name, version, *function);
  return result;
}

namespace {

void* place_of(const char* name, int version, void* found) {
  if (found == nullptr || std::strcmp(name, "cuGetProcAddress") != 0) return found;
  return version >= 12000 ? reinterpret_cast<void*>(&cuGetProcAddress_v2)
                          : reinterpret_cast<void*>(&cuGetProcAddress);
}

}  // namespace
