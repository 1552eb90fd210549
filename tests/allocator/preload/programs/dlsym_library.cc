// A neighbour with its own dlsym, like other libraries that hook the driver: it counts, and asks the C
// library for dlsym by a symbol version.
#include <dlfcn.h>

namespace {
int calls = 0;
}

extern "C" [[gnu::visibility("default")]] int dlsym_library_calls() {
  return calls;
}

extern "C" [[gnu::visibility("default")]] void* dlsym(void* handle, const char* name) noexcept {
  using Function = void*(void*, const char*);
  Function* real = nullptr;
  static constexpr const char* kVersions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
  for (const char* version : kVersions) {
    if (real == nullptr) real = reinterpret_cast<Function*>(::dlvsym(RTLD_NEXT, "dlsym", version));
  }
  ++calls;
  return real(handle, name);
}
