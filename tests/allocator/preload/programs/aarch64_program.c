/* Asks for the driver's functions and checks which library they are of: the one that is named.
     program LIBRARY */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int is_of(void* function, const char* library) {
  Dl_info info;
  if (function == NULL || dladdr(function, &info) == 0) return 0;
  const char* slash = strrchr(info.dli_fname, '/');
  return strcmp(slash != NULL ? slash + 1 : info.dli_fname, library) == 0;
}

static int fail(const char* what) {
  printf("not so: %s\n", what);
  return 1;
}

int main(int count, char** arguments) {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (count != 2 || driver == NULL) return fail("there is a driver");
  const char* const library = arguments[1];
  int (*const init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
  int (*const query)(const char*, void**, int, uint64_t, unsigned*) =
      (int (*)(const char*, void**, int, uint64_t, unsigned*))dlsym(driver, "cuGetProcAddress_v2");
  if (!is_of((void*)init, library) || !is_of((void*)query, library))
    return fail("dlsym answers with the library's");
  void* allocate = NULL;
  if (query("cuMemAlloc", &allocate, 12000, 0, NULL) != 0 || !is_of(allocate, library)) {
    return fail("cuGetProcAddress answers with the library's");
  }
  uint64_t address = 0;
  if (init(0) != 0 || init(1) != 1) return fail("cuInit answers as the driver");
  if (((int (*)(uint64_t*, size_t))allocate)(&address, 7) != 0 || address != 4103) {
    return fail("the driver allocates");
  }
  printf("%s\n", dlsym(driver, "cuNoSuchFunction") == NULL ? dlerror() : "found");
  printf("%s\n", dlsym(driver, "curl_easy_init") == NULL ? dlerror() : "found");
  int (*const calls)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "neighbour_calls");
  if (getpid() != (pid_t)syscall(SYS_getpid)) return fail("RTLD_NEXT is the next of the neighbour's");
  printf("the neighbour counted %d\n", calls());
  return 0;
}
