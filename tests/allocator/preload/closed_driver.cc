// A libcuda.so.1 that a program opens and closes again before it opens the one it works with. What it was
// asked for must not be called any more.
#include <cstddef>

extern "C" [[gnu::visibility("default")]] int cuInit(unsigned) {
  return 999;
}

extern "C" [[gnu::visibility("default")]] int cuMemGetInfo_v2(std::size_t*, std::size_t*) {
  return 999;
}
