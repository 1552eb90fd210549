/* Prints how long the library takes to load, in milliseconds of a processor, which other programs do not
 * change: the median of several fresh processes, with the libraries of the system that it needs and alone,
 * because a program may have them already. Fails only if the library does not load. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { kRuns = 21, kNeededMax = 100 };

struct needed {
  const char* library;
  char* names[kNeededMax];
  int count;
};

static int add(struct dl_phdr_info* info, size_t size, void* argument) {
  struct needed* needed = argument;
  (void)size;
  if (info->dlpi_name[0] == '/' && strstr(info->dlpi_name, "libforebay-c") == NULL &&
      needed->count < kNeededMax)
    needed->names[needed->count++] = strdup(info->dlpi_name);
  return 0;
}

static int compare(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double load(const char* name) {
  struct timespec before, after;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  if (dlopen(name, RTLD_NOW | RTLD_LOCAL) == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    _exit(1);
  }
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  return (double)(after.tv_sec - before.tv_sec) * 1e3 + (double)(after.tv_nsec - before.tv_nsec) / 1e6;
}

/* In fresh processes; libraries are loaded in reverse order, those that need no others first. */
static double median(const struct needed* needed, int count) {
  double times[kRuns];
  for (int run = 0; run < kRuns; ++run) {
    int ends[2], status = 0;
    if (pipe(ends) != 0) exit(1);
    const pid_t child = fork();
    if (child == 0) {
      for (int i = count - 1; i >= 0; --i) load(needed->names[i]);
      const double taken = load(needed->library);
      _exit(write(ends[1], &taken, sizeof(taken)) == sizeof(taken) ? 0 : 1);
    }
    if (waitpid(child, &status, 0) != child || status != 0) exit(1);
    if (read(ends[0], &times[run], sizeof(times[run])) != sizeof(times[run])) exit(1);
    close(ends[0]);
    close(ends[1]);
  }
  qsort(times, kRuns, sizeof(times[0]), compare);
  return times[kRuns / 2];
}

int main(int argc, char** argv) {
  struct needed needed = {argc > 1 ? argv[1] : NULL, {0}, 0};
  if (argc < 2) return 2;
  if (argc == 2) {
    printf("loaded in %.2f ms of a processor with the libraries that it needs\n", median(&needed, 0));
    /* A new process, since this one and its children have the library from here on. */
    char* arguments[kNeededMax + 3] = {argv[0], argv[1]};
    load(needed.library);
    dl_iterate_phdr(add, &needed);
    for (int i = 0; i < needed.count; ++i) arguments[i + 2] = needed.names[i];
    fflush(stdout);
    execv("/proc/self/exe", arguments);
    return 1;
  }
  for (int i = 2; i < argc && needed.count < kNeededMax; ++i) needed.names[needed.count++] = argv[i];
  printf("loaded in %.2f ms alone\n", median(&needed, needed.count));
  return 0;
}
