// The bytes by which the model backend's kernels take their time: those that each kernel reads and writes.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "forebay/error.h"
#include "forebay/kernels.h"
#include "forebay/model_backend.h"
#include "forebay/muon.h"

namespace forebay {
namespace {

using Noted = std::pair<std::string, double>;

class NotingTiming final : public ModelTiming {
 public:
  ModelWork copy(ModelCopy, std::uint64_t) const override { return {.name = "copy"}; }
  ModelWork fill(std::uint64_t) const override { return {.name = "fill"}; }
  ModelWork kernel(const char* name, std::uint64_t bytes) const override {
    noted.emplace_back(name, bytes);
    return {.name = name};
  }
  ModelWork fp32_products(const char* name, double m, double n, double k, double count) const override {
    noted.emplace_back(name, m * n * k * count);
    return {.name = name};
  }

  mutable std::vector<Noted> noted;
};

class ModelKernelsTest : public ::testing::Test {
 protected:
  ModelKernelsTest()
      : backend_(value_or_throw(ModelBackend::create({.timing = &timing_, .clock = &clock_}))),
        kernels_(value_or_throw(Kernels::create(*backend_))),
        stream_(value_or_throw(backend_->stream_create())),
        memory_(value_or_throw(backend_->alloc(1 << 20))) {}

  // Another address each time, aligned for any type.
  template <typename T = float>
  T* place() {
    return reinterpret_cast<T*>(memory_ + 4096 * place_count_++);
  }
  void expect(const Status& status, const char* name, double bytes) {
    EXPECT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(timing_.noted, (std::vector<Noted>{{name, bytes}}));
    timing_.noted.clear();
  }
  AdamWArguments update(DataType gradient, std::size_t count) {
    AdamWArguments a{};
    a.gradient = place();
    a.master = place();
    a.m = place();
    a.v = place();
    a.count = count;
    a.gradient_type = gradient;
    return a;
  }

  NotingTiming timing_;
  HostClock clock_{HostClock::Mode::kVirtual};
  std::unique_ptr<ModelBackend> backend_;
  std::unique_ptr<Kernels> kernels_;
  Stream stream_;
  DevicePtr memory_;
  std::size_t place_count_ = 0;
};

constexpr DataType kFp32 = DataType::kFloat32;
constexpr DataType kBf16 = DataType::kBfloat16;

TEST_F(ModelKernelsTest, ElementwiseKernelsReadAndWriteTheirArrays) {
  expect(kernels_->cast({place(), place(), 10, kFp32, kBf16}, stream_), "cast", 10 * (4 + 2));
  // Contributions of 3 ranks, and the sum: it is read too unless it is the first.
  expect(kernels_->accumulate({place(), place<std::byte>(), 20, place(), 10, 0, 3, kBf16, true}, stream_),
         "sum of ranks", 10 * (3 * 2 + 4));
  expect(kernels_->accumulate({place(), place<std::byte>(), 20, place(), 10, 0, 3, kBf16, false}, stream_),
         "sum of ranks", 10 * (3 * 2 + 8));
  expect(kernels_->scale({place(), place(), 10, 1.0f, kBf16, kBf16}, stream_), "average", 10 * (4 + 2));
  expect(kernels_->add({place(), place(), 10, kBf16}, stream_), "add", 10 * 3 * 2);
  expect(kernels_->norm({place(), place<double>(), place<double>(), 512, kBf16}, stream_), "norm", 512 * 2);
  expect(kernels_->fill({place(), 10, 0.0f, kBf16}, stream_), "fill", 10 * 2);
}

TEST_F(ModelKernelsTest, AnUpdateReadsAndWritesEachState) {
  AdamWArguments a = update(kBf16, 10);
  expect(kernels_->adamw(a, stream_), "update", 10 * (3 * 8 + 2));
  a.parameter = place();
  a.parameter_type = kBf16;
  expect(kernels_->adamw_controlled({a, place<StepState>(), nullptr}, stream_), "update",
         10 * (3 * 8 + 2 + 2));
  a.optimizer = Optimizer::kSgd;
  a.v = nullptr;
  expect(kernels_->adamw(a, stream_), "update", 10 * (2 * 8 + 2 + 2));
}

TEST_F(ModelKernelsTest, KeptStatesTakeTheirOwnBytes) {
  ControlledKeptUpdateArguments a{};
  a.kept.update = update(kBf16, 512);
  a.kept.moments = {MomentFormat::kBfloat16, place(), place(), nullptr, nullptr};
  expect(kernels_->update_kept(a, stream_), "update", 512 * (2 * (4 + 2 + 2) + 2));
  a.kept.average = place();
  expect(kernels_->update_kept(a, stream_), "update", 512 * (2 * (4 + 2 + 2 + 4) + 2));
  a.kept.average = nullptr;
  a.kept.half.elements = place<std::uint16_t>();
  a.kept.moments = {MomentFormat::kBlock8, place(), place(), place<std::uint8_t>(), place<std::uint8_t>()};
  expect(kernels_->update_kept(a, stream_), "update", 512 * (2 * (2 + 1 + 1) + 2) + 2 * 2 * 2);
  a.kept.update.optimizer = Optimizer::kLion;
  expect(kernels_->update_kept(a, stream_), "update", 512 * (2 * (2 + 1) + 2) + 2 * 2);
}

TEST_F(ModelKernelsTest, AMuonStepTakesItsPartsAndItsProducts) {
  const MuonGradient gradient{place(), kBf16, 1.0f};
  expect(kernels_->muon_momentum({{gradient, 0.1f, place(), place(), 10}, nullptr}, stream_), "momentum",
         10 * (2 + 8));
  // 5 steps of 1.5 n k^2 + 0.5 k^3 multiply-adds.
  expect(kernels_->orthogonalise({{place(), place(), 8, 4}, nullptr}, stream_), "orthogonalise",
         5 * (1.5 * 8 * 16 + 0.5 * 64));
  MuonUpdateArguments move{};
  move.gradient = gradient;
  move.m = place();
  move.u = place();
  move.master = place();
  move.count = 10;
  expect(kernels_->muon_update({move, nullptr}, stream_), "update", 10 * (2 + 12 + 8));
  move.average = place();
  expect(kernels_->muon_update({move, nullptr}, stream_), "update", 10 * (2 + 12 + 8 + 8));
  move.parameter = place();
  move.parameter_type = kBf16;
  expect(kernels_->muon_update({move, nullptr}, stream_), "update", 10 * (2 + 12 + 8 + 8 + 2));
  move.half.elements = place<std::uint16_t>();
  expect(kernels_->muon_update({move, nullptr}, stream_), "update", 10 * (2 + 12 + 4 + 8 + 2));
}

TEST_F(ModelKernelsTest, ADecisionReadsTheSquaresOfAllRanks) {
  StepControlArguments a{};
  a.state = place<StepState>();
  a.squares = place<double>();
  a.scratch = place<double>();
  a.rank_stride = 3;
  a.unit_count = 3;
  a.rank_count = 4;
  a.corrections = place<BiasCorrection>();
  a.first_step = 1;
  a.correction_count = 1;
  expect(kernels_->step_control(a, stream_), "decision", 3 * 4 * 2 * 8);
}

TEST_F(ModelKernelsTest, NothingTakesNoTime) {
  EXPECT_TRUE(kernels_->fill({nullptr, 0, 0.0f, kBf16}, stream_).ok());
  EXPECT_TRUE(kernels_->orthogonalise({{nullptr, nullptr, 0, 4}, nullptr}, stream_).ok());
  EXPECT_TRUE(timing_.noted.empty());
  EXPECT_STREQ(kernels_->description(), "model, nothing is computed");
}

}  // namespace
}  // namespace forebay
