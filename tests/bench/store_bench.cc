// Compares a file store with its drive, in turns: MiB/s of large writes and reads, beside plain loops that
// write and read one block after the other in the same file system, and beside fio where it is installed.
//
//   store_bench DIRECTORY [MIB [ROUNDS [BLOCK_KIB [DEPTH]]]]
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "forebay/file_store.h"
#include "tests/bench/fio.h"

namespace forebay {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kDeadline{60'000};

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

struct Candidate {
  std::string name;
  std::function<void(bool write)> run;
  std::vector<double> seconds[2];  // Reading, writing.
  std::vector<double> cpu[2];
};

// One file, one block at a time.
class PlainLoop {
 public:
  PlainLoop(const std::string& directory, std::byte* memory, std::size_t bytes, std::size_t block_bytes)
      : memory_(memory), bytes_(bytes), block_bytes_(block_bytes) {
    file_ = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
    if (file_ < 0 || ::fallocate(file_, 0, 0, static_cast<off_t>(bytes)) != 0) {
      throw Error(StatusCode::kIoError, "the plain loop has no file: " + std::string(std::strerror(errno)));
    }
  }
  ~PlainLoop() { ::close(file_); }

  void run(bool write) {
    for (std::size_t at = 0; at < bytes_; at += block_bytes_) {
      const auto offset = static_cast<off_t>(at);
      const ssize_t moved = write ? ::pwrite(file_, memory_ + at, block_bytes_, offset)
                                  : ::pread(file_, memory_ + at, block_bytes_, offset);
      if (moved != static_cast<ssize_t>(block_bytes_))
        throw Error(StatusCode::kIoError, "the plain loop stopped short");
    }
  }

 private:
  std::byte* memory_;
  std::size_t bytes_;
  std::size_t block_bytes_;
  int file_ = -1;
};

int run(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: store_bench DIRECTORY [MIB [ROUNDS [BLOCK_KIB [DEPTH]]]]\n");
    return 2;
  }
  const auto number = [&](int index, unsigned long otherwise) {
    return argc > index ? std::strtoul(argv[index], nullptr, 10) : otherwise;
  };
  const std::string directory = argv[1];
  const std::size_t bytes = number(2, 1024) << 20;
  const unsigned long rounds = number(3, 9);
  FileStoreOptions options;
  options.directories = {directory};
  options.block_bytes = number(4, 4096) << 10;
  options.depth = static_cast<unsigned>(number(5, options.depth));

  void* mapped =
      ::mmap(nullptr, bytes + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw Error(StatusCode::kOutOfMemory, "no memory for the buffer");
  auto* const memory = reinterpret_cast<std::byte*>(
      (reinterpret_cast<std::uintptr_t>(mapped) + (2 << 20) - 1) & ~std::uintptr_t{(2 << 20) - 1});
  ::madvise(memory, bytes, MADV_HUGEPAGE);
  for (std::size_t i = 0; i < bytes; i += 8) {
    const std::uint64_t value = i * 0x9E3779B97F4A7C15u;
    std::memcpy(memory + i, &value, 8);
  }

  std::vector<Candidate> candidates;
  const auto plain = std::make_shared<PlainLoop>(directory, memory, bytes, options.block_bytes);
  candidates.push_back({"plain loop", [plain](bool write) { plain->run(write); }, {}, {}});
  const auto add = [&](const std::string& name, FileEngine engine, bool checksums) {
    options.engine = engine;
    options.checksums = checksums;
    auto made = make_file_store(options);
    if (!made.ok()) {
      std::printf("%s: %s\n", name.c_str(), made.status().message().c_str());
      return;
    }
    const std::shared_ptr<Store> store = std::move(made).value();
    throw_if_error(store->register_memory(memory, bytes));
    const StoreRange range = value_or_throw(store->create_range("bench", bytes));
    std::printf("%s: %s\n", name.c_str(), store->facts().description.c_str());
    candidates.push_back({name,
                          [=](bool write) {
                            const StoreTicket ticket =
                                value_or_throw(write ? store->write(range, 0, memory, bytes)
                                                     : store->read(range, 0, memory, bytes));
                            throw_if_error(store->wait(ticket, kDeadline));
                          },
                          {},
                          {}});
  };
  add("io_uring", FileEngine::kIoUring, false);
  add("io_uring, checksums", FileEngine::kIoUring, true);
  add("threads", FileEngine::kThreads, false);
  add("threads, checksums", FileEngine::kThreads, true);

  std::unique_ptr<bench::Fio> fio;
  if (bench::Fio::is_there()) {
    fio = std::make_unique<bench::Fio>(directory, bytes, options.block_bytes, options.depth);
    candidates.push_back({"fio", [&](bool write) { fio->run(write); }, {}, {}});
  }

  for (Candidate& candidate : candidates) candidate.run(true);  // First writes are slower.
  for (unsigned long round = 0; round < rounds; ++round) {
    for (const bool write : {true, false}) {
      for (Candidate& candidate : candidates) {
        if (candidate.name == "fio") {
          const bench::Fio::Figures figures = fio->run(write);
          candidate.seconds[write].push_back(figures.seconds);
          candidate.cpu[write].push_back(figures.cpu_seconds);
          continue;
        }
        const double cpu = cpu_seconds();
        const Clock::time_point begin = Clock::now();
        candidate.run(write);
        candidate.seconds[write].push_back(std::chrono::duration<double>(Clock::now() - begin).count());
        candidate.cpu[write].push_back(cpu_seconds() - cpu);
      }
    }
  }

  const double mib = static_cast<double>(bytes) / (1 << 20);
  // The reference: fio, or else the plain loop.
  const Candidate& yardstick = fio != nullptr ? candidates.back() : candidates.front();
  std::printf("ratios to %s\n%zu MiB, blocks of %zu KiB, depth %u, %lu rounds; medians\n",
              yardstick.name.c_str(), bytes >> 20, options.block_bytes >> 10, options.depth, rounds);
  std::printf("%-22s %12s %7s %10s %12s %7s %10s\n", "", "write MiB/s", "ratio", "CPU s/GiB", "read MiB/s",
              "ratio", "CPU s/GiB");
  for (const Candidate& candidate : candidates) {
    std::printf("%-22s", candidate.name.c_str());
    for (const bool write : {true, false}) {
      std::vector<double> ratios;
      for (std::size_t i = 0; i < rounds; ++i) {
        ratios.push_back(yardstick.seconds[write][i] / candidate.seconds[write][i]);
      }
      std::printf(" %12.0f %7.3f %10.4f", mib / median(candidate.seconds[write]), median(ratios),
                  median(candidate.cpu[write]) / (mib / 1024));
    }
    std::printf("\n");
  }
  std::printf("ratios of all rounds:\n");
  for (const Candidate& candidate : candidates) {
    std::printf("%-22s", candidate.name.c_str());
    for (const bool write : {true, false}) {
      const auto rounds_of = [&](std::size_t i) {
        return yardstick.seconds[write][i] / candidate.seconds[write][i];
      };
      for (std::size_t i = 0; i < rounds; ++i)
        std::printf(" %s%.2f", i == 0 ? (write ? "write " : "read ") : "", rounds_of(i));
    }
    std::printf("\n");
  }
  ::munmap(mapped, bytes + (2 << 20));
  return 0;
}

}  // namespace
}  // namespace forebay

int main(int argc, char** argv) {
  try {
    return forebay::run(argc, argv);
  } catch (const forebay::Error& error) {
    std::fprintf(stderr, "store_bench: %s\n", error.what());
    return 1;
  }
}
