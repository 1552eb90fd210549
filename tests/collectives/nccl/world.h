// Ranks over the fake NCCL on fake GPUs, with `local` as their control plane.
#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <functional>
#include <memory>

#include "collectives/nccl/abi.h"
#include "forebay/local_communicator.h"
#include "forebay/nccl_communicator.h"
#include "tests/collectives/communicator_conformance.h"
#include "tests/support/fake_gpu.h"
#include "tests/support/fake_nccl_library.h"

namespace forebay::testing {

struct NcclWorldOptions {
  fake_cuda::FakeOptions gpu = strict_gpu();
  fake_nccl::FakeNcclOptions nccl;
  NcclOrder order = NcclOrder::kRank;
  // Stands between a rank and its control plane; empty: nothing does.
  std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)> wrap_control;
};

class NcclWorld final : public CommunicatorWorld {
 public:
  NcclWorld(int size, std::chrono::milliseconds deadline, const NcclWorldOptions& options)
      : options_(options),
        gpu_(options.gpu),
        nccl_(options.nccl),
        deadline_(deadline),
        together_(size),
        group_(LocalGroup::create(size, {.deadline = deadline})) {}

  std::unique_ptr<Backend> create_backend(int rank) override {
    return gpu_.create_backend(rank % options_.gpu.device_count);
  }
  Result<std::unique_ptr<Communicator>> join(int rank, Backend& backend, Kernels& kernels) override {
    // A short deadline is for the operations under test, not for starting threads.
    together_.arrive_and_wait();
    Result<std::unique_ptr<Communicator>> control = group_->communicator(rank, backend, kernels);
    FOREBAY_RETURN_IF_ERROR(control.status());
    std::unique_ptr<Communicator> plane = std::move(control).value();
    if (options_.wrap_control) plane = options_.wrap_control(std::move(plane));
    Result<std::unique_ptr<NcclCommunicator>> communicator =
        create_nccl_communicator(std::move(plane), static_cast<CudaBackend&>(backend), kernels,
                                 {.library = {}, .deadline = deadline_, .order = options_.order});
    FOREBAY_RETURN_IF_ERROR(communicator.status());
    return std::unique_ptr<Communicator>(std::move(communicator).value());
  }
  const FakeGpu& gpu() const { return gpu_; }
  fake_nccl::FakeNcclAccount account() const { return nccl_.controls().accounts(); }

 private:
  const NcclWorldOptions options_;
  FakeGpu gpu_;
  FakeNcclLibrary nccl_;
  const std::chrono::milliseconds deadline_;
  std::barrier<> together_;
  const std::shared_ptr<LocalGroup> group_;  // Shared with the communicators it hands out.
};

}  // namespace forebay::testing
