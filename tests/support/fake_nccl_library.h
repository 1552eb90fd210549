// FakeNcclLibrary: the fake NCCL of this build as the one that this process loads. Together with a FakeGpu
// that outlives it.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/fakes/nccl/fake_nccl.h"

namespace forebay::testing {

// Alive one at a time.
class FakeNcclLibrary {
 public:
  explicit FakeNcclLibrary(const fake_nccl::FakeNcclOptions& options = {}) {
    ::setenv("FOREBAY_NCCL_LIBRARY", FOREBAY_FAKE_LIBNCCL, 1);
    fake_ = fake_nccl::FakeNccl::open(FOREBAY_FAKE_LIBNCCL);
    fake_.reset();
    fake_.configure(options);
  }
  // Everything was given back, and NCCL was used as it wants to be.
  ~FakeNcclLibrary() {
    const fake_nccl::FakeNcclAccount account = fake_.accounts();
    EXPECT_EQ(account.comms, 0u);
    EXPECT_EQ(account.operations, 0u);
    EXPECT_EQ(account.misuses, 0u);
  }
  FakeNcclLibrary(const FakeNcclLibrary&) = delete;
  FakeNcclLibrary& operator=(const FakeNcclLibrary&) = delete;

  const fake_nccl::FakeNccl& controls() const { return fake_; }

 private:
  fake_nccl::FakeNccl fake_;
};

}  // namespace forebay::testing
