// Trainer: an engine and everything that it runs on, for ranks that are threads and for a rank alone.

#include "forebay/trainer.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "forebay/error.h"
#include "tests/support/thread_limit.h"

namespace forebay {
namespace {

TEST(Trainers, OnThreadsTellTheFirstError) {
  try {
    Trainer::on_threads(3, {{{.stage = 3}}}, [](Trainer& trainer) {
      trainer.engine().add_parameter(trainer.engine().add_unit("u"), "p", 100);
      if (trainer.rank() == 1) throw Error(StatusCode::kInvalidArgument, "no data");
      trainer.engine().commit();
    });
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("rank 1: no data"), std::string::npos) << error.what();
  }
}

TEST(Trainers, OnThreadsTellAnExceptionOfTheProgram) {
  const auto text_of = [](const std::function<void()>& fail) -> std::string {
    try {
      Trainer::on_threads(3, {{{.stage = 3}}}, [&](Trainer& trainer) {
        trainer.engine().add_parameter(trainer.engine().add_unit("u"), "p", 100);
        if (trainer.rank() == 1) fail();
        trainer.engine().commit();
      });
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };

  EXPECT_NE(text_of([] { throw std::runtime_error("no data"); }).find("rank 1: no data"), std::string::npos);
  EXPECT_NE(text_of([] { throw 1; }).find("rank 1: "), std::string::npos);
}

TEST(Trainers, OnThreadsAllRunOrNone) {
  for (int threads = 0; threads < 3; ++threads) {
    const testing::ThreadLimit limit(threads);
    bool runs = false;
    try {
      Trainer::on_threads(3, {{{.stage = 3}}}, [&](Trainer&) { runs = true; });
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kUnavailable) << error.what();
    }
    EXPECT_FALSE(runs);
  }
}

TEST(Trainers, OnThreadsWaitForEachOtherUntilTheDeadline) {
  std::promise<void> gave_up;
  TrainerOptions options;
  options.deadline = std::chrono::milliseconds(100);
  try {
    Trainer::on_threads(2, options, [&](Trainer& trainer) {
      trainer.engine().add_parameter(trainer.engine().add_unit("u"), "p", 100);
      if (trainer.rank() == 1) {
        EXPECT_EQ(gave_up.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
        return;
      }
      try {
        trainer.engine().commit();
      } catch (const Error&) {
        gave_up.set_value();
        throw;
      }
    });
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kTimeout) << error.what();
  }
}

TEST(Trainers, EndInAForkedChildWithoutAnEffect) {
  std::optional<Trainer> trainer(std::in_place);
  const ParameterId p = trainer->engine().add_parameter(trainer->engine().add_unit("u"), "p", 100'000);
  trainer->engine().commit();
  trainer->engine().set_parameter(p, std::vector<float>(100'000, 1.5f));
  const std::string digest = trainer->engine().digest();
  const pid_t child = ::fork();
  if (child == 0) {
    alarm(20);
    trainer.reset();
    ::_exit(0);
  }
  int state = 0;
  ASSERT_EQ(::waitpid(child, &state, 0), child);
  EXPECT_EQ(state, 0);
  EXPECT_EQ(trainer->engine().digest(), digest);
}

TEST(Trainers, WithoutALauncherAreTheOnlyRank) {
  Trainer trainer;
  EXPECT_EQ(trainer.ranks(), 1);
  Engine& engine = trainer.engine();
  const UnitId unit = engine.add_unit("u");
  const ParameterId p = engine.add_parameter(unit, "p", 100);
  engine.commit();
  for (int step = 0; step < 2; ++step) {
    trainer.begin();
    trainer.forward(unit, [&](const Lease& lease) { EXPECT_NE(lease.parameter(p), nullptr); });
    trainer.backward(unit, [&](Lease& lease) {
      const Gradient gradient = lease.zeroed_gradient(p);
      trainer.run([gradient] { gradient.as<float>()[0] = 1; });
    });
    EXPECT_EQ(trainer.step({.groups = {{}}}).grad_norm, 1.0);
  }
}

}  // namespace
}  // namespace forebay
