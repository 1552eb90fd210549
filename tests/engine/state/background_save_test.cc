// States that a thread saves while training goes on: the files and the training are those of a save that is
// waited for, and a kill at any moment leaves a whole state.

#include "runtime/engine/state/background_save.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "forebay/error.h"
#include "forebay/units.h"
#include "runtime/engine/state/state_files.h"
#include "tests/engine/toy_cases.h"
#include "tests/offload/memory_store.h"
#include "tests/support/gate.h"
#include "tests/support/let_others_run.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/thread_limit.h"

namespace forebay::testing {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// All files below a directory, by path.
std::map<std::string, std::string> contents(const std::string& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file() || entry.path().filename() == ".lock") continue;
    std::ifstream file(entry.path(), std::ios::binary);
    files[fs::relative(entry.path(), directory).string()] =
        std::string(std::istreambuf_iterator<char>(file), {});
  }
  return files;
}

class BackgroundSave : public ::testing::Test {
 protected:
  BackgroundSave() { directory_ = make_temporary_directory("background"); }
  ~BackgroundSave() override {
    std::error_code ignored;
    fs::remove_all(directory_, ignored);
  }
  std::string place(const std::string& name) const { return directory_ + "/" + name; }
  void survive_kills(int kills);

  std::string directory_;
};

enum class How { kNot, kWaiting, kInTheBackground };

// Trains six steps. After the second a state is saved; the run in the background ends its save after the
// fifth.
ToyResult train(const ToyOptions& options, How how, const std::string& directory) {
  std::vector<ToyResult> results(static_cast<std::size_t>(options.ranks));
  run_ranks(options.ranks, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    for (int step = 0; step < 6; ++step) {
      static_cast<void>(trainer.step(step));
      if (step == 1 && how == How::kWaiting) trainer.engine().save_state(directory, "cursor");
      if (step == 1 && how == How::kInTheBackground) trainer.engine().save_state_begin(directory, "cursor");
      if (step == 4) trainer.engine().save_state_end();
    }
    ToyResult& result = results[static_cast<std::size_t>(rank.communicator->rank())];
    trainer.collect(result);
  });
  EXPECT_EQ(results[0].statistics.peak, results[0].statistics.planned);
  EXPECT_EQ(results[0].statistics.host_bytes, results[0].statistics.planned_host_bytes);
  return results[0];
}

struct Setting {
  int stage;
  int ranks;
  DataType type;
  Offload offload = Offload::kNone;
  Tier tier = Tier::kPinned;
  double fraction = 1.0;
  int group = 1;
};

TEST_F(BackgroundSave, WritesTheFilesOfASaveThatIsWaitedFor) {
  using D = DataType;
  const Setting settings[] = {
      {0, 1, D::kFloat32},
      {0, 3, D::kBfloat16},
      {1, 4, D::kFloat32},
      {2, 3, D::kFloat32, Offload::kOptimizer},
      {0, 3, D::kFloat16, Offload::kOptimizer},
      {3, 4, D::kBfloat16},
      {3, 4, D::kFloat32, Offload::kNone, Tier::kPinned, 1.0, 2},
      {2, 4, D::kBfloat16, Offload::kOptimizer, Tier::kPinned, 0.6, 2},
      {3, 3, D::kBfloat16, Offload::kOptimizerAndParameters},
      {3, 3, D::kFloat32, Offload::kOptimizerAndParameters, Tier::kFile},
      {3, 4, D::kBfloat16, Offload::kOptimizerAndParameters, Tier::kFile, 0.6},
      {1, 3, D::kBfloat16, Offload::kOptimizer, Tier::kFile},
  };
  int number = 0;
  for (const Setting& setting : settings) {
    ToyOptions options = options_for(setting.stage, setting.type, setting.ranks);
    options.engine.offload = setting.offload;
    options.engine.tier = setting.tier;
    options.engine.offload_fraction = setting.fraction;
    options.engine.staging_bytes = 8u << 20;
    options.engine.host_threads = 2;
    options.engine.group = setting.group;
    options.engine.shard_within_group = setting.group > 1;
    options.hooks.make_store = [](int rank) {
      return make_memory_store({.alignment_bytes = 4096, .order_seed = static_cast<std::uint64_t>(rank) + 1});
    };
    const std::string name = std::to_string(++number);
    SCOPED_TRACE("setting " + name);

    const ToyResult without = train(options, How::kNot, "");
    const ToyResult waiting = train(options, How::kWaiting, place("waiting" + name));
    options.engine.save_async = true;
    const ToyResult background = train(options, How::kInTheBackground, place("background" + name));

    EXPECT_EQ(waiting.digest, without.digest);
    EXPECT_EQ(background.digest, without.digest);
    EXPECT_EQ(background.statistics.traffic.sent, without.statistics.traffic.sent);
    EXPECT_EQ(contents(place("background" + name)), contents(place("waiting" + name)));
    EXPECT_GT(background.statistics.planned_host_bytes, without.statistics.planned_host_bytes);
  }
}

TEST_F(BackgroundSave, ThePlanCountsTheCopy) {
  ToyOptions options = options_for(3, DataType::kBfloat16, 2);
  ModelShape model;
  run_ranks(2, {}, [&](Rank& rank) {
    const ToyTrainer trainer(options, rank);
    if (rank.communicator->rank() == 0) model = const_cast<ToyTrainer&>(trainer).engine().model();
  });
  PlanOptions plain{options.engine, 2};
  PlanOptions saving = plain;
  saving.save_async = true;
  const Plan without = value_or_throw(make_plan(model, plain));
  const Plan with = value_or_throw(make_plan(model, saving));

  std::uint64_t expected = 0;
  for (const UnitLayout& layout : with.layouts)
    expected += 12 * layout.trainable_count / 2 + 2 * layout.frozen_count / 2;
  EXPECT_EQ(without.host_bytes.total(), 0u);
  EXPECT_EQ(with.host_bytes.saving, expected);
  EXPECT_EQ(with.host_bytes.total(), round_up(expected, 4096));
  EXPECT_EQ(with.host_bytes.staging, with.host_bytes.total() - expected);
  EXPECT_EQ(with.bytes, without.bytes);
  EXPECT_EQ(with.wire_per_step, without.wire_per_step);
}

// The newest state in the directory, loaded by a new engine of one rank.
std::uint64_t load(const std::string& directory, const ToyOptions& options) {
  std::uint64_t step = 0;
  run_ranks(1, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.engine().load_state(directory);
    step = trainer.engine().attempted_steps();
  });
  return step;
}

TEST_F(BackgroundSave, ASaveEndsTheOneBefore) {
  ToyOptions options = options_for(2, DataType::kBfloat16, 3);
  options.engine.save_async = true;
  fs::create_directory(place(".saving-step-000000000001"));  // A killed run left it.
  std::ofstream(place(".saving-step-000000000001/rank-0-of-3.safetensors")) << "x";
  run_ranks(3, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    for (int step = 0; step < 6; ++step) {
      static_cast<void>(trainer.step(step));
      if (step == 5) {
        trainer.engine().save_state(directory_, "x", 4);
      } else {
        trainer.engine().save_state_begin(directory_, "x", 4);
      }
    }
    if (rank.communicator->rank() == 0) {
      EXPECT_TRUE(fs::exists(place("step-000000000003")));
      EXPECT_TRUE(fs::exists(place("step-000000000006")));
      EXPECT_FALSE(fs::exists(place("step-000000000002")));
    }
    EXPECT_EQ(trainer.engine().load_state(directory_, 4), "x");
    EXPECT_EQ(trainer.engine().attempted_steps(), 4u);
    EXPECT_THROW(trainer.engine().load_state(directory_, 2), Error);
  });
}

TEST_F(BackgroundSave, TheEndOfTheEngineWaitsForTheState) {
  ToyOptions options = options_for(3, DataType::kBfloat16, 3);
  options.engine.save_async = true;
  options.hooks.before_state_write = [](std::uint64_t) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  };
  run_ranks(3, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    static_cast<void>(trainer.step(0));
    trainer.engine().save_state_begin(directory_, "first");
    EXPECT_EQ(trainer.engine().load_state(directory_), "first");
    trainer.engine().save_state_begin(directory_, "x");
    static_cast<void>(trainer.step(1));
  });
  options.ranks = 1;
  EXPECT_EQ(load(directory_, options), 1u);
}

TEST_F(BackgroundSave, ItsErrorsAreThoseOfAllRanksAndTheEngineGoesOn) {
  ToyOptions options = options_for(2, DataType::kBfloat16, 2);
  run_ranks(2, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    EXPECT_THROW(trainer.engine().save_state_begin(directory_, "x"), Error) << "without save_async";
  });
  options.engine.save_async = true;
  std::ofstream(place("file")) << "x";
  std::atomic<bool> fails{false};
  const std::thread::id none;
  std::atomic<std::thread::id> thread{none};
  // One rank's thread cannot write.
  options.hooks.before_state_write = [&](std::uint64_t) {
    std::thread::id first = none;
    if (!fails) return;
    if (thread.compare_exchange_strong(first, std::this_thread::get_id()) ||
        first == std::this_thread::get_id())
      throw Error(StatusCode::kIoError, "no space left");
  };
  run_ranks(2, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    Engine& engine = trainer.engine();
    engine.save_state_end();  // Nothing was begun.
    EXPECT_THROW(engine.save_state_begin(place("file"), "x"), Error);
    EXPECT_THROW(engine.save_state_begin(directory_, "not text: \xff"), Error);
    EXPECT_THROW(engine.save_state_begin(directory_, "x", 0), Error);
    static_cast<void>(trainer.step(0));
    engine.save_state_begin(directory_, "x");
    static_cast<void>(trainer.step(1));
    engine.save_state_end();
    throw_if_error(rank.communicator->barrier());
    fails = true;
    throw_if_error(rank.communicator->barrier());
    engine.save_state_begin(directory_, "y");
    static_cast<void>(trainer.step(2));
    try {
      engine.save_state_end();
      ADD_FAILURE() << "the error is lost";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("no space left"), std::string::npos) << error.what();
    }
    throw_if_error(rank.communicator->barrier());
    if (rank.communicator->rank() == 0) {
      for (const std::string& name : internal::StateDirectory(directory_).names())
        EXPECT_NE(name.find(".saving-"), 0u) << name;
    }
    fails = false;
    EXPECT_EQ(engine.load_state(directory_), "x");
    EXPECT_EQ(engine.attempted_steps(), 1u);
    static_cast<void>(trainer.step(1));
    engine.save_state_begin(directory_, "z");
    engine.save_state_end();
    EXPECT_EQ(engine.load_state(directory_), "z");
  });
}

std::string temporary_of_one(std::uint64_t save = 1) {
  return internal::temporary_state(internal::state_name(1), save);
}

// One that was held up in its job's save and goes on when the next job saves the same step.
TEST_F(BackgroundSave, ARankOfAnEarlierJobWritesIntoNoLaterState) {
  const internal::StateDirectory directory(directory_);
  directory.make_subdirectory(temporary_of_one(2));
  internal::BackgroundSaveJob job;
  job.directory = directory_;
  job.temporary = temporary_of_one(1);
  job.rank = 1;
  job.ranks = 2;
  job.copied = [] { return Status(); };
  job.write = [](internal::StateFile file) { internal::StateFileWriter(std::move(file), {}, {}).finish(); };
  internal::BackgroundSave save(std::move(job));

  EXPECT_EQ(save.wait_for_file().code(), StatusCode::kIoError);

  EXPECT_TRUE(fs::is_empty(place(temporary_of_one(2))));
}

// Removed while another rank's thread makes its file, the directory would stay.
TEST_F(BackgroundSave, WhatAFailedSaveLeftIsRemovedWhenAllRanksKnow) {
  const internal::StateDirectory directory(directory_);
  directory.make_subdirectory(temporary_of_one());
  const std::string temporary = place(temporary_of_one());
  {
    internal::BackgroundSaveJob job;
    job.directory = directory_;
    job.temporary = temporary_of_one();
    job.ranks = 3;
    job.lock = std::make_unique<internal::StateLock>(directory, true);
    job.copied = [] { return Status(); };
    job.write = [](internal::StateFile) { throw Error(StatusCode::kIoError, "no space left"); };
    internal::BackgroundSave save(std::move(job));
    EXPECT_EQ(save.wait_for_file().code(), StatusCode::kIoError);
    EXPECT_EQ(save.wait().code(), StatusCode::kIoError);
    EXPECT_TRUE(fs::exists(temporary));
    EXPECT_THROW(internal::StateLock(directory, true), Error) << "another save would lose its files";
  }
  EXPECT_FALSE(fs::exists(temporary));
  EXPECT_NO_THROW(internal::StateLock(directory, true));
}

internal::BackgroundSaveJob job_of_rank(const std::string& directory, int rank) {
  internal::BackgroundSaveJob job;
  job.directory = directory;
  job.temporary = temporary_of_one();
  job.rank = rank;
  job.ranks = 2;
  job.copied = [] { return Status(); };
  job.write = [](internal::StateFile file) { internal::StateFileWriter(std::move(file), {}, {}).finish(); };
  job.manifest = {{"ranks", 2}};
  job.published = [](const internal::StateDirectory&) {};
  return job;
}

TEST_F(BackgroundSave, TheEndWaitsForARankAsLongAsItWrites) {
  constexpr std::chrono::milliseconds kPatience{1'000};
  const internal::StateDirectory directory(directory_);
  directory.make_subdirectory(temporary_of_one());
  internal::BackgroundSaveJob slow = job_of_rank(directory_, 1);
  slow.write = [&, whole = slow.write](internal::StateFile file) {
    for (const auto end = Clock::now() + 3 * kPatience; Clock::now() < end; let_others_run())
      file.write("x", 1);
    whole(directory.subdirectory(temporary_of_one()).create("." + internal::state_file_name(1, 2)));
  };
  internal::BackgroundSave other(std::move(slow));
  {
    internal::BackgroundSave save(job_of_rank(directory_, 0));
    save.patience = kPatience;
  }

  EXPECT_TRUE(fs::exists(place(internal::state_name(1))));
}

TEST_F(BackgroundSave, TheEndGivesUpARankThatWritesNothing) {
  const internal::StateDirectory directory(directory_);
  directory.make_subdirectory(temporary_of_one());
  ::testing::internal::CaptureStderr();
  {
    internal::BackgroundSave save(job_of_rank(directory_, 0));
    save.patience = std::chrono::milliseconds(20);
  }

  const std::string log = ::testing::internal::GetCapturedStderr();
  for (const char* words : {"rank 1 did not finish its file in", "no rank wrote there for 20 ms"})
    EXPECT_NE(log.find(words), std::string::npos) << log;
  EXPECT_FALSE(fs::exists(place(temporary_of_one())));
}

// On a busy machine all ranks would wait for a thread with less.
TEST_F(BackgroundSave, TheThreadHasThePriorityOfItsCaller) {
  const internal::StateDirectory directory(directory_);
  directory.make_subdirectory(temporary_of_one());
  int policy = -1;
  int niceness = -1;
  internal::BackgroundSaveJob job;
  job.directory = directory_;
  job.temporary = temporary_of_one();
  job.rank = 1;
  job.ranks = 2;
  job.copied = [] { return Status(); };
  job.write = [&](internal::StateFile) {
    policy = ::sched_getscheduler(0);
    niceness = ::getpriority(PRIO_PROCESS, 0);  // That of the thread, on Linux.
  };
  internal::BackgroundSave save(std::move(job));

  ASSERT_TRUE(save.wait_for_file().ok());

  EXPECT_EQ(policy, ::sched_getscheduler(0));
  EXPECT_EQ(niceness, ::getpriority(PRIO_PROCESS, 0));
}

TEST_F(BackgroundSave, AFileThatIsRemovedBeforeTheStateHasItsNameIsAnError) {
  const internal::StateDirectory directory(directory_);
  for (const bool whole : {false, true}) {
    const std::string name = temporary_of_one();
    directory.make_subdirectory(name);
    internal::BackgroundSaveJob job;
    job.directory = directory_;
    job.temporary = temporary_of_one();
    job.ranks = 3;
    job.lock = std::make_unique<internal::StateLock>(directory, true);
    job.copied = [] { return Status(); };
    job.write = [](internal::StateFile) {};
    internal::BackgroundSave save(std::move(job));
    ASSERT_TRUE(save.wait_for_file().ok());
    // All ranks have said that their files are there.
    if (whole) fs::remove_all(place(name));
    const Status status = save.wait();
    EXPECT_EQ(status.code(), StatusCode::kIoError);
    EXPECT_NE(status.message().find(whole ? name : "rank-1-of-3.safetensors is gone"), std::string::npos)
        << status.message();
    if (!whole) directory.remove(name);
  }
}

// The object may live on, up to the next save of its engine.
TEST_F(BackgroundSave, OthersMaySaveThereOnceTheStateHasItsName) {
  const internal::StateDirectory directory(directory_);
  directory.make_subdirectory(temporary_of_one());
  internal::BackgroundSaveJob job;
  job.directory = directory_;
  job.temporary = temporary_of_one();
  job.lock = std::make_unique<internal::StateLock>(directory, true);
  job.copied = [] { return Status(); };
  job.write = [](internal::StateFile file) { internal::StateFileWriter(std::move(file), {}, {}).finish(); };
  job.manifest = {{"ranks", 1}};
  job.published = [&](const internal::StateDirectory&) {
    EXPECT_THROW(internal::StateLock(directory, true), Error) << "the save goes on";
  };
  internal::BackgroundSave save(std::move(job));

  ASSERT_TRUE(save.wait().ok()) << save.wait().message();

  EXPECT_TRUE(fs::exists(place(internal::state_name(1))));
  EXPECT_NO_THROW(internal::StateLock(directory, true));
}

// The engine makes a new plan then, while the thread may not have begun to write.
TEST_F(BackgroundSave, TheOrderOfUnitsMayChangeMeanwhile) {
  const Setting settings[] = {
      {3, 1, DataType::kBfloat16},
      {3, 3, DataType::kBfloat16},
      {2, 3, DataType::kFloat32, Offload::kOptimizer},
      {3, 3, DataType::kBfloat16, Offload::kOptimizerAndParameters, Tier::kFile},
  };
  int number = 0;
  for (const Setting& setting : settings) {
    ToyOptions options = options_for(setting.stage, setting.type, setting.ranks);
    options.engine.offload = setting.offload;
    options.engine.tier = setting.tier;
    options.engine.staging_bytes = 8u << 20;
    options.engine.order_of_units = OrderOfUnits::kRecorded;
    options.engine.save_async = true;
    options.engine.optimizer = number % 2 == 0 ? Optimizer::kAdafactor : Optimizer::kMuon;
    options.hooks.make_store = [](int) { return make_memory_store({.alignment_bytes = 4096}); };
    options.steps = 8;
    options.forwards = [](int, int step, int) {
      std::vector<int> order{0, 1, 2, 3, 4};
      std::rotate(order.begin(), order.begin() + step % 5, order.end());
      return order;
    };
    const auto name = [number](const char* how, int step) {
      return how + std::to_string(number) + "." + std::to_string(step);
    };
    run_ranks(setting.ranks, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      for (int step = 0; step < options.steps; ++step) {
        trainer.engine().save_state(place(name("waiting", step)), "");
        trainer.engine().save_state_begin(place(name("background", step)), "");
        static_cast<void>(trainer.step(step));
      }
      trainer.engine().save_state_end();
    });
    for (int step = 0; step < options.steps; ++step)
      EXPECT_EQ(contents(place(name("background", step))), contents(place(name("waiting", step)))) << step;
    ++number;
  }
}

// Values that the host can read are written from their place. A change copies first what is not written yet.
TEST_F(BackgroundSave, HasTheValuesOfItsMomentWhateverChangesThem) {
  using Change = std::function<void(ToyTrainer & trainer)>;
  const std::pair<const char*, Change> changes[] = {
      {"a step", [](ToyTrainer& trainer) { static_cast<void>(trainer.step(2)); }},
      {"set_parameter()", [](ToyTrainer& trainer) { trainer.initialize(); }},
      {"swap_average()", [](ToyTrainer& trainer) { trainer.engine().swap_average(); }},
      {"reset_moments()", [](ToyTrainer& trainer) { trainer.engine().reset_moments(); }},
      {"spill()", [](ToyTrainer& trainer) { trainer.engine().spill(); }},
  };
  const Setting settings[] = {
      {2, 1, DataType::kFloat32},
      {3, 3, DataType::kBfloat16},
      {2, 3, DataType::kFloat32, Offload::kOptimizer},
      {1, 1, DataType::kBfloat16, Offload::kOptimizer, Tier::kPinned, 0.6},
      {3, 3, DataType::kBfloat16, Offload::kOptimizerAndParameters, Tier::kFile, 0.6},
  };
  int number = 0;
  for (const Setting& setting : settings) {
    for (const auto& [change_name, change] : changes) {
      for (const int stop : {0, 5}) {
        SCOPED_TRACE("stage " + std::to_string(setting.stage) + ", offload " + offload_name(setting.offload) +
                     ", " + change_name + ", held before part " + std::to_string(stop));
        Gate gate;
        std::atomic<bool> holds{false};
        std::atomic<int> held{0};
        ToyOptions options = options_for(setting.stage, setting.type, setting.ranks);
        options.engine.offload = setting.offload;
        options.engine.tier = setting.tier;
        options.engine.offload_fraction = setting.fraction;
        options.engine.staging_bytes = 8u << 20;
        options.engine.spillable = true;
        options.engine.ema = 0.9;
        options.engine.save_async = true;
        options.hooks.make_store = [](int) { return make_memory_store({.alignment_bytes = 4096}); };
        options.hooks.before_state_write = [&, before = stop](std::uint64_t) {
          thread_local int passed = 0;  // Each save in the background has a thread of its own.
          if (!holds || passed++ != before) return;
          ++held;
          Gate::wait(&gate);
        };
        const std::string name = std::to_string(++number);
        run_ranks(setting.ranks, {}, [&](Rank& rank) {
          ToyTrainer trainer(options, rank);
          Engine& engine = trainer.engine();
          trainer.initialize();
          for (int step = 0; step < 2; ++step) static_cast<void>(trainer.step(step));
          engine.save_state(place("waiting" + name), "");
          holds = true;
          throw_if_error(rank.communicator->barrier());
          engine.save_state_begin(place("background" + name), "");
          while (held < setting.ranks) std::this_thread::yield();
          change(trainer);
          throw_if_error(rank.communicator->barrier());
          gate.open();
          engine.save_state_end();
        });
        EXPECT_EQ(contents(place("background" + name)), contents(place("waiting" + name)));
      }
    }
  }
}

TEST_F(BackgroundSave, GoesToTheDirectoryThatTheNameMeantWhenItBegan) {
  ToyOptions options = options_for(2, DataType::kBfloat16, 1);
  options.engine.save_async = true;
  const fs::path before = fs::current_path();
  run_ranks(1, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    for (int step = 0; step < 5; ++step) {
      static_cast<void>(trainer.step(step));
      fs::current_path(directory_);
      trainer.engine().save_state_begin("states", "text");
      fs::current_path("/");
      trainer.engine().save_state_end();
    }
    EXPECT_EQ(trainer.engine().load_state(place("states")), "text");
  });
  fs::current_path(before);
}

// Their files would have the same names.
TEST_F(BackgroundSave, TwoEnginesOfAProcessDoNotSaveInOneDirectoryAtOnce) {
  ToyOptions options = options_for(2, DataType::kBfloat16, 1);
  options.engine.save_async = true;
  std::atomic<bool> waits{true};
  options.hooks.before_state_write = [&](std::uint64_t) { waits.wait(true); };
  const auto go_on = [&] {
    waits = false;
    waits.notify_all();
  };
  run_ranks(1, {}, [&](Rank& rank) {
    ToyTrainer first(options, rank);
    first.initialize();
    static_cast<void>(first.step(0));
    first.engine().save_state_begin(directory_, "first");
    run_ranks(1, {}, [&](Rank& other) {
      ToyTrainer second(options, other);
      second.initialize();
      static_cast<void>(second.step(0));
      for (const bool in_background : {true, false}) {
        try {
          if (in_background) {
            second.engine().save_state_begin(directory_, "second");
          } else {
            second.engine().save_state(directory_, "second");
          }
          go_on();
          ADD_FAILURE() << "both save";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), StatusCode::kUnavailable) << error.what();
        }
      }
      go_on();
      first.engine().save_state_end();
      EXPECT_THROW(second.engine().save_state_begin(directory_, "second"), Error)
          << "it is the first one's state";
      EXPECT_EQ(second.engine().load_state(directory_), "first");
      second.engine().save_state_begin(directory_, "second");
      second.engine().save_state_end();
      EXPECT_EQ(second.engine().load_state(directory_), "second");
    });
  });
}

TEST_F(BackgroundSave, AHostWithoutMemoryIsAnErrorOfTheSave) {
  ToyOptions options = options_for(2, DataType::kBfloat16, 2);
  options.engine.save_async = true;
  std::atomic<bool> fails{true};
  options.hooks.before_state_write = [&](std::uint64_t) {
    if (fails) throw std::bad_alloc();
  };
  run_ranks(2, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    Engine& engine = trainer.engine();
    static_cast<void>(trainer.step(0));
    engine.save_state_begin(directory_, "x");
    try {
      engine.save_state_end();
      ADD_FAILURE() << "the error is lost";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kOutOfMemory) << error.what();
    }
    throw_if_error(rank.communicator->barrier());
    fails = false;
    static_cast<void>(trainer.step(1));
    engine.save_state_begin(directory_, "y");
    engine.save_state_end();
    EXPECT_EQ(engine.load_state(directory_), "y");
  });
}

TEST_F(BackgroundSave, AHostWithoutThreadsIsAnErrorOfTheSave) {
  for (const int threads : {0, 1}) {
    ToyOptions options = options_for(2, DataType::kBfloat16, 2);
    options.engine.save_async = true;
    std::optional<ThreadLimit> limit;
    run_ranks(2, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      Engine& engine = trainer.engine();
      static_cast<void>(trainer.step(0));
      throw_if_error(rank.communicator->barrier());
      if (rank.communicator->rank() == 0) limit.emplace(threads);
      throw_if_error(rank.communicator->barrier());
      engine.save_state_begin(directory_, "x");
      throw_if_error(rank.communicator->barrier());
      if (rank.communicator->rank() == 0) limit.reset();
      try {
        engine.save_state_end();
        ADD_FAILURE() << "the error is lost";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("saved state"), std::string::npos) << error.what();
      }
      throw_if_error(rank.communicator->barrier());
      static_cast<void>(trainer.step(1));
      engine.save_state_begin(directory_, "y");
      engine.save_state_end();
      EXPECT_EQ(engine.load_state(directory_), "y");
    });
  }
}

// A process that trains and saves in the background is killed at random moments. The state that it last saw
// complete, or a newer one, is whole.
void BackgroundSave::survive_kills(int kills) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  ToyOptions options = options_for(2, DataType::kBfloat16, 1);
  options.engine.save_async = true;
  std::uint64_t least = 0;
  int lost = 0;
  for (int i = 0; i < kills; ++i) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(ends[0]);
      run_ranks(1, {}, [&](Rank& rank) {
        ToyTrainer trainer(options, rank);
        trainer.initialize();
        Engine& engine = trainer.engine();
        if (least > 0) engine.load_state(directory_);
        for (int step = static_cast<int>(engine.attempted_steps());; ++step) {
          static_cast<void>(trainer.step(step));
          engine.save_state_begin(directory_, "x");
          const std::uint64_t complete = engine.attempted_steps() - 1;  // begin() ended the save before.
          if (::write(ends[1], &complete, sizeof complete) != static_cast<ssize_t>(sizeof complete))
            ::_exit(3);
        }
      });
      ::_exit(0);
    }
    ::close(ends[1]);
    std::uint64_t first = 0;
    ASSERT_EQ(::read(ends[0], &first, sizeof first), static_cast<ssize_t>(sizeof first));
    if (i > 0) {
      least = std::max(least, first);
    }
    std::this_thread::sleep_for(
        std::chrono::microseconds(std::uniform_int_distribution<int>(0, 20'000)(random)));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    std::uint64_t seen = 0;
    while (::read(ends[0], &seen, sizeof seen) == static_cast<ssize_t>(sizeof seen))
      least = std::max(least, seen);
    ::close(ends[0]);
    const std::string name = internal::find_state(internal::StateDirectory(directory_));
    if (name.empty()) {
      EXPECT_EQ(least, 0u);
      continue;
    }
    std::uint64_t loaded = 0;
    ASSERT_NO_THROW(loaded = load(directory_, options)) << "kill " << i;
    ASSERT_GE(loaded, least) << "kill " << i;
    lost += loaded == least ? 1 : 0;
    least = loaded;
  }
  std::printf("%d kills: %d left the state that was last seen complete, %d a newer one\n", kills, lost,
              kills - lost);
}

TEST_F(BackgroundSave, SurvivesKillsAtRandomMoments) {
  survive_kills(20);
}

using SlowBackgroundSave = BackgroundSave;

TEST_F(SlowBackgroundSave, SurvivesFiveHundredKills) {
  survive_kills(500);
}

// On the virtual clock, where a write takes the time of its bytes: the time that a save adds to a run.
TEST_F(BackgroundSave, ExposesATwentiethOfASaveThatIsWaitedFor) {
  using std::chrono::nanoseconds;
  constexpr int kUnits = 6;
  constexpr int kSteps = 6;
  constexpr int kRanks = 2;
  constexpr nanoseconds kPass{2'000'000};  // One unit.
  constexpr double kWritten = 1e9;         // Bytes a second and rank.
  const auto seconds_of_run = [&](How how, Offload offload) {
    HostClock clock(HostClock::Mode::kVirtual);
    std::atomic<std::uint64_t> written{0};
    internal::EngineHooks hooks;
    hooks.before_state_write = [&](std::uint64_t bytes) {
      clock.sleep(nanoseconds(static_cast<std::int64_t>(1e9 * static_cast<double>(bytes) / kWritten)));
      written += bytes;
    };
    WorldOptions world;
    world.clock = &clock;
    double seconds = 0;
    const std::string place =
        directory_ + "/" + std::to_string(static_cast<int>(how)) + offload_name(offload);
    run_ranks(kRanks, world, [&](Rank& rank) {
      EngineOptions options;
      options.stage = 2;
      options.offload = offload;
      options.host_threads = 1;
      options.optional_gradients = true;
      options.save_async = how == How::kInTheBackground;
      options.hooks = &hooks;
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
      for (int u = 0; u < kUnits; ++u)
        engine.add_parameter(engine.add_unit("u" + std::to_string(u)), "p" + std::to_string(u), 1u << 20);
      engine.commit();
      const Stream stream = value_or_throw(rank.backend->stream_create());
      const auto compute = [&](nanoseconds duration) {
        throw_if_error(call_on(*rank.backend, stream, [&clock, duration] { clock.sleep(duration); }));
      };
      const nanoseconds begin = clock.now();
      for (int step = 0; step < kSteps; ++step) {
        engine.step_begin();
        engine.micro_step_begin(0);
        for (int u = 0; u < kUnits; ++u) {
          const Lease lease = engine.forward(u, stream);
          compute(kPass);
        }
        for (int u = kUnits - 1; u >= 0; --u) {
          const Lease lease = engine.backward(u, stream);
          compute(kPass);
        }
        static_cast<void>(engine.step({.groups = {{}}}));
        if (step == 0 && how == How::kWaiting) engine.save_state(place, "x");
        if (step == 0 && how == How::kInTheBackground) engine.save_state_begin(place, "x");
      }
      throw_if_error(rank.backend->stream_synchronize(stream));
      if (rank.communicator->rank() == 0)
        seconds = std::chrono::duration<double>(clock.now() - begin).count();
      // A rank that waits elsewhere than on the clock would hold it.
      while (how != How::kNot && written < std::uint64_t{12} * kUnits << 20) clock.sleep(kPass);
      engine.save_state_end();
      static_cast<void>(engine.statistics());
      throw_if_error(rank.backend->stream_destroy(stream));
    });
    return seconds;
  };
  for (const Offload offload : {Offload::kNone, Offload::kOptimizer}) {
    const double none = seconds_of_run(How::kNot, offload);
    const double waiting = seconds_of_run(How::kWaiting, offload) - none;
    const double background = seconds_of_run(How::kInTheBackground, offload) - none;
    std::printf(
        "offload %s: a run of %.1f ms; a save that is waited for adds %.2f ms, one in the background %.3f "
        "ms\n",
        offload_name(offload), none * 1e3, waiting * 1e3, background * 1e3);
    EXPECT_GE(waiting, 0.9 * 12 * kUnits * (1u << 20) / kRanks / kWritten);
    EXPECT_LE(background, 0.05 * waiting);
  }
}

}  // namespace
}  // namespace forebay::testing
