// Compares shm with the memory bandwidth, in turns: reduce_scatter and all_gather among processes, each
// beside the same loads and stores through the same slots without waits (so with a wrong result).
//
//   shm_bench [RANKS [MIB [ROUNDS]]]        2 ranks, 64 MiB of fp32 in all on each, 21 rounds
//
// Prints the median over rounds of the slowest rank's time, for each, and the median of the rounds'
// quotients. Buffers are private memory that was written before. With more ranks than processors, it measures
// the scheduler.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "forebay/host_backend.h"
#include "forebay/host_gradients.h"
#include "forebay/shm_communicator.h"
#include "tests/bench/ranks.h"

namespace forebay {
namespace {

// The sizes that shm uses.
constexpr std::size_t kSlotBytes = 512u << 10;
constexpr std::size_t kSlotCount = 4;

class Bench {
 public:
  Bench(Communicator& communicator, HostBackend& backend, std::byte* slots, std::size_t bytes)
      : communicator_(communicator),
        backend_(backend),
        slots_(slots),
        rank_(static_cast<std::size_t>(communicator.rank())),
        ranks_(static_cast<std::size_t>(communicator.size())),
        count_(bytes / sizeof(float) / ranks_),
        stream_(value_or_throw(backend.stream_create())),
        whole_(count_ * ranks_, 1.0f),
        gathered_(count_ * ranks_, 2.0f),
        sum_(count_, 3.0f) {}
  ~Bench() { static_cast<void>(backend_.stream_destroy(stream_)); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void reduce_scatter() {
    std::byte unused{};
    throw_if_error(communicator_.reduce_scatter({.source = bytes_of(whole_),
                                                 .source_stride_bytes = slice_bytes(),
                                                 .count = count_,
                                                 .type = DataType::kFloat32,
                                                 .receive = &unused,
                                                 .target = sum_.data(),
                                                 .first = true},
                                                stream_));
    finish();
  }
  void all_gather() {
    throw_if_error(communicator_.all_gather({.source = bytes_of(sum_),
                                             .target = bytes_of(gathered_),
                                             .target_stride_bytes = slice_bytes(),
                                             .bytes = slice_bytes()},
                                            stream_));
    finish();
  }

  // The same traffic, on arbitrary contents of the slots.
  void reduce_scatter_loads_and_stores() {
    const std::size_t piece = kSlotBytes / ranks_ / 64 * 64;
    for (std::size_t at = 0, round = 0; at < slice_bytes(); at += piece, ++round) {
      const std::size_t bytes = std::min(piece, slice_bytes() - at);
      for (std::size_t r = 0; r < ranks_; ++r) {
        if (r != rank_)
          std::memcpy(slot(rank_, round) + r * piece, bytes_of(whole_) + r * slice_bytes() + at, bytes);
      }
      throw_if_error(host_accumulate({.own = bytes_of(whole_) + rank_ * slice_bytes() + at,
                                      .received = slot(0, round) + rank_ * piece,
                                      .received_stride_bytes = kSlotCount * kSlotBytes,
                                      .target = sum_.data() + at / sizeof(float),
                                      .count = bytes / sizeof(float),
                                      .rank = static_cast<int>(rank_),
                                      .rank_count = static_cast<int>(ranks_),
                                      .type = DataType::kFloat32,
                                      .first = true}));
    }
  }
  void all_gather_loads_and_stores() {
    for (std::size_t at = 0, round = 0; at < slice_bytes(); at += kSlotBytes, ++round) {
      const std::size_t bytes = std::min(kSlotBytes, slice_bytes() - at);
      std::memcpy(slot(rank_, round), bytes_of(sum_) + at, bytes);
      for (std::size_t r = 0; r < ranks_; ++r) {
        if (r != rank_) std::memcpy(bytes_of(gathered_) + r * slice_bytes() + at, slot(r, round), bytes);
      }
    }
    std::memcpy(bytes_of(gathered_) + rank_ * slice_bytes(), bytes_of(sum_), slice_bytes());
  }

  double measure(void (Bench::*function)()) {
    return bench::slowest_ms(communicator_, [&] { (this->*function)(); });
  }

 private:
  static std::byte* bytes_of(std::vector<float>& values) {
    return reinterpret_cast<std::byte*>(values.data());
  }
  std::size_t slice_bytes() const { return count_ * sizeof(float); }
  std::byte* slot(std::size_t rank, std::size_t round) const {
    return slots_ + (rank * kSlotCount + round % kSlotCount) * kSlotBytes;
  }
  void finish() {
    throw_if_error(backend_.stream_synchronize(stream_));
    throw_if_error(communicator_.status());
  }

  Communicator& communicator_;
  HostBackend& backend_;
  std::byte* const slots_;
  const std::size_t rank_, ranks_, count_;
  const Stream stream_;
  std::vector<float> whole_, gathered_, sum_;
};

void run_rank(int rank, int size, std::size_t bytes, int rounds, const std::string& store, std::byte* slots) {
  const std::unique_ptr<HostBackend> backend = value_or_throw(HostBackend::create({}));
  const std::unique_ptr<Communicator> communicator =
      value_or_throw(create_shm_communicator({.rank = rank, .size = size, .store = store}, *backend));
  Bench measured(*communicator, *backend, slots, bytes);
  struct Pair {
    const char* name;
    void (Bench::*measured)();
    void (Bench::*bare)();
  };
  for (const Pair& pair :
       {Pair{"reduce_scatter", &Bench::reduce_scatter, &Bench::reduce_scatter_loads_and_stores},
        Pair{"all_gather", &Bench::all_gather, &Bench::all_gather_loads_and_stores}}) {
    const bench::Paired times = bench::measure_in_turns(
        rounds, [&] { return measured.measure(pair.measured); }, [&] { return measured.measure(pair.bare); });
    if (rank == 0) {
      std::printf("%-14s  %d ranks  %zu MiB  shm %.2f ms  loads and stores %.2f ms  quotient %.3f\n",
                  pair.name, size, bytes >> 20, bench::median(times.one_ms), bench::median(times.other_ms),
                  bench::median(times.quotients));
    }
  }
}

int run(int size, std::size_t bytes, int rounds) {
  void* slots = mmap(nullptr, static_cast<std::size_t>(size) * kSlotCount * kSlotBytes,
                     PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (slots == MAP_FAILED) return 1;
  std::memset(slots, 0, static_cast<std::size_t>(size) * kSlotCount * kSlotBytes);
  return bench::run_ranks("shm_bench", size, [&](int rank, const std::string& directory) {
    run_rank(rank, size, bytes, rounds, directory, static_cast<std::byte*>(slots));
  });
}

}  // namespace
}  // namespace forebay

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 2;
  const int mib = argc > 2 ? std::atoi(argv[2]) : 64;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 21;
  if (size < 2 || size > forebay::kShmRanksMax || mib < 1 || rounds < 1) {
    std::fprintf(stderr, "usage: shm_bench [RANKS [MIB [ROUNDS]]], at least 2 ranks, 1 MiB and 1 round\n");
    return 2;
  }
  return forebay::run(size, static_cast<std::size_t>(mib) << 20, rounds);
}
