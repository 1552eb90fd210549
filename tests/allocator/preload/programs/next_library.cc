// A neighbour in LD_PRELOAD: it hooks getpid, as many hook something, and finds the real one by RTLD_NEXT.
// A hook that resolves RTLD_NEXT on behalf of its caller would return this library's own function.
#include <dlfcn.h>
#include <sys/types.h>

namespace {
int calls = 0;
}

extern "C" [[gnu::visibility("default")]] int next_library_calls() {
  return calls;
}

extern "C" [[gnu::visibility("default")]] pid_t getpid() {
  ++calls;
  auto* const real = reinterpret_cast<pid_t (*)()>(::dlsym(RTLD_NEXT, "getpid"));
  if (real == nullptr || real == getpid) return -1;
  return real();
}
