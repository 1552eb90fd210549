// Guarded memory under the engine: a unit can be used during its leases and at no other time.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "forebay/engine.h"
#include "forebay/error.h"
#include "forebay/host_backend.h"
#include "forebay/kernels.h"
#include "forebay/local_communicator.h"

namespace forebay::testing {
namespace {

constexpr int kCount = 100;

// A trainer of two units, one rank at stage 3, whose host reads and writes the memory of leases itself.
class Trainer {
 public:
  Trainer() {
    for (const char* name : {"u0", "u1"}) {
      weights_.push_back(engine_.add_parameter(engine_.add_unit(name), std::string(name) + ".w", kCount));
    }
    engine_.commit();
    for (const ParameterId weight : weights_) {
      engine_.set_parameter(weight, std::vector<float>(kCount, 1 + static_cast<float>(weight.unit)));
    }
    stream_ = value_or_throw(backend_->stream_create());
    engine_.step_begin();
    engine_.micro_step_begin(0);
  }
  ~Trainer() { static_cast<void>(backend_->stream_destroy(stream_)); }

  Lease forward(UnitId unit) { return opened(engine_.forward(unit, stream_)); }
  Lease backward(UnitId unit) { return opened(engine_.backward(unit, stream_)); }
  void end(Lease lease) {
    { const Lease ended = std::move(lease); }
    throw_if_error(backend_->stream_synchronize(stream_));
  }
  StepResult step() { return engine_.step({.groups = {{.lr = 0.1}}}); }

  static volatile float* floats(DevicePtr address) { return reinterpret_cast<volatile float*>(address); }
  static volatile float* gradient(Lease& lease) {
    bool accumulate = false;
    return floats(lease.gradient(0, &accumulate));
  }

 private:
  Lease opened(Lease lease) {
    throw_if_error(backend_->stream_synchronize(stream_));
    return lease;
  }

  static EngineOptions options() {
    EngineOptions result;
    result.stage = 3;
    return result;
  }

  std::unique_ptr<HostBackend> backend_ = value_or_throw(HostBackend::create({.guard = true}));
  std::unique_ptr<Kernels> kernels_ = value_or_throw(Kernels::create(*backend_));
  std::shared_ptr<LocalGroup> group_ = LocalGroup::create(1);
  std::unique_ptr<Communicator> communicator_ = value_or_throw(group_->communicator(0, *backend_, *kernels_));
  Engine engine_{*backend_, *kernels_, *communicator_, options()};
  std::vector<ParameterId> weights_;
  Stream stream_;
};

TEST(GuardedEngine, AStepThatUsesItsLeasesRuns) {
  Trainer trainer;
  for (const UnitId unit : {0, 1}) {
    Lease lease = trainer.forward(unit);
    EXPECT_EQ(Trainer::floats(lease.parameter(0))[kCount - 1], 1 + static_cast<float>(unit));
    trainer.end(std::move(lease));
  }
  for (const UnitId unit : {1, 0}) {
    Lease lease = trainer.backward(unit);
    EXPECT_EQ(Trainer::floats(lease.parameter(0))[0], 1 + static_cast<float>(unit));
    for (int i = 0; i < kCount; ++i) Trainer::gradient(lease)[i] = 0.5f;
    trainer.end(std::move(lease));
  }
  EXPECT_FALSE(trainer.step().skipped);
}

void read_after_the_lease() {
  Trainer trainer;
  Lease lease = trainer.forward(0);
  volatile float* const weights = Trainer::floats(lease.parameter(0));
  trainer.end(std::move(lease));
  static_cast<void>(weights[1]);
}

void write_parameters() {
  Trainer trainer;
  const Lease lease = trainer.forward(0);
  Trainer::floats(lease.parameter(0))[0] = 1;
}

void write_a_gradient_after_the_lease() {
  Trainer trainer;
  trainer.end(trainer.forward(0));
  trainer.end(trainer.forward(1));
  Lease lease = trainer.backward(1);
  volatile float* const gradient = Trainer::gradient(lease);
  trainer.end(std::move(lease));
  gradient[0] = 1;
}

// Each whole trainer is in the child that dies, because threads do not survive a fork.
TEST(GuardedEngineDeathTest, NamesTheUnitOfAReadAfterItsLease) {
  EXPECT_DEATH(
      read_after_the_lease(),
      "cannot (read|use) 0x[0-9a-f]+: it is byte 4 of the parameters of unit u0 on host, which nobody "
      "may use now; use it between the begin and the end of a lease");
}

TEST(GuardedEngineDeathTest, ParametersAreNotWritten) {
  EXPECT_DEATH(write_parameters(), "byte 0 of the parameters of unit u0 on host, which nobody may write now");
}

TEST(GuardedEngineDeathTest, NamesTheUnitOfAGradientWrittenAfterItsLease) {
  EXPECT_DEATH(write_a_gradient_after_the_lease(),
               "of the gradients of unit u1 on host, which nobody may use");
}

}  // namespace
}  // namespace forebay::testing
