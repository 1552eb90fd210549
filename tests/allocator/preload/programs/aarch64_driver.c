/* As much of a driver as the front end's doors can be tried with, in C: there may be no C++ for that
 * processor. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

int cuInit(unsigned flags) {
  return flags == 0 ? 0 : 1;
}

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  *address = 4096 + bytes;
  return 0;
}

int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, unsigned* found) {
  (void)version;
  (void)flags;
  (void)found;
  *function = strcmp(name, "cuMemAlloc") == 0 ? (void*)cuMemAlloc_v2 : NULL;
  return *function != NULL ? 0 : 500;
}
