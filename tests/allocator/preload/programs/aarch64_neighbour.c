/* A neighbour in LD_PRELOAD that asks for the next getpid, which dlsym tells by its caller. */
#include <dlfcn.h>
#include <sys/types.h>

static int calls;

int neighbour_calls(void) {
  return calls;
}

pid_t getpid(void) {
  pid_t (*const next)(void) = (pid_t(*)(void))dlsym((void*)-1 /* RTLD_NEXT */, "getpid");
  ++calls;
  return next();
}
