// A libcuda.so.1 that a program opens and closes before it opens the driver it works with. Its functions must
// not be called afterwards.
#include <cstddef>

extern "C" [[gnu::visibility("default")]] int cuInit(unsigned) {
  return 999;
}

extern "C" [[gnu::visibility("default")]] int cuMemGetInfo_v2(std::size_t*, std::size_t*) {
  return 999;
}
