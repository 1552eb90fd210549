// Trainers that compute on GPUs: between processes they go over NCCL, and give the bits of the host. The
// ranks of the fake NCCL are threads of one process. So each thread here makes its trainer while the
// environment names its rank.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "forebay/error.h"
#include "forebay/pinned_pool.h"
#include "forebay/trainer.h"
#include "tests/support/fake_gpu.h"
#include "tests/support/fake_nccl_library.h"
#include "tests/support/let_others_run.h"
#include "tests/support/temporary_directory.h"

namespace forebay::testing {
namespace {

constexpr std::uint64_t kTrainedCount = 1000;

struct Trained {
  std::string digest;
  std::vector<double> norms;
  bool operator==(const Trained&) const = default;
};

// Two steps. Each gradient depends on the rank, the step and the gathered parameter.
Trained train_two_steps(Trainer& trainer) {
  Engine& engine = trainer.engine();
  const UnitId unit = engine.add_unit("u");
  const ParameterId p = engine.add_parameter(unit, "p", kTrainedCount);
  engine.commit();
  std::vector<float> initial(kTrainedCount);
  for (std::size_t i = 0; i < initial.size(); ++i) initial[i] = 0.01f * static_cast<float>(i % 37);
  engine.set_parameter(p, initial);
  const auto pinned = value_or_throw(PinnedPool::create(trainer.backend(), {.slab_bytes = 1u << 20}));
  constexpr std::uint64_t kBytes = kTrainedCount * sizeof(float);
  std::byte* const copy = value_or_throw(pinned->allocate(kBytes));
  auto* const values = reinterpret_cast<float*>(copy);
  Trained trained;
  for (int step = 0; step < 2; ++step) {
    trainer.begin();
    trainer.forward(unit, [](const Lease&) {});
    trainer.backward(unit, [&](Lease& lease) {
      throw_if_error(trainer.backend().copy_async(copy, lease.parameter(p), kBytes, trainer.stream()));
      trainer.wait();
      for (std::uint64_t i = 0; i < kTrainedCount; ++i)
        values[i] = 0.5f * values[i] + static_cast<float>(trainer.rank() * 3 + step + 1) / 7;
      const Gradient gradient = lease.zeroed_gradient(p);
      throw_if_error(trainer.backend().copy_async(gradient.data, copy, kBytes, trainer.stream()));
      trainer.wait();
    });
    trained.norms.push_back(trainer.step({.groups = {{}}}).grad_norm.value_or(-1));
  }
  trained.digest = engine.digest();
  throw_if_error(pinned->free(copy, {}));
  return trained;
}

// Variables of the environment that are unset again at the end.
class RankVariables {
 public:
  RankVariables(int size, const std::string& store) {
    set("FOREBAY_SIZE", std::to_string(size));
    set("FOREBAY_STORE", store);
  }
  ~RankVariables() {
    for (const char* name : {"FOREBAY_RANK", "FOREBAY_SIZE", "FOREBAY_STORE"}) ::unsetenv(name);
  }
  RankVariables(const RankVariables&) = delete;
  RankVariables& operator=(const RankVariables&) = delete;

  void set_rank(int rank) { set("FOREBAY_RANK", std::to_string(rank)); }

 private:
  static void set(const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); }
};

// Calls body(rank) on a thread for each rank, with the environment of that rank until the rank has come to
// the others. Returns the error of each rank, or OK.
std::vector<Status> run_launched(int size, const std::function<void(int rank)>& body) {
  const TemporaryDirectory directory;
  const std::string store = directory / "store";
  RankVariables variables(size, store);
  std::vector<Status> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  std::atomic<int> ended{0};
  for (int rank = 0; rank < size; ++rank) {
    variables.set_rank(rank);
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(rank)] = error.status();
      }
      ++ended;
    });
    // The last rank's text goes as soon as all have met; no other environment comes after it.
    const std::string text = store + "/rank." + std::to_string(rank);
    while (rank + 1 < size && ended == 0 && !std::filesystem::exists(text)) testing::let_others_run();
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

TEST(TrainerOverNccl, GivesTheBitsOfTheHost) {
  for (const int ranks : {1, 2, 3}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    TrainerOptions options;
    options.engine.stage = 3;
    std::vector<Trained> expected(static_cast<std::size_t>(ranks));
    Trainer::on_threads(ranks, options, [&](Trainer& trainer) {
      expected[static_cast<std::size_t>(trainer.rank())] = train_two_steps(trainer);
    });
    const FakeGpu gpu(gpus(ranks));
    const FakeNcclLibrary nccl;
    options.cuda = true;
    std::vector<Trained> actual(static_cast<std::size_t>(ranks));

    const std::vector<Status> errors = run_launched(ranks, [&](int rank) {
      Trainer trainer(options);
      EXPECT_EQ(trainer.rank(), rank);
      EXPECT_EQ(trainer.ranks(), ranks);
      EXPECT_FALSE(trainer.backend().capabilities().host_accessible);
      if (ranks > 1) {
        EXPECT_STREQ(trainer.communicator().name(), "nccl");
      }
      actual[static_cast<std::size_t>(rank)] = train_two_steps(trainer);
    });

    for (const Status& error : errors) EXPECT_TRUE(error.ok()) << error.to_string();
    EXPECT_EQ(actual, expected);
    if (ranks > 1) {
      EXPECT_GT(nccl.controls().accounts().launches, 0u);
    }
  }
}

TEST(TrainerOverNccl, SaysThatTheDriverShowsNoGpu) {
  const FakeGpu gpu(gpus(0));
  TrainerOptions options;
  options.cuda = true;
  const auto refusal = [](const std::function<void()>& make) -> Status {
    try {
      make();
    } catch (const Error& error) {
      return error.status();
    }
    return {};
  };
  const auto group = LocalGroup::create(1);
  for (const Status& status : {refusal([&] { const Trainer alone(options); }),
                               refusal([&] { const Trainer thread(*group, 0, options); })}) {
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_NE(status.message().find("CUDA_VISIBLE_DEVICES"), std::string::npos) << status.message();
  }
}

// The others end at once, with the reason, and do not wait for the deadline.
TEST(TrainerOverNccl, ARankWithoutItsGpuIsTheErrorOfAll) {
  const FakeGpu gpu(gpus(2));
  const FakeNcclLibrary nccl;

  const std::vector<Status> errors = run_launched(2, [](int rank) {
    TrainerOptions options;
    options.cuda = true;
    options.deadline = std::chrono::minutes(10);
    if (rank == 1) options.ordinal = 7;
    const Trainer trainer(options);
  });

  EXPECT_NE(errors[1].message().find("7"), std::string::npos) << errors[1].to_string();
  EXPECT_NE(errors[0].message().find("rank 1"), std::string::npos) << errors[0].to_string();
  EXPECT_NE(errors[0].message().find(errors[1].message()), std::string::npos) << errors[0].to_string();
}

}  // namespace
}  // namespace forebay::testing
