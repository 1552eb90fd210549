#include "trainer/training.h"

#include <chrono>
#include <cstdio>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "forebay/gloo_communicator.h"
#include "forebay/local_communicator.h"
#include "forebay/shm_communicator.h"
#include "model/host_operations.h"
#include "output/files.h"
#include "output/output_file.h"
#include "trainer/rank_setup.h"
#include "trainer/trainer.h"

namespace forebay::gpt {
namespace {

// Writes the last operations of a failed rank. A failure to write must not hide the failure of the rank.
void write_flight_record(const TrainerOptions& options, const Communicator& communicator) {
  try {
    write_file(flight_file(options, communicator.rank()),
               flight_json(communicator.status(), communicator.last_operations()),
               OutputFile::Links::kReplace);
  } catch (const Error& error) {
    std::fprintf(stderr, "forebay-gpt: %s\n", error.status().message().c_str());
  }
}

TrainingReport train_rank(const TrainerOptions& options, Rank& rank) {
  if (uses_nccl(options.communicator)) go_over_nccl(options, rank);
  const LaunchEnvironment& place = rank.place;
  const auto fail = [&](const Status& cause) {
    rank.communicator->abort(place.size > 1 ? cause.with_context("rank " + std::to_string(place.rank))
                                            : cause);
    if (!options.flight_recorder.empty()) write_flight_record(options, *rank.communicator);
  };
  try {
    set_compute_threads(rank.threads);  // The products are prepared on this thread.
    return Trainer(options, rank).train();
  } catch (const Error& error) {
    fail(error.status());
    // This rank may have seen only the consequence of another's failure. The communicator has the first
    // failure.
    if (error.code() == StatusCode::kPeerLost && !rank.communicator->status().ok())
      throw Error(rank.communicator->status());
    throw;
  } catch (const std::exception& error) {
    const Status cause(StatusCode::kInternal, error.what());
    fail(cause);
    throw Error(cause);
  }
}

// The failure to show: the first that is not merely the loss of another rank.
const Error* first_failure(const std::vector<std::pair<int, Error>>& failures) {
  for (const auto& [rank, error] : failures) {
    if (error.code() != StatusCode::kPeerLost) return &error;
  }
  return failures.empty() ? nullptr : &failures.front().second;
}

// The ranks of run_training(): threads that begin together or not at all, and the first failure among them.
class RankThreads {
 public:
  RankThreads(const std::vector<TrainerOptions>& by_rank, std::vector<Rank>& ranks)
      : by_rank_(by_rank), ranks_(ranks) {}

  // Runs rank 0 on the calling thread. Errors: throws Error.
  TrainingReport run() {
    const int size = static_cast<int>(ranks_.size());
    std::vector<std::thread> threads;
    std::promise<bool> all_started;
    const std::shared_future<bool> may_run = all_started.get_future().share();
    const auto join = [&] {
      for (std::thread& thread : threads) thread.join();
    };
    try {
      for (int rank = 1; rank < size; ++rank) {
        threads.emplace_back([this, may_run, rank] {
          if (may_run.get()) run_rank(rank);
        });
      }
    } catch (const std::exception& error) {
      all_started.set_value(false);
      join();
      throw Error(StatusCode::kUnavailable, "cannot start a thread for each of " + std::to_string(size) +
                                                " ranks: " + error.what() +
                                                "; start fewer, or raise ulimit -u or -v");
    }
    all_started.set_value(true);
    run_rank(0);
    join();
    if (const Error* failure = first_failure(failures_)) throw *failure;
    return report_;
  }

 private:
  void run_rank(int rank) {
    const auto index = static_cast<std::size_t>(rank);
    try {
      const TrainingReport mine = train_rank(by_rank_[index], ranks_[index]);
      if (rank == 0) report_ = mine;
    } catch (const Error& error) {
      const std::lock_guard lock(mutex_);
      failures_.emplace_back(rank, error);
    }
  }

  const std::vector<TrainerOptions>& by_rank_;
  std::vector<Rank>& ranks_;
  TrainingReport report_;  // Rank 0's.
  std::mutex mutex_;
  std::vector<std::pair<int, Error>> failures_;  // In the order of time. Guarded by mutex_.
};

}  // namespace

TrainingReport run_training(const TrainerOptions& options) {
  return run_training(std::vector<TrainerOptions>(static_cast<std::size_t>(options.ranks), options));
}

TrainingReport run_training(const std::vector<TrainerOptions>& by_rank) {
  const int size = static_cast<int>(by_rank.size());
  LocalOptions group_options;
  group_options.deadline = std::chrono::seconds(by_rank.front().deadline_seconds);
  const std::shared_ptr<LocalGroup> group = LocalGroup::create(size, group_options);

  // All ranks open before the first one starts, so that none waits for a rank that could not open.
  std::vector<Rank> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(open_rank(
        by_rank[static_cast<std::size_t>(rank)],
        {.rank = rank, .size = size, .local_rank = rank, .local_size = size},
        [&](Backend& backend, Kernels& kernels) { return group->communicator(rank, backend, kernels); }));
  }
  return RankThreads(by_rank, ranks).run();
}

TrainingReport run_training_rank(const TrainerOptions& options, const LaunchEnvironment& environment) {
  const ProcessOptions process{.rank = environment.rank,
                               .size = environment.size,
                               .store = environment.store,
                               .interface = environment.interface,
                               .configuration = configuration_of(options),
                               .deadline = std::chrono::seconds(options.deadline_seconds),
                               .join_deadline = std::chrono::seconds(options.join_deadline_seconds)};
  Rank rank = open_rank(options, environment, [&](Backend& backend, Kernels&) {
    Result<std::unique_ptr<Communicator>> joined =
        options.communicator == "shm"    ? create_shm_communicator(process, backend)
        : options.communicator == "gloo" ? create_gloo_communicator(process, backend)
                                         : create_process_communicator(process, backend);
    if (!joined.ok()) throw JoinError(joined.status());
    return joined;
  });
  return train_rank(options, rank);
}

}  // namespace forebay::gpt
