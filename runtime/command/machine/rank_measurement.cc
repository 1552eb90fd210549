#include "runtime/command/machine/rank_measurement.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "forebay/error.h"
#include "forebay/gloo_communicator.h"
#include "forebay/host_backend.h"
#include "forebay/kernels.h"
#include "forebay/log.h"
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
    const int host = find_host(measured);
    measured.kernel_bytes_per_second = kernel_rate(dtype, bytes);
    measured.copy_bytes_per_second = copy_rate(bytes);
    if (measured.ranks == 1) return measured;
    if (measured.host_ranks == measured.ranks) {
      measured.within_host = measure_link(communicator_, measured.kernel_bytes_per_second);
    } else if (measured.host_ranks == 1) {
      measured.between_hosts = measure_link(communicator_, measured.kernel_bytes_per_second);
    } else {
      measured.within_host =
          measure_link(*value_or_throw(communicator_.split(host, 0)), measured.kernel_bytes_per_second);
      measured.between_hosts = measure_link(*value_or_throw(communicator_.split(place_on_host_, 0)),
                                            measured.kernel_bytes_per_second);
    }
    const double barrier = seconds([&] { throw_if_error(communicator_.barrier()); });
    measured.control_seconds = barrier / (2 * std::bit_width(static_cast<std::uint64_t>(measured.ranks) - 1));
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

  // The first rank of this rank's host. Fills in the ranks of a host.
  int find_host(RankMeasurement& measured) {
    using Boot = std::array<char, 64>;
    Boot mine{};
    std::ifstream("/proc/sys/kernel/random/boot_id").read(mine.data(), mine.size() - 1);
    std::vector<Boot> all(static_cast<std::size_t>(communicator_.size()));
    throw_if_error(
        communicator_.exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))));
    const auto end_of_lower = all.begin() + communicator_.rank();
    place_on_host_ = static_cast<int>(std::count(all.begin(), end_of_lower, mine));
    measured.host_ranks = static_cast<int>(std::count(all.begin(), all.end(), mine));
    for (const Boot& other : all) {
      const auto others = std::count(all.begin(), all.end(), other);
      if (others != measured.host_ranks)
        throw Error(StatusCode::kInvalidArgument, "one host has " + std::to_string(measured.host_ranks) +
                                                      " ranks and another has " + std::to_string(others) +
                                                      "; start the same number on each host");
    }
    return static_cast<int>(std::find(all.begin(), all.end(), mine) - all.begin());
  }

  // A reduce-scatter and an all-gather of slices of `bytes`, less the kernel that adds the slices.
  LinkMeasurement measure_link(Communicator& link, double kernel_bytes_per_second) {
    const auto size = static_cast<std::uint64_t>(link.size());
    const auto peers = static_cast<double>(size - 1);
    const Block block(backend_, size * kLargeBytes);
    const Block received(backend_, link.staging_bytes(kLargeBytes / sizeof(float), DataType::kFloat32));
    throw_if_error(backend_.fill_async(block.data(), 0, size * kLargeBytes, stream_));
    double rounds = 0;
    const auto move = [&](std::uint64_t bytes) {
      return seconds([&, bytes] {
        ++rounds;
        std::byte* const mine = block.data() + static_cast<std::size_t>(link.rank()) * bytes;
        throw_if_error(link.reduce_scatter({.source = block.data(),
                                            .source_stride_bytes = bytes,
                                            .count = bytes / sizeof(float),
                                            .type = DataType::kFloat32,
                                            .receive = received.data(),
                                            .target = reinterpret_cast<float*>(mine),
                                            .first = true},
                                           stream_));
        throw_if_error(link.all_gather(
            {.source = mine, .target = block.data(), .target_stride_bytes = bytes, .bytes = bytes}, stream_));
      });
    };
    const double small = move(kSmallBytes);
    rounds = 0;
    const double before = processor_seconds();
    const double large = move(kLargeBytes);
    const double adding = static_cast<double>((size + 1) * kLargeBytes) / kernel_bytes_per_second;
    const double spent = mean(processor_seconds() - before) - rounds * adding;
    const double moved = 2 * static_cast<double>(kLargeBytes) * peers;
    // On a busy machine small collectives may take longer than large ones.
    const double carrying = std::max(large - small - adding, large / 2);
    if (carrying > large - small - adding && communicator_.rank() == 0) {
      log(LogLevel::kWarning,
          "the link's bandwidth is a guess: collectives of %llu KiB take %.3g ms, and of %llu KiB %.3g ms; "
          "is the machine busy? Measure again with more --seconds",
          static_cast<unsigned long long>(kSmallBytes >> 10), small * 1e3,
          static_cast<unsigned long long>(kLargeBytes >> 10), large * 1e3);
    }
    return {.bytes_per_second = moved / carrying,
            .latency_seconds = small / (2 * peers),
            .processor_seconds_per_byte = std::max(spent, 0.0) / (rounds * moved)};
  }

  Communicator& communicator_;
  Backend& backend_;
  const std::unique_ptr<Kernels> kernels_;
  const Stream stream_;
  const std::chrono::nanoseconds duration_;  // Each measurement's.
  int place_on_host_ = 0;
};

// A rank's answer to the parent.
struct Answer {
  bool ok = false;
  RankMeasurement measured;
  char message[512] = {};
};
static_assert(std::is_trivially_copyable_v<Answer>);
constexpr auto kAnswerBytes = static_cast<ssize_t>(sizeof(Answer));

RankMeasurement measure(Communicator& communicator, Backend& backend, const RankRequest& request) {
  constexpr int kMeasurements = 5;
  RankBench bench(communicator, backend, request.duration / kMeasurements);
  const RankMeasurement measured = bench.run(request.dtype, request.bytes);
  throw_if_error(communicator.barrier());
  return measured;
}

Answer measure_rank(int rank, int ranks, LinkKind link, const RankRequest& request,
                    const std::string& store) {
  Answer answer;
  try {
    const std::unique_ptr<HostBackend> backend = value_or_throw(HostBackend::create({.poison = false}));
    const ProcessOptions process{.rank = rank, .size = ranks, .store = store};
    const std::unique_ptr<Communicator> communicator =
        value_or_throw(link == LinkKind::kShm ? create_shm_communicator(process, *backend)
                                              : create_gloo_communicator(process, *backend));
    answer.measured = measure(*communicator, *backend, request);
    answer.ok = true;
  } catch (const std::exception& error) {
    std::string(error.what()).copy(answer.message, sizeof(answer.message) - 1);
  }
  return answer;
}

}  // namespace

Result<RankMeasurement> measure_ranks(int ranks, LinkKind link, const RankRequest& request) {
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
      const Answer answer = measure_rank(rank, ranks, link, request, store);
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

Result<std::unique_ptr<LaunchedRanks>> LaunchedRanks::join(const ProcessOptions& place, bool tcp) {
  std::unique_ptr<LaunchedRanks> ranks(new LaunchedRanks);
  FOREBAY_ASSIGN_OR_RETURN(ranks->backend_, HostBackend::create({.poison = false}));
  FOREBAY_ASSIGN_OR_RETURN(ranks->communicator_, tcp ? create_gloo_communicator(place, *ranks->backend_)
                                                     : create_process_communicator(place, *ranks->backend_));
  return ranks;
}

LinkKind LaunchedRanks::link() const {
  return communicator_->name() == std::string_view("shm") ? LinkKind::kShm : LinkKind::kGloo;
}

Result<RankMeasurement> LaunchedRanks::measure(const Result<RankRequest>& request) {
  measured_ = true;
  struct Word {
    bool ok = false;
    RankRequest request;
  };
  static_assert(std::is_trivially_copyable_v<Word>);
  Word mine;
  if (request.ok()) mine = {true, request.value()};
  std::vector<Word> all(static_cast<std::size_t>(communicator_->size()));
  FOREBAY_RETURN_IF_ERROR(
      communicator_->exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all))));
  if (!all.front().ok) {
    if (communicator_->rank() == 0) return request.status();
    return Status(StatusCode::kUnavailable, "rank 0 measures nothing; its message says why");
  }
  try {
    return forebay::measure(*communicator_, *backend_, all.front().request);
  } catch (const Error& error) {
    return error.status();
  }
}

}  // namespace forebay
