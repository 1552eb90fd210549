/* Preloaded: the fsync() or fdatasync() of the process tree with the number FAILING_FSYNC fails with ENOSPC, as on a disk that is full when
   the blocks are chosen. The file FAILING_FSYNC_COUNT counts them, one byte each. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static int fails(void) {
  const char* name = getenv("FAILING_FSYNC_COUNT");
  const char* chosen = getenv("FAILING_FSYNC");
  struct stat status;
  int file = name == NULL ? -1 : open(name, O_WRONLY | O_APPEND | O_CLOEXEC);
  if (file < 0) return 0;
  if (write(file, "x", 1) != 1 || fstat(file, &status) != 0) abort();
  close(file);
  return chosen != NULL && status.st_size == atol(chosen);
}

int fsync(int file) {
  if (fails()) return errno = ENOSPC, -1;
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}

int fdatasync(int file) {
  if (fails()) return errno = ENOSPC, -1;
  return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(file);
}
