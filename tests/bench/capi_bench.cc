// The time that the C interface adds to a call: each function and the C++ call under it, in turn, on the same
// engine.
//
// Ends with 1 if a function adds 100 ns or more.
//
//   build/release/bench/capi_bench
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "forebay/forebay.hpp"
#include "runtime/api/objects.h"

namespace {

using namespace forebay;
using Nanoseconds = std::chrono::duration<double, std::nano>;

constexpr int kRounds = 41;
constexpr int kCalls = 20'000;

template <typename Body>
double nanoseconds(int calls, Body body) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) body();
  return Nanoseconds(std::chrono::steady_clock::now() - begin).count() / calls;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + kRounds / 2, values.end());
  return values[kRounds / 2];
}

double most_added = 0;  // nanoseconds, of the calls compared so far

// `c_call` calls so many `functions`. Pairs of rounds, so that a busy machine is busy for both.
template <typename C, typename Cxx>
void compare(const char* name, int functions, int calls, C c_call, Cxx cxx_call) {
  std::vector<double> c_times, cxx_times, differences;
  for (int round = 0; round < kRounds; ++round) {
    c_times.push_back(nanoseconds(calls, c_call));
    cxx_times.push_back(nanoseconds(calls, cxx_call));
    differences.push_back(c_times.back() - cxx_times.back());
  }
  const double added = median(differences);
  std::printf("%-34s C %8.1f ns   C++ %8.1f ns   added %6.1f ns\n", name, median(c_times), median(cxx_times),
              added);
  most_added = std::max(most_added, added / functions);
}

}  // namespace

int main() {
  const auto device = c::make<c::Device>(forebay_device_open, "host", nullptr);
  const auto group = c::make<c::LocalGroup>(forebay_local_group_create, 1, nullptr);
  const auto ranks = c::make<c::Communicator>(forebay_local_group_communicator, group, 0, device);
  const c::Options options{{"order-of-units", "recorded"}};
  const auto engine = c::make<c::Engine>(forebay_engine_create, device, ranks, nullptr, nullptr, options);
  const auto unit = c::get<std::int32_t>(forebay_engine_add_unit, engine, "unit", 0);
  c::get<std::int32_t>(forebay_engine_add_parameter, engine, unit, "weight", 1024, 0, 0);
  c::call(forebay_engine_commit, engine);
  const auto stream = c::get<void*>(forebay_stream_create, device);
  Engine& cxx = *[&] { return api::share<forebay_engine>(engine).keep()->engine.get(); }();

  compare(
      "forebay_loss_scale", 1, kCalls,
      [&] {
        double scale = 0;
        forebay_loss_scale(engine, &scale);
      },
      [&] {
        const volatile double scale = cxx.loss_scale();
        static_cast<void>(scale);
      });
  c::call(forebay_evaluation_begin, engine);
  compare(
      "forebay_acquire, forebay_release", 2, kCalls / 100,
      [&] {
        forebay_acquire(engine, unit, 0, stream);
        forebay_release(engine, unit, stream);
      },
      [&] { static_cast<void>(cxx.forward(unit, {stream})); });
  c::call(forebay_evaluation_end, engine);
  c::call(forebay_step_begin, engine);
  c::call(forebay_micro_step_begin, engine, 0);
  c::call(forebay_acquire, engine, unit, 0, stream);
  Lease& lease = api::share<forebay_engine>(engine).keep()->leases.front().lease;
  compare(
      "forebay_parameter", 1, kCalls,
      [&] {
        void* address = nullptr;
        forebay_parameter(engine, unit, 0, &address);
      },
      [&] {
        void* volatile address = lease.parameter(0);
        static_cast<void>(address);
      });
  c::call(forebay_release, engine, unit, stream);
  c::call(forebay_acquire, engine, unit, 1, stream);
  Lease& backward = api::share<forebay_engine>(engine).keep()->leases.front().lease;
  compare(
      "forebay_gradient", 1, kCalls,
      [&] {
        void* address = nullptr;
        std::int32_t accumulate = 0;
        forebay_gradient(engine, unit, 0, &address, &accumulate);
      },
      [&] {
        bool accumulate = false;
        void* volatile address = backward.gradient(0, &accumulate);
        static_cast<void>(address);
      });
  c::call(forebay_release, engine, unit, stream);
  forebay_step_result result{};
  c::call(forebay_step, engine, &result, sizeof(result));
  std::printf("the most that a function adds: %.1f ns, goal: less than 100 ns\n", most_added);
  return most_added < 100 ? 0 : 1;
}
