// Messages name C functions, options and units, and say how to go on.

#include <gtest/gtest.h>

#include <filesystem>
#include <mutex>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "runtime/api/words.h"
#include "tests/api/declarations.h"
#include "tests/api/fixture.h"

namespace forebay::api {
namespace {

c::Options recorded_options() {
  return {{"deadline", "3000"}, {"order-of-units", "recorded"}, {"micro-steps", "2"}};
}

TEST(CApiMessages, NameWhatIsOpenAndTheUnit) {
  One one;
  std::int32_t number = 0;
  void* address = nullptr;
  EXPECT_EQ(forebay_step_begin(one.engine), FOREBAY_INVALID_ARGUMENT);
  one.commit();
  ASSERT_OK(forebay_step_begin(one.engine));
  EXPECT_EQ(forebay_step_begin(one.engine), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "forebay_step_begin() while step 1 is open; end it by forebay_step() first");
  EXPECT_EQ(forebay_acquire(one.engine, 7, 0, nullptr), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(),
            "forebay_acquire: unit is 7; the model has 2; use the index that forebay_engine_add_unit() gave");
  EXPECT_EQ(forebay_release(one.engine, one.second, nullptr), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "forebay_release: unit second is not acquired; call forebay_acquire() first");
  ASSERT_OK(forebay_micro_step_begin(one.engine, 0));
  ASSERT_OK(forebay_acquire(one.engine, one.first, 0, nullptr));
  EXPECT_EQ(forebay_acquire(one.engine, one.second, 0, nullptr), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "forebay_acquire() while another acquisition is alive; end it first");
  EXPECT_EQ(forebay_gradient(one.engine, one.first, 0, &address, nullptr), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "forebay_gradient: accumulate is null; give an address");
  EXPECT_EQ(forebay_engine_add_unit(one.engine, nullptr, 0, &number), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "forebay_engine_add_unit: name is null; give an address");
}

TEST(CApiMessages, SpellControlCharactersOfNamesOut) {
  One one;
  std::int32_t number = 0;
  ASSERT_OK(forebay_engine_add_unit(one.engine, "red\x1b[31m", 0, &number));
  EXPECT_EQ(forebay_engine_add_unit(one.engine, "red\x1b[31m", 0, &number), FOREBAY_INVALID_ARGUMENT);
  EXPECT_NE(last_error().find("red\\x1b[31m"), std::string::npos) << last_error();
  EXPECT_EQ(last_error().find('\x1b'), std::string::npos);
  EXPECT_EQ(forebay_device_open("x\x1b[1m", nullptr, nullptr), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error().find('\x1b'), std::string::npos);
}

TEST(CApiMessages, PointFromOptionsToTheirFunctionsAndNames) {
  c::Options options;
  for (const char* const name : {"lr", "clip"}) {
    EXPECT_EQ(forebay_options_set(options, name, "1"), FOREBAY_INVALID_ARGUMENT);
    EXPECT_NE(last_error().find("forebay_hyperparameter()"), std::string::npos) << last_error();
  }
  EXPECT_EQ(forebay_options_set(options, "ranks", "2"), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(), "there is no option ranks; did you mean size?");
}

TEST(CApiMessages, RefuseADescriptionAtTheCall) {
  const c::Options options{{"deadline", "3000"}};
  One one(options);
  const auto plan = c::make<c::Engine>(forebay_engine_plan, options);
  for (forebay_engine* const engine :
       {static_cast<forebay_engine*>(one.engine), static_cast<forebay_engine*>(plan)}) {
    std::int32_t index = 0;
    const auto refused = [](std::int32_t code, const char* part) {
      EXPECT_EQ(code, FOREBAY_INVALID_ARGUMENT) << part;
      EXPECT_NE(last_error().find(part), std::string::npos) << last_error();
    };
    ASSERT_OK(forebay_engine_add_unit(engine, "a", 0, &index));
    ASSERT_OK(forebay_engine_add_unit(engine, "b", 0, &index));
    refused(forebay_engine_add_unit(engine, "a", 0, &index), "two units are named a");
    ASSERT_OK(forebay_engine_add_parameter(engine, 0, "w", 8, 0, 0, &index));
    refused(forebay_engine_add_parameter(engine, 1, "w", 8, 0, 0, &index), "two parameters are named w");
    refused(forebay_engine_add_parameter(engine, 1, "none", 0, 0, 0, &index), "has no elements");
    ASSERT_OK(forebay_engine_add_parameter(engine, 1, "v", 8, 0, 0, &index));
    ASSERT_OK(forebay_engine_tie(engine, 1, 0, 0, &index));
    EXPECT_EQ(index, 1);
    refused(forebay_engine_add_parameter(engine, 1, "late", 8, 0, 0, &index),
            "forebay_engine_add_parameter(late) to unit b after forebay_engine_tie()");
  }
  forebay_engine* made = nullptr;
  const c::Options beta{{"beta1", "2"}};
  EXPECT_EQ(forebay_engine_create(one.device, one.ranks, nullptr, nullptr, beta, &made),
            FOREBAY_INVALID_ARGUMENT);
  EXPECT_NE(last_error().find("beta1 is 2"), std::string::npos) << last_error();
}

TEST(CApiMessages, ShowNumbersAndNamesInAFewCharacters) {
  One one;
  forebay_engine* made = nullptr;
  const auto refused = [&](const char* name, const char* value, const char* part) {
    const c::Options options{{name, value}};
    EXPECT_EQ(forebay_engine_create(one.device, one.ranks, nullptr, nullptr, options, &made),
              FOREBAY_INVALID_ARGUMENT);
    EXPECT_NE(last_error().find(part), std::string::npos) << last_error();
  };
  refused("host-threads", "-3", "host-threads is -3; use 1 to 4096, or 0");
  refused("host-threads", "1000000", "host-threads is 1000000; use 1 to 4096, or 0");
  refused("loss-scale-growth-interval", "0", "the growth interval is 0; it may be 1 or more");
  refused("beta1", "1e300", "beta1 is 1e+300;");
  const std::string name(5000, 'n');
  std::int32_t index = 0;
  ASSERT_OK(forebay_engine_add_unit(one.engine, name.c_str(), 0, &index));
  EXPECT_EQ(forebay_engine_add_unit(one.engine, name.c_str(), 0, &index), FOREBAY_INVALID_ARGUMENT);
  EXPECT_NE(last_error().find("two units are named " + std::string(97, 'n') + "...;"), std::string::npos)
      << last_error();
}

TEST(CApiMessages, RefuseAMicroStepWithoutABackwardPass) {
  One one(recorded_options());
  one.commit();
  ASSERT_OK(forebay_step_begin(one.engine));
  ASSERT_OK(forebay_micro_step_begin(one.engine, 0));
  c::Lease(one.engine, one.first, c::Pass::kForward, nullptr);
  forebay_step_result result;
  for (const std::int32_t code :
       {forebay_step(one.engine, &result, sizeof(result)), forebay_evaluation_begin(one.engine),
        forebay_micro_step_begin(one.engine, 1)}) {
    EXPECT_EQ(code, FOREBAY_INVALID_ARGUMENT);
    EXPECT_NE(last_error().find("micro-step 0 has a forward pass and no backward pass"), std::string::npos)
        << last_error();
  }
  c::Lease(one.engine, one.first, c::Pass::kBackward, nullptr);
  EXPECT_OK(forebay_step(one.engine, &result, sizeof(result)));
}

// Runs `body` for each of two ranks, and returns their last errors.
template <typename Body>
std::vector<std::string> two_ranks(const c::Options& options, Body body) {
  const auto group = c::make<c::LocalGroup>(forebay_local_group_create, 2, options);
  std::vector<std::string> errors(2);
  std::vector<std::thread> threads;
  std::mutex mutex;  // The options are in one call at a time.
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_lock lock(mutex);
      One one(options);
      one.device = c::make<c::Device>(forebay_device_open, "host", options);
      one.ranks = c::make<c::Communicator>(forebay_local_group_communicator, group, rank, one.device);
      one.engine =
          c::make<c::Engine>(forebay_engine_create, one.device, one.ranks, nullptr, nullptr, options);
      lock.unlock();
      one.commit();
      body(one, rank);
      errors[static_cast<std::size_t>(rank)] = last_error();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

TEST(CApiMessages, NameTheValueThatDiffersBetweenRanks) {
  for (const std::string given : {"weights", "lr", "weight-decay", "beta1", "beta2", "epsilon"}) {
    const bool weights = given == "weights";
    const auto errors = two_ranks({{"deadline", "3000"}}, [&](One& one, int rank) {
      const float value = weights && rank == 1 ? 2 : 1;
      ASSERT_OK(forebay_engine_set(one.engine, one.second, 0, FOREBAY_FP32, &value, 3, 1));
      if (!weights) {
        ASSERT_OK(forebay_hyperparameter(one.engine, 1, given.c_str(), rank == 0 ? 0.5 : 0.25));
      }
      EXPECT_THROW(one.step(1), c::Error);
    });
    for (const std::string& error : errors) {
      const std::string name = given == "weight-decay" ? "weight decay" : given;
      const std::string part = weights ? "values given to parameter w2"
                                       : name + " of parameter group 1 is 0.25 on rank 1, 0.5 on rank 0";
      EXPECT_NE(error.find(part), std::string::npos) << error;
    }
  }
}

TEST(CApiMessages, NameTheRankThatAskedForTheNorm) {
  const auto errors = two_ranks({{"deadline", "3000"}, {"order-of-units", "recorded"}}, [](One& one,
                                                                                           int rank) {
    ASSERT_OK(forebay_step_begin(one.engine));
    ASSERT_OK(forebay_micro_step_begin(one.engine, 0));
    for (const auto pass : {c::Pass::kForward, c::Pass::kBackward})
      c::Lease(one.engine, one.first, pass, nullptr);
    double norm = 0;
    forebay_step_result result{};
    EXPECT_EQ(rank == 1 ? forebay_norm(one.engine, &norm) : forebay_step(one.engine, &result, sizeof(result)),
              FOREBAY_INVALID_ARGUMENT);
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("rank 1 called forebay_norm() and rank 0 forebay_step() for step 1; call "),
              std::string::npos)
        << error;
  }
}

TEST(CApiMessages, NameAnAbandonedStepBesideAnEvaluation) {
  const auto errors =
      two_ranks({{"deadline", "1000"}, {"order-of-units", "recorded"}, {"micro-steps", "2"}, {"stage", "3"}},
                [](One& one, int rank) {
                  one.step(1);
                  ASSERT_OK(forebay_step_begin(one.engine));
                  ASSERT_OK(forebay_micro_step_begin(one.engine, 0));
                  if (rank == 1) {
                    EXPECT_NE(forebay_abandon(one.engine, 1), FOREBAY_OK);
                    return;
                  }
                  c::Lease(one.engine, one.first, c::Pass::kForward, nullptr);
                  c::Lease(one.engine, one.first, c::Pass::kBackward, nullptr);
                  bool failed = forebay_evaluation_begin(one.engine) != FOREBAY_OK;
                  failed = failed || forebay_acquire(one.engine, one.second, 0, nullptr) != FOREBAY_OK ||
                           forebay_release(one.engine, one.second, nullptr) != FOREBAY_OK ||
                           forebay_evaluation_end(one.engine) != FOREBAY_OK;
                  forebay_step_result result;
                  failed = failed || forebay_step(one.engine, &result, sizeof(result)) != FOREBAY_OK;
                  EXPECT_TRUE(failed);
                });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("forebay_abandon()"), std::string::npos) << error;
    EXPECT_NE(error.find("evaluation"), std::string::npos) << error;
  }
}

TEST(CApiGuard, FillsAGradientThatIsNeverWritten) {
  One one(c::Options{{"guard", "on"}});
  one.commit();
  c::call(forebay_step_begin, one.engine);
  c::call(forebay_micro_step_begin, one.engine, 0);
  for (const std::int32_t unit : {one.first, one.second})
    c::Lease(one.engine, unit, c::Pass::kForward, nullptr);
  {
    const c::Lease lease(one.engine, one.second, c::Pass::kBackward, nullptr);
    static_cast<void>(lease.gradient<float>(0));
  }
  c::Lease(one.engine, one.first, c::Pass::kBackward, nullptr);
  EXPECT_NE(c::step(one.engine).skipped, 0);
}

TEST(CApiMessages, HaveTheirNounsAndArticles) {
  const auto of_engine = [](const std::string& text) { return in_words_of_c(text, "forebay_acquire"); };
  EXPECT_EQ(of_engine("a lease is alive"), "an acquisition is alive");
  EXPECT_EQ(of_engine("end this lease: lease it"), "end this acquisition: acquire it");
  EXPECT_EQ(of_engine("the unit is leased by 2 leases"), "the unit is acquired by 2 acquisitions");
  EXPECT_EQ(in_words_of_c("a lease is alive", "forebay_checkpointer_save"), "a load is alive");
  EXPECT_EQ(of_engine("activation-leases is x"), "activation-leases is x");
  EXPECT_EQ(of_engine("lower EngineOptions::bucket_bytes"), "lower the option bucket");
  EXPECT_EQ(of_engine("set EngineOptions::micro_steps: 2"), "set the option micro-steps: 2");
  const std::string name(100, 'n');
  EXPECT_EQ(of_engine(name), name);
  EXPECT_EQ(of_engine(name + "n"), name.substr(0, 97) + "...");
}

// cxx_to_c.txt has the functions of C for each one of C++.
TEST(CApiMessages, NameTheFunctionOfCThatDoesTheSame) {
  std::istringstream lines(read_text(std::string(FOREBAY_ROOT) + "/tests/api/cxx_to_c.txt"));
  int count = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string call, word;
    words >> call;
    const bool activations = call.starts_with("ActivationCheckpointer::");
    if (!activations && !call.starts_with("Engine::") && !call.starts_with("Lease::")) continue;
    const std::string member = call.substr(call.find("::") + 2);
    const std::string shown =
        in_words_of_c(member + "()", activations ? "forebay_checkpointer_save" : "forebay_acquire");
    if (!shown.starts_with("forebay_")) continue;
    std::set<std::string> functions;
    while (words >> word) functions.insert(word + "()");
    EXPECT_EQ(functions.count(shown), 1u) << line << ": " << shown;
    ++count;
  }
  EXPECT_GT(count, 40);
}

// Every text of a message in C++ that names a function, an option or a lease has words of C.
TEST(CApiMessages, HaveNoWordsOfCxx) {
  const std::regex literal(R"re("((?:[^"\\]|\\.)*)"(?:\s*\n\s*"((?:[^"\\]|\\.)*)")*)re");
  const std::regex call(R"((^|[^A-Za-z_0-9:.])([a-z][a-z_]*)\(\))");
  const std::regex option("the option ([a-z][a-z0-9-]*)");
  const std::set<std::string> kOfCxx = {"cuda"};  // TrainerOptions, which C does not have.
  const c::Options options;
  // Functions of the system, and those that no program in C can call (cxx_to_c.txt).
  const std::set<std::string> foreign = {
      "fork",        "exec",   "mmap", "open",       "dlopen", "setsid", "connect",    "io_uring_setup",
      "shared_text", "listen", "bind", "get_moment", "accept", "view",   "get_average"};
  for (const char* const folder : {"runtime/engine", "allocator", "offload"}) {
    for (const auto& entry :
         std::filesystem::recursive_directory_iterator(std::string(FOREBAY_ROOT) + "/" + folder)) {
      if (entry.path().extension() != ".cc") continue;
      const bool activations = entry.path().string().find("/activations/") != std::string::npos;
      const std::string text = read_text(entry.path().string());
      for (std::sregex_iterator it(text.begin(), text.end(), literal), end; it != end; ++it) {
        const std::string shown =
            in_words_of_c(it->str(), activations ? "forebay_checkpointer_save" : "forebay_acquire");
        EXPECT_FALSE(std::regex_search(shown, std::regex("Options::|(^|[^-a-z])lease"))) << shown;
        const bool is_mapped = it->str().find("Options::") != std::string::npos;
        for (std::sregex_iterator found(shown.begin(), shown.end(), option); is_mapped && found != end;
             ++found) {
          const char* value = nullptr;
          const std::string name = (*found)[1];
          EXPECT_TRUE(kOfCxx.count(name) == 1 ||
                      forebay_options_get(options, name.c_str(), &value) == FOREBAY_OK)
              << "there is no option " << name << ": " << shown;
        }
        for (std::sregex_iterator found(shown.begin(), shown.end(), call); found != end; ++found) {
          const std::string name = (*found)[2];
          EXPECT_TRUE(name.rfind("forebay_", 0) == 0 || foreign.count(name) == 1)
              << entry.path().filename() << ": " << shown;
        }
      }
    }
  }
}

}  // namespace
}  // namespace forebay::api
