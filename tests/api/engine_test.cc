// The engine over the C interface: values, steps, state, plans.

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "forebay/model_config.h"
#include "forebay/model_shape.h"
#include "runtime/api/report.h"
#include "tests/api/fixture.h"

namespace {

// The number of the next close() of this thread that fails, or 0. It closes all the same.
thread_local int failing_close = 0;

}  // namespace

// In place of the C library's, for the library too.
extern "C" int close(int file) {
  const auto result = static_cast<int>(::syscall(SYS_close, file));
  if (failing_close == 0 || --failing_close > 0) return result;
  errno = EIO;
  return -1;
}

namespace forebay::api {
namespace {

std::string digest_of(const One& one) {
  char digest[33];
  c::call(forebay_engine_digest, one.engine, digest);
  return digest;
}

std::vector<float> counting(std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i) / 8;
  return values;
}

TEST(CApiEngine, SetsAndGetsPartsInEveryType) {
  One one;
  one.commit();
  const std::vector<float> values = counting(256);
  ASSERT_OK(forebay_engine_set(one.engine, one.first, 0, FOREBAY_FP32, values.data() + 6, 6, 250));
  ASSERT_OK(forebay_engine_set(one.engine, one.first, 0, FOREBAY_FP32, values.data(), 0, 6));
  std::vector<float> read(100);
  ASSERT_OK(forebay_engine_get(one.engine, one.first, 0, FOREBAY_FP32, read.data(), 100, 100));
  EXPECT_EQ(read, std::vector<float>(values.begin() + 100, values.begin() + 200));
  for (const std::int32_t dtype : {FOREBAY_BF16, FOREBAY_FP16}) {
    std::vector<std::uint16_t> half(256);
    ASSERT_OK(forebay_engine_get(one.engine, one.first, 0, dtype, half.data(), 0, 256));
    ASSERT_OK(forebay_engine_set(one.engine, one.first, 0, dtype, half.data(), 0, 256));
    ASSERT_OK(forebay_engine_get(one.engine, one.first, 0, FOREBAY_FP32, read.data(), 0, 100));
    EXPECT_EQ(read, std::vector<float>(values.begin(), values.begin() + 100)) << dtype;
  }
  EXPECT_EQ(forebay_engine_set(one.engine, one.first, 0, FOREBAY_FP32, values.data(), 200, 57),
            FOREBAY_INVALID_ARGUMENT);
  EXPECT_OK(forebay_engine_set(one.engine, one.first, 0, FOREBAY_FP32, values.data(), 256, 0)) << "no part";
  EXPECT_OK(forebay_engine_get(one.engine, one.first, 0, FOREBAY_FP32, read.data(), 256, 0));
  EXPECT_EQ(forebay_engine_get(one.engine, one.first, 0, FOREBAY_FP32, read.data(), 257, 0),
            FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(forebay_engine_get(one.engine, one.first, 0, FOREBAY_FP32, read.data(), UINT64_MAX, 1),
            FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(forebay_engine_get(one.engine, one.first, 0, 3, read.data(), 0, 1), FOREBAY_INVALID_ARGUMENT);
}

TEST(CApiEngine, VisitsEveryParameterInOrder) {
  One one;
  one.describe();
  for (const char* const name : {"empty", "also", "last"})
    c::get<std::int32_t>(forebay_engine_add_unit, one.engine, name, 0);
  c::get<std::int32_t>(forebay_engine_tie, one.engine, 3, one.second, 0);
  for (const char* const name : {"a", "b"})
    c::get<std::int32_t>(forebay_engine_add_parameter, one.engine, 4, name, 16, 0, 0);
  c::call(forebay_engine_commit, one.engine);
  std::string seen;
  ASSERT_OK(forebay_engine_visit(
      one.engine,
      [](void* user, std::int32_t unit, std::int32_t index, const char* name, const float*, std::uint64_t n) {
        *static_cast<std::string*>(user) +=
            std::to_string(unit) + "." + std::to_string(index) + " " + name + " " + std::to_string(n) + "\n";
      },
      &seen));
  EXPECT_EQ(seen, "0.0 w1 256\n1.0 w2 32\n4.0 a 16\n4.1 b 16\n");
}

TEST(CApiEngine, StepsByTheValuesThatWereSet) {
  One one;
  one.commit();
  ASSERT_OK(forebay_hyperparameter(one.engine, 0, "lr", 0.5));
  ASSERT_OK(forebay_hyperparameter(one.engine, 1, "lr", 0.0));
  ASSERT_OK(forebay_hyperparameter(one.engine, FOREBAY_WHOLE_STEP, "metric", 3.0));
  const forebay_step_result result = one.step(2);
  EXPECT_NEAR(result.grad_norm, 2 * std::sqrt(288.0), 1e-6);
  EXPECT_EQ(result.metric_sum, 3.0);
  EXPECT_EQ(result.loss_scale, 1.0);
  EXPECT_EQ(result.skipped, 0);
  float w1 = 0;
  float w2 = 1;
  ASSERT_OK(forebay_engine_get(one.engine, one.first, 0, FOREBAY_FP32, &w1, 0, 1));
  ASSERT_OK(forebay_engine_get(one.engine, one.second, 0, FOREBAY_FP32, &w2, 0, 1));
  EXPECT_NEAR(w1, -0.5f, 1e-4);
  EXPECT_EQ(w2, 0.0f);
  // "metric" and "stop" count for one step alone.
  ASSERT_OK(forebay_hyperparameter(one.engine, FOREBAY_WHOLE_STEP, "stop", 1));
  const forebay_step_result stopped = one.step(2);
  EXPECT_EQ(stopped.metric_sum, 0.0);
  EXPECT_EQ(stopped.stop, 1);
  EXPECT_EQ(one.step(2).stop, 0);
  std::uint64_t steps = 0;
  ASSERT_OK(forebay_engine_number(one.engine, "applied_steps", &steps));
  EXPECT_EQ(steps, 3u);
  EXPECT_EQ(forebay_hyperparameter(one.engine, 0, "weightdecay", 0.1), FOREBAY_INVALID_ARGUMENT);
  EXPECT_NE(last_error().find("did you mean weight-decay?"), std::string::npos) << last_error();
  EXPECT_EQ(forebay_hyperparameter(one.engine, 2, "lr", 0.1), FOREBAY_INVALID_ARGUMENT);
}

// Two steps of AdamW, as its definition has them, with values that differ between the groups.
TEST(CApiEngine, EachValueOfAGroupHasItsPlaceInTheUpdate) {
  struct Group {
    double lr, weight_decay, beta1, beta2, epsilon;
  };
  const Group groups[] = {{0.5, 0.1, 0.5, 0.25, 1}, {0.25, 0.2, 0.75, 0.125, 2}};
  const double gradients[] = {1, 3};
  One one;
  one.commit();
  const std::vector<float> ones(256, 1);
  ASSERT_OK(forebay_engine_set(one.engine, one.first, 0, FOREBAY_FP32, ones.data(), 0, 256));
  ASSERT_OK(forebay_engine_set(one.engine, one.second, 0, FOREBAY_FP32, ones.data(), 0, 32));
  for (int g = 0; g < 2; ++g) {
    ASSERT_OK(forebay_hyperparameter(one.engine, g, "lr", groups[g].lr));
    ASSERT_OK(forebay_hyperparameter(one.engine, g, "weight-decay", groups[g].weight_decay));
    ASSERT_OK(forebay_hyperparameter(one.engine, g, "beta1", groups[g].beta1));
    ASSERT_OK(forebay_hyperparameter(one.engine, g, "beta2", groups[g].beta2));
    ASSERT_OK(forebay_hyperparameter(one.engine, g, "epsilon", groups[g].epsilon));
  }
  // The second gradient is clipped to a norm of 24, and so its elements to 24 / sqrt(288).
  ASSERT_OK(forebay_hyperparameter(one.engine, FOREBAY_WHOLE_STEP, "clip", 24));
  for (const double gradient : gradients) one.step(static_cast<float>(gradient));

  for (int g = 0; g < 2; ++g) {
    const Group& group = groups[g];
    double w = 1, m = 0, v = 0;
    for (int step = 1; step <= 2; ++step) {
      const double gradient = std::min(gradients[step - 1], 24 / std::sqrt(288.0));
      m = group.beta1 * m + (1 - group.beta1) * gradient;
      v = group.beta2 * v + (1 - group.beta2) * gradient * gradient;
      const double m_hat = m / (1 - std::pow(group.beta1, step));
      const double v_hat = v / (1 - std::pow(group.beta2, step));
      w -= group.lr * (m_hat / (std::sqrt(v_hat) + group.epsilon) + group.weight_decay * w);
    }
    float found = 0;
    ASSERT_OK(forebay_engine_get(one.engine, g == 0 ? one.first : one.second, 0, FOREBAY_FP32, &found, 0, 1));
    EXPECT_NEAR(found, w, 1e-5) << "group " << g;
  }
}

TEST(CApiEngine, AnOverflowIsASkippedStep) {
  One one(c::Options{{"dtype", "fp16"}, {"loss-scale", "8"}, {"find-non-finite", "off"}});
  one.describe();
  ASSERT_OK(forebay_engine_commit(one.engine));
  c::call(forebay_step_begin, one.engine);
  c::call(forebay_micro_step_begin, one.engine, 0);
  for (const std::int32_t unit : {one.first, one.second})
    c::Lease(one.engine, unit, c::Pass::kForward, nullptr);
  for (const std::int32_t unit : {one.second, one.first}) {
    const c::Lease lease(one.engine, unit, c::Pass::kBackward, nullptr);
    c::call(forebay_stream_synchronize, one.device, nullptr);
    std::uint16_t* const gradient = lease.gradient<std::uint16_t>(0).address;
    for (int i = 0; i < (unit == one.first ? 256 : 32); ++i) gradient[i] = 0x7C00;  // Infinite.
  }
  const forebay_step_result result = c::step(one.engine);
  EXPECT_EQ(result.skipped, 1);
  EXPECT_TRUE(std::isnan(result.grad_norm));
  EXPECT_EQ(result.loss_scale, 8.0);
  EXPECT_EQ(c::get<double>(forebay_loss_scale, one.engine), 4.0);
  EXPECT_EQ(c::get<std::uint64_t>(forebay_engine_number, one.engine, "attempted_steps"), 1u);
  EXPECT_EQ(c::get<std::uint64_t>(forebay_engine_number, one.engine, "applied_steps"), 0u);
  EXPECT_EQ(c::get<std::uint64_t>(forebay_engine_number, one.engine, "committed_step"), 1u);
  EXPECT_EQ(c::get<std::uint64_t>(forebay_engine_number, one.engine, "statistics.attempted_steps"), 1u);
  EXPECT_EQ(c::get<std::uint64_t>(forebay_engine_number, one.engine, "statistics.applied_steps"), 0u);
}

// A caller whose exception came between a call and its note of it asks these.
TEST(CApiEngine, NumbersTellHowFarAPassHasCome) {
  for (const char* const order : {"strict", "recorded"}) {
    One one(c::Options{{"micro-steps", "2"}, {"stage", "3"}, {"order-of-units", order}});
    one.describe();
    ASSERT_OK(forebay_engine_commit(one.engine));
    // Steps, evaluations, micro-steps, acquisitions.
    const auto is = [&](std::uint64_t steps, std::uint64_t evaluations, std::uint64_t micro_steps,
                        std::uint64_t acquisitions) {
      const auto number = [&](const char* name) {
        return c::get<std::uint64_t>(forebay_engine_number, one.engine, name);
      };
      EXPECT_EQ(number("open_steps"), steps) << order;
      EXPECT_EQ(number("open_evaluations"), evaluations) << order;
      EXPECT_EQ(number("begun_micro_steps"), micro_steps) << order;
      EXPECT_EQ(number("open_acquisitions"), acquisitions) << order;
    };
    is(0, 0, 0, 0);
    c::call(forebay_evaluation_begin, one.engine);
    is(0, 1, 0, 0);
    for (const std::int32_t unit : {one.first, one.second}) {
      const c::Lease lease(one.engine, unit, c::Pass::kForward, nullptr);
      is(0, 1, 0, 1);
    }
    c::call(forebay_evaluation_end, one.engine);
    is(0, 0, 0, 0);
    c::call(forebay_step_begin, one.engine);
    is(1, 0, 0, 0);
    for (std::int32_t k = 0; k < 2; ++k) {
      const auto begun = static_cast<std::uint64_t>(k + 1);
      c::call(forebay_micro_step_begin, one.engine, k);
      is(1, 0, begun, 0);
      for (const std::int32_t unit : {one.first, one.second}) {
        const c::Lease lease(one.engine, unit, c::Pass::kForward, nullptr);
        is(1, 0, begun, 1);
      }
      is(1, 0, begun, 0);
      for (const std::int32_t unit : {one.second, one.first}) {
        const c::Lease lease(one.engine, unit, c::Pass::kBackward, nullptr);
        is(1, 0, begun, 1);
        c::call(forebay_stream_synchronize, one.device, nullptr);
        const auto gradient = lease.gradient<float>(0);
        if (k == 0) std::fill_n(gradient.address, unit == one.first ? 256 : 32, 1.0f);
      }
      is(1, 0, begun, 0);
    }
    c::step(one.engine);
    is(0, 0, 0, 0);
  }
}

TEST(CApiEngine, TheStatisticsHoldThePlannedBytes) {
  One one(c::Options{{"stage", "3"}, {"offload", "optimizer"}});
  one.commit();
  one.step(1);
  const auto report = nlohmann::json::parse(c::get<const char*>(forebay_engine_report, one.engine));
  const auto& statistics = report["statistics"];
  const auto& plan = report["plan"];
  EXPECT_EQ(statistics["planned"], plan["bytes"]);
  EXPECT_EQ(statistics["peak"], plan["bytes"]);
  EXPECT_EQ(statistics["planned_host_bytes"], plan["host"]["total"]);
  EXPECT_GE(statistics["host_bytes"], plan["host"]["total"]);
  EXPECT_EQ(statistics["planned_file_bytes"], 0);
  EXPECT_EQ(statistics["planned_reserved_bytes"], plan["reserved_bytes"]);
  EXPECT_EQ(statistics["planned_wire_per_step"], plan["wire_per_step"]);
  EXPECT_EQ(statistics["attempted_steps"], 1);
  EXPECT_GT(statistics["gather_count"], 0);
  EXPECT_NE(statistics["host_placement"], "");
}

TEST(CApiEngine, APlanIsInChunksOfTheGranularity) {
  const auto reserved = [](const char* granularity) {
    const auto plan = c::make<c::Engine>(forebay_engine_plan, c::Options{{"granularity", granularity}});
    const auto unit = c::get<std::int32_t>(forebay_engine_add_unit, plan, "unit", 0);
    c::get<std::int32_t>(forebay_engine_add_parameter, plan, unit, "w", 1000, 0, 0);
    return c::get<std::uint64_t>(forebay_engine_number, plan, "plan.reserved_bytes");
  };
  EXPECT_EQ(reserved("0") % (2 << 20), 0u);
  EXPECT_LT(reserved("64KiB"), std::uint64_t{2} << 20);
  EXPECT_EQ(reserved("64KiB") % (64 << 10), 0u);
}

TEST(CApiEngine, WritesAsMuchOfAResultAsTheCallerKnows) {
  One one;
  one.commit();
  one.step(1);
  const auto passes = [&] {
    c::call(forebay_step_begin, one.engine);
    c::call(forebay_micro_step_begin, one.engine, 0);
    for (const std::int32_t unit : {one.first, one.second})
      c::Lease(one.engine, unit, c::Pass::kForward, nullptr);
    for (const std::int32_t unit : {one.second, one.first})
      c::Lease(one.engine, unit, c::Pass::kBackward, nullptr);
  };
  passes();
  forebay_step_result result{};
  result.loss_scale = 77;
  ASSERT_OK(forebay_step(one.engine, &result, sizeof(double)));
  EXPECT_EQ(result.grad_norm, 0.0);
  EXPECT_EQ(result.loss_scale, 77);

  // A newer program's result is longer.
  struct Newer {
    forebay_step_result known;
    double more = 77;
  } newer;
  passes();
  ASSERT_OK(forebay_step(one.engine, &newer.known, sizeof(newer)));
  EXPECT_EQ(newer.known.loss_scale, 1);
  EXPECT_EQ(newer.more, 77);
}

TEST(CApiEngine, SavesAndLoadsItsStateAndTheTrainers) {
  const std::filesystem::path directory =
      std::filesystem::temp_directory_path() / ("capi_state." + std::to_string(getpid()));
  const std::string cursor("step 2\0more", 11);
  std::string digest;
  {
    One one;
    one.commit();
    one.step(1);
    ASSERT_OK(forebay_save(one.engine, directory.c_str(), cursor.data(), cursor.size()));
    digest = digest_of(one);
  }
  One one(c::Options{{"stage", "3"}});
  one.commit();
  const void* state = nullptr;
  std::uint64_t bytes = 0;
  ASSERT_OK(forebay_load(one.engine, directory.c_str(), &state, &bytes));
  EXPECT_EQ(std::string(static_cast<const char*>(state), bytes), cursor);
  EXPECT_EQ(digest_of(one), digest);
  EXPECT_EQ(forebay_load(one.engine, "/proc/nonexistent/place", &state, &bytes), FOREBAY_IO_ERROR);
  EXPECT_NE(last_error().find("give the directory that a run saved to"), std::string::npos) << last_error();
  std::filesystem::remove_all(directory);
}

TEST(CApiEngine, ReportsItsPlanAndNumbersByName) {
  One one;
  one.commit();
  const auto report = nlohmann::json::parse(c::get<const char*>(forebay_engine_report, one.engine));
  EXPECT_EQ(report["model"]["parameters"], 288);
  EXPECT_EQ(report["options"]["stage"], "0");
  std::uint64_t value = 0;
  ASSERT_OK(forebay_engine_number(one.engine, "statistics.peak.parameters", &value));
  EXPECT_EQ(value, report["plan"]["bytes"]["parameters"]);
  EXPECT_EQ(forebay_engine_number(one.engine, "statistics.peak.parameter", &value), FOREBAY_INVALID_ARGUMENT);
  EXPECT_NE(last_error().find("did you mean statistics.peak.parameters?"), std::string::npos) << last_error();
}

TEST(CApiEngine, PlansWithoutADevice) {
  const c::Options options{{"stage", "3"}, {"dtype", "bf16"}, {"size", "64"}};
  const auto engine = c::make<c::Engine>(forebay_engine_plan, options);
  ASSERT_OK(
      forebay_engine_add_model(engine, R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
      "num_attention_heads": 4, "vocab_size": 128, "intermediate_size": 256})"));
  const auto report = nlohmann::json::parse(c::get<const char*>(forebay_engine_report, engine));
  EXPECT_EQ(report["options"]["stage"], "3");
  EXPECT_EQ(report["plan"]["ranks"], 64);
  EXPECT_GT(report["plan"]["bytes"]["total"], 0);
  EXPECT_EQ(forebay_engine_commit(engine), FOREBAY_INVALID_ARGUMENT);
  // The same description by hand has the same plan as an engine that trains.
  One one(c::Options{{"stage", "2"}});
  one.commit();
  const auto plan = c::make<c::Engine>(forebay_engine_plan, c::Options{{"stage", "2"}});
  const auto first =
      c::get<std::int32_t>(forebay_engine_add_unit, plan, "first", FOREBAY_BACKWARD_READS_NOTHING);
  const auto second = c::get<std::int32_t>(forebay_engine_add_unit, plan, "second", 0);
  c::get<std::int32_t>(forebay_engine_add_parameter, plan, first, "w1", 256, 0, 0);
  c::get<std::int32_t>(forebay_engine_add_parameter, plan, second, "w2", 32, 1, 0);
  const auto trained = nlohmann::json::parse(c::get<const char*>(forebay_engine_report, one.engine));
  const auto planned = nlohmann::json::parse(c::get<const char*>(forebay_engine_report, plan));
  EXPECT_EQ(trained["plan"], planned["plan"]);
  EXPECT_EQ(trained["model"], planned["model"]);
}

// Its head is tied to the embedding, whose backward pass reads nothing.
TEST(CApiEngine, AModelOfAConfigIsThatOfTheModule) {
  const char* const config = R"({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4,
      "vocab_size": 512, "n_positions": 32})";
  const auto shape = parse_model_config(config, "config");
  ASSERT_TRUE(shape.ok()) << shape.status().to_string();
  const auto model = make_model_shape(shape.value());
  ASSERT_TRUE(model.ok()) << model.status().to_string();
  const c::Options options{{"optimizer", "adafactor"}};
  const One one(options);
  const auto plan = c::make<c::Engine>(forebay_engine_plan, options);
  std::string plans[2];
  for (forebay_engine* const engine :
       {static_cast<forebay_engine*>(one.engine), static_cast<forebay_engine*>(plan)}) {
    ASSERT_OK(forebay_engine_add_model(engine, config));
    const auto report = nlohmann::json::parse(c::get<const char*>(forebay_engine_report, engine));
    EXPECT_EQ(report["model"].dump(), nlohmann::json::parse(json_of(model.value()).dump()).dump());
    plans[engine == plan ? 1 : 0] = report["plan"].dump();
  }
  EXPECT_EQ(plans[0], plans[1]) << "Adafactor's factors are those of the declared shapes";
}

TEST(CApiEngine, PlansTheFactorsOfDeclaredShapes) {
  std::uint64_t bytes[2] = {};
  for (const bool declared : {false, true}) {
    const auto plan = c::make<c::Engine>(forebay_engine_plan, c::Options{{"optimizer", "adafactor"}});
    const auto unit = c::get<std::int32_t>(forebay_engine_add_unit, plan, "unit", 0);
    const auto w = c::get<std::int32_t>(forebay_engine_add_parameter, plan, unit, "w", 256 * 1024, 0, 0);
    const std::uint64_t wrong[] = {256, 1023}, shape[] = {256, 1024};
    EXPECT_EQ(forebay_engine_declare_shape(plan, unit, w, wrong, 2), FOREBAY_INVALID_ARGUMENT);
    EXPECT_NE(last_error().find("262144 elements"), std::string::npos) << last_error();
    // A count that is not read far beyond the array.
    EXPECT_EQ(forebay_engine_declare_shape(plan, unit, w, wrong, UINT64_MAX), FOREBAY_INVALID_ARGUMENT);
    EXPECT_NE(last_error().find("at most 64"), std::string::npos);
    std::vector<std::uint64_t> many(65, 1);
    many[63] = 256 * 1024;
    EXPECT_EQ(forebay_engine_declare_shape(plan, unit, w, many.data(), 65), FOREBAY_INVALID_ARGUMENT);
    EXPECT_OK(forebay_engine_declare_shape(plan, unit, w, many.data(), 64));
    EXPECT_EQ(forebay_engine_declare_shape(plan, unit, w, nullptr, 2), FOREBAY_INVALID_ARGUMENT);
    EXPECT_NE(last_error().find("shape is null and has dimensions"), std::string::npos) << last_error();
    EXPECT_EQ(forebay_engine_declare_split(plan, unit, w, wrong, UINT64_MAX, 0, 1, 0, 1),
              FOREBAY_INVALID_ARGUMENT);
    EXPECT_NE(last_error().find("at most 64"), std::string::npos);
    if (declared) {
      ASSERT_OK(forebay_engine_declare_shape(plan, unit, w, shape, 2));
    }
    const auto report = nlohmann::json::parse(c::get<const char*>(forebay_engine_report, plan));
    bytes[declared ? 1 : 0] = report["plan"]["bytes"]["optimizer"];
  }
  EXPECT_LT(bytes[1], bytes[0]);
}

// A matrix of Muon is gathered whole, and orthogonalised with scratch.
TEST(CApiEngine, PlansMuonsMatricesWithoutTheElementwise) {
  std::uint64_t bytes[2] = {};
  for (const bool elementwise : {false, true}) {
    const auto plan = c::make<c::Engine>(forebay_engine_plan,
                                         c::Options{{"optimizer", "muon"}, {"muon-rate", "match-rms-adamw"}});
    const auto unit = c::get<std::int32_t>(forebay_engine_add_unit, plan, "unit", 0);
    const auto w = c::get<std::int32_t>(forebay_engine_add_parameter, plan, unit, "w", 256 * 1024, 0,
                                        elementwise ? FOREBAY_ELEMENTWISE : 0);
    const std::uint64_t shape[] = {256, 1024};
    ASSERT_OK(forebay_engine_declare_shape(plan, unit, w, shape, 2));
    const auto report = nlohmann::json::parse(c::get<const char*>(forebay_engine_report, plan));
    bytes[elementwise ? 1 : 0] = report["plan"]["bytes"]["buckets"];
  }
  EXPECT_EQ(bytes[0], bytes[1] + 4 * (2 * 256 * 1024 + 256 * 1024 + 2 * 256 * 256));
}

TEST(CApiEngine, RefusesAReleaseOnAnotherStream) {
  One one;
  one.commit();
  const auto stream = c::get<void*>(forebay_stream_create, one.device);
  c::call(forebay_step_begin, one.engine);
  c::call(forebay_micro_step_begin, one.engine, 0);
  ASSERT_OK(forebay_acquire(one.engine, one.first, 0, stream));
  EXPECT_EQ(forebay_release(one.engine, one.first, nullptr), FOREBAY_INVALID_ARGUMENT);
  EXPECT_OK(forebay_release(one.engine, one.first, stream));
  EXPECT_EQ(forebay_release(one.engine, one.first, stream), FOREBAY_INVALID_ARGUMENT);
  EXPECT_NE(last_error().find("is not acquired"), std::string::npos) << last_error();
  one.engine = {};
  forebay_stream_destroy(one.device, stream);
}

TEST(CApiEngine, GoesOnAfterAStreamThatIsNone) {
  One one;
  one.commit();
  const auto other = c::make<c::Device>(forebay_device_open, "host", nullptr);
  const auto of_other = c::get<void*>(forebay_stream_create, other);
  const auto destroyed = c::get<void*>(forebay_stream_create, one.device);
  forebay_stream_destroy(one.device, destroyed);
  c::call(forebay_step_begin, one.engine);
  c::call(forebay_micro_step_begin, one.engine, 0);
  int number = 0;
  for (void* const stream : {of_other, destroyed, static_cast<void*>(&number)}) {
    float values[2] = {};
    EXPECT_EQ(forebay_acquire(one.engine, one.first, 0, stream), FOREBAY_INVALID_ARGUMENT);
    EXPECT_NE(last_error().find("no such stream on this device"), std::string::npos) << last_error();
    EXPECT_EQ(forebay_communicator_all_gather(one.ranks, values, values, 4, 4, stream),
              FOREBAY_INVALID_ARGUMENT);
  }
  EXPECT_OK(forebay_acquire(one.engine, one.first, 0, nullptr));
  EXPECT_OK(forebay_release(one.engine, one.first, nullptr));
  EXPECT_OK(forebay_communicator_barrier(one.ranks));
}

TEST(CApiCxx, AnErrorHasItsCodeAndItsText) {
  try {
    c::make<c::Device>(forebay_device_open, "abacus", nullptr);
    FAIL() << "there is no such device";
  } catch (const c::Error& error) {
    EXPECT_EQ(error.code(), FOREBAY_INVALID_ARGUMENT);
    EXPECT_EQ(error.what(), "FOREBAY_INVALID_ARGUMENT: " + last_error());
  }
}

TEST(CApiCxx, ALeaseThatWasMovedIsReleasedOnce) {
  One one(c::Options{{"order-of-units", "recorded"}});
  one.commit();
  c::call(forebay_step_begin, one.engine);
  c::call(forebay_micro_step_begin, one.engine, 0);
  const auto open = [&] {
    return c::get<std::uint64_t>(forebay_engine_number, one.engine, "open_acquisitions");
  };
  const c::Lease outer(one.engine, one.first, c::Pass::kForward, nullptr);
  {
    c::Lease inner(one.engine, one.first, c::Pass::kForward, nullptr);
    const c::Lease moved(std::move(inner));
    EXPECT_EQ(open(), 2u);
  }
  EXPECT_EQ(open(), 1u);
}

// --- recorded order ---

One recorded(const char* stage) {
  One one(c::Options{{"stage", stage}, {"order-of-units", "recorded"}, {"micro-steps", "2"}});
  one.commit();
  return one;
}

// Writes `value` to every gradient of a unit, "=" or "+=".
void contribute(const One& one, std::int32_t unit, float value) {
  const c::Lease lease(one.engine, unit, c::Pass::kBackward, nullptr);
  c::call(forebay_stream_synchronize, one.device, nullptr);
  const auto gradient = lease.gradient<float>(0);
  for (int i = 0; i < (unit == one.first ? 256 : 32); ++i)
    gradient.address[i] = gradient.accumulate ? gradient.address[i] + value : value;
}

TEST(CApiRecordedOrder, TakesUnitsInAnyOrderSeveralAtOnce) {
  std::string digests[2];
  for (const char* const stage : {"0", "3"}) {
    const One one = recorded(stage);
    for (int step = 0; step < 3; ++step) {
      c::call(forebay_step_begin, one.engine);
      c::call(forebay_micro_step_begin, one.engine, 0);
      {
        const c::Lease second(one.engine, one.second, c::Pass::kForward, nullptr);
        const c::Lease first(one.engine, one.first, c::Pass::kForward, nullptr);
        EXPECT_EQ(first.parameter<void>(0), c::get<void*>(forebay_engine_address, one.engine, one.first, 0));
      }
      contribute(one, one.first, 1);
      contribute(one, one.second, 2);
      const auto norm = c::get<double>(forebay_norm, one.engine);
      EXPECT_NEAR(norm, std::sqrt(256.0 + 4 * 32), 1e-6);
      EXPECT_EQ(c::step(one.engine).grad_norm, norm);
    }
    const auto report = nlohmann::json::parse(c::get<const char*>(forebay_engine_report, one.engine));
    EXPECT_TRUE(report["recorded_order"].is_string());
    digests[stage[0] == '3' ? 1 : 0] = digest_of(one);
  }
  EXPECT_EQ(digests[0], digests[1]);
}

TEST(CApiRecordedOrder, EvaluatesBetweenStepsAndChangesNothing) {
  const One one = recorded("3");
  const std::string before = digest_of(one);
  ASSERT_OK(forebay_evaluation_begin(one.engine));
  for (const std::int32_t unit : {one.second, one.first, one.second})
    c::Lease(one.engine, unit, c::Pass::kForward, nullptr);
  EXPECT_EQ(forebay_acquire(one.engine, one.first, 1, nullptr), FOREBAY_INVALID_ARGUMENT);
  ASSERT_OK(forebay_evaluation_end(one.engine));
  EXPECT_EQ(digest_of(one), before);
}

TEST(CApiRecordedOrder, AReleaseEndsTheLatestAcquisition) {
  const One one = recorded("3");
  void* streams[2];
  for (void*& stream : streams) stream = c::get<void*>(forebay_stream_create, one.device);
  c::call(forebay_step_begin, one.engine);
  c::call(forebay_micro_step_begin, one.engine, 0);
  for (void* const stream : streams) ASSERT_OK(forebay_acquire(one.engine, one.first, 0, stream));
  EXPECT_EQ(forebay_release(one.engine, one.first, streams[0]), FOREBAY_INVALID_ARGUMENT);
  EXPECT_OK(forebay_release(one.engine, one.first, streams[1]));
  EXPECT_OK(forebay_release(one.engine, one.first, streams[0]));
  ASSERT_OK(forebay_abandon(one.engine, 0));
}

TEST(CApiRecordedOrder, GivesAStepUpAndGoesOn) {
  One one = recorded("3");
  const std::string before = digest_of(one);
  c::call(forebay_step_begin, one.engine);
  c::call(forebay_micro_step_begin, one.engine, 0);
  ASSERT_OK(forebay_acquire(one.engine, one.first, 0, nullptr));
  ASSERT_OK(forebay_abandon(one.engine, 0));
  void* address = nullptr;
  EXPECT_EQ(forebay_parameter(one.engine, one.first, 0, &address), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(forebay_release(one.engine, one.first, nullptr), FOREBAY_INVALID_ARGUMENT)
      << "it ended with the step";
  EXPECT_EQ(digest_of(one), before);
  const forebay_step_result result = one.step(1);
  EXPECT_EQ(result.abandoned, 0);
  EXPECT_NE(digest_of(one), before);
}

TEST(CApiRecordedOrder, HasBetasForEachGroupAndAFactorOfGradients) {
  One one = recorded("2");
  ASSERT_OK(forebay_hyperparameter(one.engine, 0, "beta1", 0.5));
  ASSERT_OK(forebay_hyperparameter(one.engine, 1, "epsilon", 1e-6));
  ASSERT_OK(forebay_hyperparameter(one.engine, FOREBAY_WHOLE_STEP, "gradient-factor", 0.5));
  EXPECT_NEAR(one.step(2).grad_norm, std::sqrt(288.0), 1e-6);
}

TEST(CApiCheckpointer, GivesBackActivationAndRecord) {
  One one;
  c::Options slot{{"activation-state-bytes", "16"}};
  const auto checkpointer =
      c::make<c::Checkpointer>(forebay_checkpointer_create, one.device, one.ranks, nullptr, nullptr);
  ASSERT_OK(forebay_checkpointer_declare(checkpointer, 5, 1, 1000, slot));
  ASSERT_OK(forebay_checkpointer_commit(checkpointer, nullptr));
  std::vector<char> activation(1000, 'a');
  ASSERT_OK(forebay_checkpointer_save(checkpointer, 5, 1, 0, activation.data(), 1000, "seed", 5, nullptr));
  void* data = nullptr;
  const void* record = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t record_bytes = 0;
  ASSERT_OK(forebay_checkpointer_load(checkpointer, 5, 1, 0, nullptr, &data, &bytes, &record, &record_bytes));
  ASSERT_OK(forebay_stream_synchronize(one.device, nullptr));
  EXPECT_EQ(std::string(static_cast<char*>(data), bytes), std::string(1000, 'a'));
  EXPECT_STREQ(static_cast<const char*>(record), "seed");
  EXPECT_EQ(record_bytes, 5u);
  EXPECT_OK(forebay_checkpointer_load_end(checkpointer, 5, 1, 0));
  EXPECT_EQ(forebay_checkpointer_load_end(checkpointer, 5, 1, 0), FOREBAY_INVALID_ARGUMENT);
  EXPECT_OK(forebay_checkpointer_check(checkpointer));
}

TEST(CApiMemory, ASnapshotThatCannotBeWrittenIsAFailure) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
  One one;
  const auto arena = c::make<c::Arena>(forebay_arena_create, one.device, nullptr);

  EXPECT_EQ(forebay_arena_snapshot(arena, "/dev/full"), FOREBAY_IO_ERROR);
  EXPECT_NE(last_error().find("No space left"), std::string::npos) << last_error();
}

// A file system over a network may report at the close that it lost the bytes.
TEST(CApiMemory, ASnapshotThatCannotBeClosedIsAnError) {
  One one;
  const auto arena = c::make<c::Arena>(forebay_arena_create, one.device, nullptr);
  const std::string path =
      std::filesystem::temp_directory_path() / ("capi_snapshot." + std::to_string(getpid()));

  failing_close = 1;
  EXPECT_EQ(forebay_arena_snapshot(arena, path.c_str()), FOREBAY_IO_ERROR);
  EXPECT_EQ(failing_close, 0);
  EXPECT_EQ(last_error(), "cannot write " + path +
                              ": Input/output error; give a path on a file system that works and has room");
  EXPECT_OK(forebay_arena_snapshot(arena, path.c_str()));
  std::filesystem::remove(path);
}

// No two figures are equal.
TEST(CApiReports, EachFigureHasItsKey) {
  EXPECT_EQ(json_of(PoolBytes{1, 2, 4, 8, 16, 32}).dump(),
            R"({"parameters":1,"gradients":2,"optimizer":4,"gathered":8,"buckets":16,"activations":32,)"
            R"("model_states":7,"total":63})");
  EXPECT_EQ(json_of(WireBytes{.sent = 1, .received = 2}).dump(), R"({"sent":1,"received":2})");
  EXPECT_EQ(json_of(Traffic{.sent_bytes = 1, .received_bytes = 2}).dump(), R"({"sent":1,"received":2})");

  ModelShape model;
  model.activation_bytes = 3;
  model.units.push_back({.name = "a",
                         .parameters = {{.name = "w", .count = 5, .group = 6, .frozen = true},
                                        {.name = "v", .count = 7, .replicated = true}},
                         .backward_reads_parameters = false});
  model.units.push_back(
      {.name = "b", .parameters = {{.name = "u", .count = 11}}, .tied = {{.unit = 0, .index = 1}}});
  EXPECT_EQ(json_of(model), Json::parse(R"(
{"parameters": 23, "activation_bytes": 3,
 "units": [{"name": "a", "backward_reads_parameters": false,
            "parameters": [{"name": "w", "count": 5, "group": 6, "frozen": true, "replicated": false},
                           {"name": "v", "count": 7, "group": 0, "frozen": false, "replicated": true}],
            "tied": []},
           {"name": "b", "backward_reads_parameters": true,
            "parameters": [{"name": "u", "count": 11, "group": 0, "frozen": false, "replicated": false}],
            "tied": [{"unit": 0, "index": 1}]}]})"));

  Plan plan;
  plan.options.ranks = 21;
  plan.bytes = {1, 2, 4, 8, 16, 32};
  plan.reserved_bytes = 22;
  plan.host_bytes = {.optimizer = 101, .gradients = 202, .parameters = 404, .staging = 808, .saving = 1616};
  plan.file_bytes = {.optimizer = 31, .parameters = 32, .read_per_step = 33, .written_per_step = 34};
  plan.wire_per_step = {.sent = 41, .received = 42};
  plan.device_units = 43;
  plan.slots.slot_bytes = {44, 45};
  EXPECT_EQ(json_of(plan), Json::parse(R"(
{"ranks": 21,
 "bytes": {"parameters": 1, "gradients": 2, "optimizer": 4, "gathered": 8, "buckets": 16, "activations": 32,
           "model_states": 7, "total": 63},
 "reserved_bytes": 22,
 "host": {"optimizer": 101, "gradients": 202, "parameters": 404, "staging": 808, "saving": 1616, "total": 3131},
 "files": {"optimizer": 31, "parameters": 32, "total": 63, "read_per_step": 33, "written_per_step": 34},
 "wire_per_step": {"sent": 41, "received": 42}, "device_units": 43, "slot_bytes": [44, 45]})"));

  ActivationPlan activations;
  activations.slots = {{.unit = 51, .slot = 52, .bytes = 53, .placement = ActivationPlacement::kPartition}};
  activations.places = {{.ways = 2, .slice_bytes = 54, .spilled_bytes = 55, .kept_bytes = 56}};
  activations.look_ahead = 57;
  activations.kept_bytes = 61;
  activations.staging_bytes = 62;
  activations.gathered_bytes = 64;
  activations.reserved_bytes = 65;
  activations.host_spilled_bytes = 71;
  activations.host_staging_bytes = 72;
  activations.file_bytes = 73;
  activations.wire_per_micro_batch = {.sent = 81, .received = 82};
  activations.spilled_bytes_per_micro_batch = 83;
  EXPECT_EQ(json_of(activations), Json::parse(R"(
{"device_bytes": 187, "reserved_bytes": 65, "host_bytes": 143, "file_bytes": 73, "look_ahead": 57,
 "wire_per_micro_batch": {"sent": 81, "received": 82}, "spilled_bytes_per_micro_batch": 83,
 "slots": [{"unit": 51, "slot": 52, "bytes": 53, "placement": "partition", "kept_bytes": 56, "spilled_bytes": 55}]})"));
}

TEST(CApiReports, NumbersAreFoundByTheirPathAlone) {
  const Json json = {{"a", {{"b", 3}, {"text", "x"}, {"half", 0.5}}}, {"c", -1}, {"d", {1, 2}}};
  EXPECT_EQ(number_at(json, "a.b"), 3u);
  EXPECT_EQ(number_at(json, "c"), ~std::uint64_t{0});
  for (const char* const path : {"a", "b", "a.text", "a.half", "d", "a.b.c", ""})
    EXPECT_ANY_THROW(static_cast<void>(number_at(json, path))) << path;
}

TEST(CApiMemory, ReportsCountWhatIsAndWhatWas) {
  const One one;
  const auto arena =
      c::make<c::Arena>(forebay_arena_create, one.device, c::Options{{"arena-limit", "64MiB"}});
  const auto limited = c::get<std::int32_t>(forebay_arena_tag_create, arena, "limited", 4096, 0);
  const auto small = c::get<void*>(forebay_arena_allocate, arena, 1000, nullptr, limited, 0);
  const auto large = c::get<void*>(forebay_arena_allocate, arena, 3 << 20, nullptr, 0, FOREBAY_FIXED);
  void* block = nullptr;
  EXPECT_EQ(forebay_arena_allocate(arena, 4096, nullptr, limited, 0, &block), FOREBAY_OUT_OF_MEMORY);
  ASSERT_OK(forebay_arena_free(arena, large, nullptr));
  const auto number = [&](const char* name) {
    return c::get<std::uint64_t>(forebay_arena_number, arena, name);
  };
  EXPECT_EQ(number("requested_bytes"), 1000u);
  EXPECT_EQ(number("peak_requested_bytes"), 1000u + (3 << 20));
  EXPECT_EQ(number("live_bytes"), c::get<std::uint64_t>(forebay_arena_block_bytes, arena, small));
  EXPECT_GE(number("peak_live_bytes"), number("live_bytes") + (3 << 20));
  EXPECT_EQ(number("allocation_count"), 2u);
  EXPECT_EQ(number("tags.limited.allocation_count"), 1u);
  const std::uint64_t peak_reserved = number("peak_reserved_bytes");
  // The first trim may only ask the stream whether it has come past the block.
  auto freed = c::get<std::uint64_t>(forebay_arena_trim, arena);
  ASSERT_OK(forebay_stream_synchronize(one.device, nullptr));
  freed += c::get<std::uint64_t>(forebay_arena_trim, arena);
  EXPECT_EQ(freed, peak_reserved - number("reserved_bytes"));
  EXPECT_LT(number("reserved_bytes"), peak_reserved);
  EXPECT_EQ(number("peak_reserved_bytes"), peak_reserved);
  ASSERT_OK(forebay_arena_reset_peaks(arena));
  EXPECT_EQ(number("peak_requested_bytes"), 1000u);

  const auto pool =
      c::make<c::PinnedPool>(forebay_pinned_pool_create, one.device, c::Options{{"pinned-slab", "1MiB"}});
  auto* const first = c::get<void*>(forebay_pinned_pool_allocate, pool, 5000);
  auto* const second = c::get<void*>(forebay_pinned_pool_allocate, pool, 4 << 20);
  ASSERT_OK(forebay_pinned_pool_free(pool, second, FOREBAY_NO_STREAM));
  const auto pinned = [&](const char* name) {
    return c::get<std::uint64_t>(forebay_pinned_pool_number, pool, name);
  };
  EXPECT_EQ(pinned("requested_bytes"), 5000u);
  EXPECT_EQ(pinned("peak_requested_bytes"), 5000u + (4 << 20));
  EXPECT_EQ(pinned("live_bytes"), c::get<std::uint64_t>(forebay_pinned_pool_block_bytes, pool, first));
  EXPECT_EQ(pinned("pending_bytes"), 0u);
  EXPECT_EQ(pinned("allocation_count"), 2u);
  const std::uint64_t held = pinned("held_bytes");
  const auto released = c::get<std::uint64_t>(forebay_pinned_pool_trim, pool);
  EXPECT_EQ(released, 4u << 20);
  EXPECT_EQ(pinned("held_bytes"), held - released);
  EXPECT_EQ(pinned("peak_held_bytes"), held);
}

TEST(CApiDevice, NamesThatAreNoneAreRefused) {
  for (const std::string name : {"", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cudas", "gpu", "host "}) {
    forebay_device* device = nullptr;
    EXPECT_EQ(forebay_device_open(name.c_str(), nullptr, &device), FOREBAY_INVALID_ARGUMENT) << name;
    EXPECT_EQ(last_error(),
              "forebay_device_open: there is no device \"" + name + "\"; use host, cuda, cuda:N or model");
  }
}

TEST(CApiDevice, FillsWithAnyByte) {
  const One one;
  const auto arena = c::make<c::Arena>(forebay_arena_create, one.device, nullptr);
  auto* const block =
      static_cast<unsigned char*>(c::get<void*>(forebay_arena_allocate, arena, 8, nullptr, 0, 0));
  ASSERT_OK(forebay_fill(one.device, block, 255, 8, nullptr));
  ASSERT_OK(forebay_stream_synchronize(one.device, nullptr));
  EXPECT_EQ(block[7], 255);
  for (const std::int32_t value : {-1, 256}) {
    EXPECT_EQ(forebay_fill(one.device, block, value, 8, nullptr), FOREBAY_INVALID_ARGUMENT);
    EXPECT_EQ(last_error(), "forebay_fill: value is " + std::to_string(value) + "; use 0 to 255");
  }
  EXPECT_STREQ(forebay_code_name(FOREBAY_INTERNAL), "FOREBAY_INTERNAL");
  EXPECT_STREQ(forebay_code_name(FOREBAY_PEER_LOST), "FOREBAY_PEER_LOST");
  EXPECT_STREQ(forebay_code_name(FOREBAY_INTERNAL + 1), "FOREBAY_UNKNOWN");
  EXPECT_STREQ(forebay_code_name(-1), "FOREBAY_UNKNOWN");
}

TEST(CApiDevice, ReportsItsMemoryAndTheFreePartOfIt) {
  const auto device =
      c::make<c::Device>(forebay_device_open, "model", c::Options{{"device-memory", "64MiB"}});
  const auto arena = c::make<c::Arena>(forebay_arena_create, device, nullptr);
  c::get<void*>(forebay_arena_allocate, arena, 10 << 20, nullptr, 0, FOREBAY_PERSISTENT);
  const auto report = nlohmann::json::parse(c::get<const char*>(forebay_device_report, device));
  EXPECT_EQ(report["kind"], "model");
  EXPECT_EQ(report["memory_bytes"], 64 << 20);
  EXPECT_EQ(report["granularity"], 2 << 20);
  EXPECT_LE(report["free_bytes"], 54 << 20);
  EXPECT_GE(report["free_bytes"], 0);
}

TEST(CApiMemory, ArenaPoolAndStoreKeepTheirBytes) {
  One one;
  const auto arena =
      c::make<c::Arena>(forebay_arena_create, one.device, c::Options{{"arena-limit", "64MiB"}});
  const auto tag = c::get<std::int32_t>(forebay_arena_tag_create, arena, "weights", 0, 0);
  const auto block = c::get<void*>(forebay_arena_allocate, arena, 1000, nullptr, tag, FOREBAY_PERSISTENT);
  const auto pool = c::make<c::PinnedPool>(forebay_pinned_pool_create, one.device, nullptr);
  auto* const pinned = static_cast<char*>(c::get<void*>(forebay_pinned_pool_allocate, pool, 4096));
  ASSERT_OK(forebay_fill(one.device, block, 7, 1000, nullptr));
  ASSERT_OK(forebay_copy(one.device, pinned, block, 1000, nullptr));
  ASSERT_OK(forebay_stream_synchronize(one.device, nullptr));
  EXPECT_EQ(pinned[999], 7);
  std::uint64_t live = 0;
  ASSERT_OK(forebay_arena_number(arena, "tags.weights.requested_bytes", &live));
  EXPECT_EQ(live, 1000u);
  ASSERT_OK(forebay_arena_free(arena, block, nullptr));
  EXPECT_EQ(forebay_arena_free(arena, block, nullptr), FOREBAY_INVALID_ARGUMENT);
  ASSERT_OK(forebay_pinned_pool_free(pool, pinned, FOREBAY_NO_STREAM));

  const auto store = c::make<c::FileStore>(
      forebay_file_store_create,
      c::Options{{"store-directories", std::filesystem::temp_directory_path().string()}});
  const auto range = c::get<std::uint32_t>(forebay_file_store_range, store, "states", 100);
  std::vector<char> written(100, 'w');
  std::vector<char> read(100);
  auto ticket = c::get<std::uint64_t>(forebay_file_store_write, store, range, 0, written.data(), 100);
  ASSERT_OK(forebay_file_store_wait(store, ticket, 10'000));
  ticket = c::get<std::uint64_t>(forebay_file_store_read, store, range, 0, read.data(), 100);
  ASSERT_OK(forebay_file_store_wait(store, ticket, 10'000));
  EXPECT_EQ(read, written);
}

}  // namespace
}  // namespace forebay::api
