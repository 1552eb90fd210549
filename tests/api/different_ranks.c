/* Ranks that were given different options all say so, though each ends at once after its error.
 *
 *   different_ranks COMMUNICATOR RANKS RUNS
 */
#define _XOPEN_SOURCE 700
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "forebay/forebay.h"

static void check(int32_t code) {
  if (code == FOREBAY_OK) return;
  fprintf(stderr, "%s\n", forebay_last_error());
  _exit(2);
}

static void set(forebay_options* options, const char* name, long value) {
  char text[32];
  snprintf(text, sizeof(text), "%ld", value);
  check(forebay_options_set(options, name, text));
}

/* Whether the error of this rank names the option. The process ends without destroying anything. */
static int run(const char* kind, int rank, int size, const char* store) {
  forebay_options* options;
  forebay_device* device;
  forebay_communicator* ranks;
  forebay_engine* engine;
  int32_t unit, weight;
  check(forebay_options_create(&options));
  set(options, "rank", rank);
  set(options, "size", size);
  set(options, "stage", rank == 1 ? 2 : 3);
  check(forebay_options_set(options, "store", store));
  check(forebay_options_set(options, "communicator", kind));
  check(forebay_device_open("host", options, &device));
  check(forebay_communicator_create(device, options, NULL, NULL, &ranks));
  check(forebay_engine_create(device, ranks, NULL, NULL, options, &engine));
  check(forebay_engine_add_unit(engine, "unit", 0, &unit));
  check(forebay_engine_add_parameter(engine, unit, "weight", 100, 0, 0, &weight));
  if (forebay_engine_commit(engine) == FOREBAY_INVALID_ARGUMENT &&
      strstr(forebay_last_error(), "stage is 2 on rank 1") != NULL)
    return 0;
  fprintf(stderr, "rank %d of %d: %s\n", rank, size, forebay_last_error());
  return 1;
}

static int remove_entry(const char* path, const struct stat* facts, int kind, struct FTW* at) {
  (void)facts, (void)kind, (void)at;
  return remove(path);
}

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const int size = atoi(argv[2]);
  int failed = 0;
  for (int i = 0; i < atoi(argv[3]); ++i) {
    const char* const parent = getenv("TMPDIR");
    char store[4096];
    snprintf(store, sizeof(store), "%s/different-ranks.XXXXXX", parent != NULL ? parent : "/tmp");
    if (mkdtemp(store) == NULL) return 2;
    for (int rank = 0; rank < size; ++rank) {
      if (fork() == 0) _exit(run(argv[1], rank, size, store));
    }
    for (int status = 0; wait(&status) > 0;) failed += status != 0;
    failed += nftw(store, remove_entry, 16, FTW_DEPTH | FTW_PHYS) != 0;  // The ranks left files in it.
  }
  printf("%d ranks had another error\n", failed);
  return failed != 0;
}
