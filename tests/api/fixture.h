// Handles on a host device of one rank, for tests.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "forebay/forebay.hpp"

namespace forebay::api {

#define EXPECT_OK(call) EXPECT_EQ(call, FOREBAY_OK) << forebay_last_error()
#define ASSERT_OK(call) ASSERT_EQ(call, FOREBAY_OK) << forebay_last_error()

struct One {
  explicit One(const c::Options& options = {{"deadline", "3000"}}) {
    device = c::make<c::Device>(forebay_device_open, "host", options);
    group = c::make<c::LocalGroup>(forebay_local_group_create, 1, options);
    ranks = c::make<c::Communicator>(forebay_local_group_communicator, group, 0, device);
    engine = c::make<c::Engine>(forebay_engine_create, device, ranks, nullptr, nullptr, options);
  }

  // Two units: "first" with parameter w1 of 256, whose backward pass reads nothing, and "second" with w2
  // of 32.
  void describe() {
    first = c::get<std::int32_t>(forebay_engine_add_unit, engine, "first", FOREBAY_BACKWARD_READS_NOTHING);
    second = c::get<std::int32_t>(forebay_engine_add_unit, engine, "second", 0);
    c::get<std::int32_t>(forebay_engine_add_parameter, engine, first, "w1", 256, 0, 0);
    c::get<std::int32_t>(forebay_engine_add_parameter, engine, second, "w2", 32, 1, 0);
  }
  void commit() {
    describe();
    c::call(forebay_engine_commit, engine);
  }
  // One step in which every gradient is `value`.
  forebay_step_result step(float value) {
    c::call(forebay_step_begin, engine);
    c::call(forebay_micro_step_begin, engine, 0);
    for (const std::int32_t unit : {first, second}) c::Lease(engine, unit, c::Pass::kForward, nullptr);
    for (const std::int32_t unit : {second, first}) {
      const c::Lease lease(engine, unit, c::Pass::kBackward, nullptr);
      c::call(forebay_stream_synchronize, device, nullptr);
      float* const gradient = lease.gradient<float>(0).address;
      for (int i = 0; i < (unit == first ? 256 : 32); ++i) gradient[i] = value;
    }
    return c::step(engine);
  }

  c::Device device;
  c::LocalGroup group;
  c::Communicator ranks;
  c::Engine engine;
  std::int32_t first = 0;
  std::int32_t second = 0;
};

inline std::string last_error() {
  return forebay_last_error();
}

}  // namespace forebay::api
