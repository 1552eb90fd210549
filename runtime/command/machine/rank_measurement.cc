#include "runtime/command/machine/rank_measurement.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "forebay/error.h"
#include "forebay/gloo_communicator.h"
#include "forebay/host_backend.h"
#include "forebay/kernels.h"
#include "forebay/pinned_pool.h"
#include "forebay/shm_communicator.h"
#include "runtime/command/machine/measured_update.h"

namespace forebay {
namespace {

using Clock = std::chrono::steady_clock;

// Rounds of which the median counts. Fewer: one interruption decides.
constexpr int kRoundsMin = 5;
// Slices of the two all-gathers: one for the latency, one for the bandwidth.
constexpr std::uint64_t kSmallBytes = 1u << 10;
constexpr std::uint64_t kLargeBytes = 2u << 20;

double processor_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Device memory of a rank, given back at the end.
class Block {
 public:
  Block(Backend& backend, std::uint64_t bytes)
      : backend_(backend), data_(value_or_throw(backend.alloc(bytes))) {}
  ~Block() { static_cast<void>(backend_.free(data_)); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  std::byte* data() const { return data_; }

 private:
  Backend& backend_;
  DevicePtr const data_;
};

class RankBench {
 public:
  RankBench(Communicator& communicator, Backend& backend, std::chrono::nanoseconds duration)
      : communicator_(communicator),
        backend_(backend),
        kernels_(value_or_throw(Kernels::create(backend, {.thread_count = 1}))),
        stream_(value_or_throw(backend.stream_create())),
        duration_(duration) {}
  ~RankBench() { static_cast<void>(backend_.stream_destroy(stream_)); }
  RankBench(const RankBench&) = delete;
  RankBench& operator=(const RankBench&) = delete;

  RankMeasurement run(DataType dtype, std::uint64_t bytes) {
    RankMeasurement measured{.ranks = communicator_.size()};
    measured.kernel_bytes_per_second = kernel_rate(dtype, bytes);
    measured.copy_bytes_per_second = copy_rate(bytes);
    if (communicator_.size() > 1) measure_link(measured);
    return measured;
  }

 private:
  // The median over rounds of the mean over ranks; all begin each round together.
  double seconds(const std::function<void()>& work) {
    std::vector<double> rounds;
    const Clock::time_point begin = Clock::now();
    for (bool more = true; more;) {
      throw_if_error(communicator_.barrier());
      const Clock::time_point start = Clock::now();
      work();
      throw_if_error(backend_.stream_synchronize(stream_));
      throw_if_error(communicator_.status());
      rounds.push_back(mean(std::chrono::duration<double>(Clock::now() - start).count()));
      const bool mine = static_cast<int>(rounds.size()) <= kRoundsMin || Clock::now() - begin < duration_;
      more = mean(mine ? 1 : 0) == 1;
    }
    rounds.erase(rounds.begin());  // Warms up.
    const auto middle = rounds.begin() + static_cast<std::ptrdiff_t>(rounds.size() / 2);
    std::nth_element(rounds.begin(), middle, rounds.end());
    return *middle;
  }
  double mean(double mine) {
    std::vector<double> all(static_cast<std::size_t>(communicator_.size()));
    throw_if_error(
        communicator_.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all))));
    double sum = 0;
    for (const double one : all) sum += one;
    return sum / static_cast<double>(all.size());
  }

  double kernel_rate(DataType dtype, std::uint64_t bytes) {
    const std::uint64_t element = 3 * sizeof(float) + element_bytes(dtype);
    const std::uint64_t count = bytes / element / kLeafCount * kLeafCount;
    const Block block(backend_, count * element);
    throw_if_error(backend_.fill_async(block.data(), 0, count * element, stream_));
    auto* const states = reinterpret_cast<float*>(block.data());
    const AdamWArguments update = measured_update(states, states + 3 * count, count, dtype);
    const double time = seconds([&] { throw_if_error(kernels_->adamw(update, stream_)); });
    return static_cast<double>(
               count * (6 * sizeof(float) + (dtype == DataType::kFloat32 ? 1 : 2) * element_bytes(dtype))) /
           time;
  }

  double copy_rate(std::uint64_t bytes) {
    const Block block(backend_, bytes);
    const std::unique_ptr<PinnedPool> pool = value_or_throw(PinnedPool::create(backend_, {.slab_bytes = 1}));
    std::byte* const host = value_or_throw(pool->allocate(bytes));
    const double time =
        seconds([&] { throw_if_error(backend_.copy_async(block.data(), host, bytes, stream_)); });
    return static_cast<double>(bytes) / time;
  }

  void measure_link(RankMeasurement& measured) {
    const auto size = static_cast<std::uint64_t>(communicator_.size());
    const auto peers = static_cast<double>(size - 1);
    const Block block(backend_, size * kLargeBytes);
    double rounds = 0;
    const auto gather = [&](std::uint64_t bytes) {
      return seconds([&, bytes] {
        ++rounds;
        const std::size_t mine = static_cast<std::size_t>(communicator_.rank()) * bytes;
        throw_if_error(communicator_.all_gather({.source = block.data() + mine,
                                                 .target = block.data(),
                                                 .target_stride_bytes = bytes,
                                                 .bytes = bytes},
                                                stream_));
      });
    };
    const double small = gather(kSmallBytes);
    rounds = 0;
    const double before = processor_seconds();
    const double large = gather(kLargeBytes);
    const double spent = mean(processor_seconds() - before);
    const auto moved = static_cast<double>(kLargeBytes) * peers;
    measured.link_bytes_per_second = moved / std::max(large - small, 1e-9);
    measured.link_latency_seconds = small / peers;
    measured.link_processor_seconds_per_byte = spent / (rounds * moved);
    const double barrier = seconds([&] { throw_if_error(communicator_.barrier()); });
    measured.control_seconds = barrier / (2 * std::bit_width(size - 1));
  }

  Communicator& communicator_;
  Backend& backend_;
  const std::unique_ptr<Kernels> kernels_;
  const Stream stream_;
  const std::chrono::nanoseconds duration_;  // Each measurement's.
};

// A rank's answer to the parent.
struct Answer {
  bool ok = false;
  RankMeasurement measured;
  char message[512] = {};
};
static_assert(std::is_trivially_copyable_v<Answer>);
constexpr auto kAnswerBytes = static_cast<ssize_t>(sizeof(Answer));

Answer measure_rank(int rank, int ranks, LinkKind link, DataType dtype, std::uint64_t bytes,
                    std::chrono::nanoseconds duration, const std::string& store) {
  Answer answer;
  try {
    const std::unique_ptr<HostBackend> backend = value_or_throw(HostBackend::create({.poison = false}));
    const ProcessOptions process{.rank = rank, .size = ranks, .store = store};
    const std::unique_ptr<Communicator> communicator =
        value_or_throw(link == LinkKind::kShm ? create_shm_communicator(process, *backend)
                                              : create_gloo_communicator(process, *backend));
    answer.measured = RankBench(*communicator, *backend, duration / 5).run(dtype, bytes);
    throw_if_error(communicator->barrier());
    answer.ok = true;
  } catch (const std::exception& error) {
    std::string(error.what()).copy(answer.message, sizeof(answer.message) - 1);
  }
  return answer;
}

}  // namespace

Result<RankMeasurement> measure_ranks(int ranks, LinkKind link, DataType dtype, std::uint64_t bytes,
                                      std::chrono::nanoseconds duration) {
  const auto failed = [](const std::string& message) {
    return Status(StatusCode::kUnavailable, "cannot measure ranks of this host: " + message);
  };
  std::string store = (std::filesystem::temp_directory_path() / "forebay-ranks-XXXXXX").string();
  int answers[2];
  if (::mkdtemp(store.data()) == nullptr || ::pipe(answers) != 0)
    return failed("no directory or pipe for them; is there room in " + store + "?");
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      const Answer answer = measure_rank(rank, ranks, link, dtype, bytes, duration, store);
      const bool told = ::write(answers[1], &answer, sizeof(answer)) == kAnswerBytes;
      ::_exit(told && answer.ok ? 0 : 1);
    }
    if (child > 0) children.push_back(child);
  }
  ::close(answers[1]);
  Answer first;  // The first failure, or any rank's figures: they are means over all.
  std::size_t answered = 0;
  for (Answer one; ::read(answers[0], &one, sizeof(one)) == kAnswerBytes; ++answered) {
    if (answered == 0 || (first.ok && !one.ok)) first = one;
  }
  ::close(answers[0]);
  for (const pid_t child : children) ::waitpid(child, nullptr, 0);
  std::error_code ignored;
  std::filesystem::remove_all(store, ignored);
  if (answered != static_cast<std::size_t>(ranks) && first.ok)
    return failed("only " + std::to_string(answered) + " of " + std::to_string(ranks) + " ended in order");
  if (!first.ok) return failed(first.message[0] != '\0' ? first.message : "none could be started");
  return first.measured;
}

}  // namespace forebay
