// Run by shm_vs_mpi.py under mpirun: times MPI's reduce_scatter and all_gather of fp32. Prints the slowest
// rank's milliseconds, as medians over rounds, after 8 rounds that are not measured.
//
//   mpi_peer MIB ROUNDS
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int by_value(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int rounds = argc > 2 ? atoi(argv[2]) : 5;
  const int slice = (int)((size_t)(argc > 1 ? atoi(argv[1]) : 64) * (1 << 20) / sizeof(float) / (size_t)size);
  float* whole = malloc(sizeof(float) * (size_t)slice * (size_t)size);
  float* part = malloc(sizeof(float) * (size_t)slice);
  int* slices = malloc(sizeof(int) * (size_t)size);
  double* times = malloc(sizeof(double) * (size_t)rounds);
  for (size_t i = 0; i < (size_t)slice * (size_t)size; ++i) whole[i] = 1;
  for (int i = 0; i < slice; ++i) part[i] = 1;
  for (int r = 0; r < size; ++r) slices[r] = slice;
  static const char* const names[] = {"reduce_scatter", "reduce_scatter_block", "all_gather"};
  for (int operation = 0; operation < 3; ++operation) {
    for (int round = -8; round < rounds; ++round) {
      MPI_Barrier(MPI_COMM_WORLD);
      const double begin = MPI_Wtime();
      if (operation == 0) MPI_Reduce_scatter(whole, part, slices, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      if (operation == 1) MPI_Reduce_scatter_block(whole, part, slice, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      if (operation == 2) MPI_Allgather(part, slice, MPI_FLOAT, whole, slice, MPI_FLOAT, MPI_COMM_WORLD);
      double mine = (MPI_Wtime() - begin) * 1e3, slowest = 0;
      MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
      if (round >= 0) times[round] = slowest;
      // Keeps sums from growing.
      for (size_t i = 0; i < (size_t)slice * (size_t)size; ++i) whole[i] = 1;
      for (int i = 0; i < slice; ++i) part[i] = 1;
    }
    qsort(times, (size_t)rounds, sizeof(double), by_value);
    if (rank == 0) printf("%s %.3f\n", names[operation], times[rounds / 2]);
  }
  MPI_Finalize();
  return 0;
}
