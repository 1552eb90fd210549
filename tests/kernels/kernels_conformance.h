// The conformance suite of Kernels. Bit for bit: the definitions of kernels/definitions.h on
// hard inputs, at any alignment and count, and a step's control against a plain reference.
//
// A test program defines make_machine() per parameter and instantiates KernelsConformance. Memory is the
// backend's and reached by copies alone, so a device is treated as one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "forebay/backend.h"
#include "forebay/kernels.h"
#include "kernels/host_kernels.h"
#include "tests/kernels/kernel_test_support.h"

namespace forebay::kernel_test {

struct Machine {
  std::unique_ptr<Backend> backend;
  std::string why_not;  // Why there is no backend here; the tests are then skipped.
};

struct MachineParameter {
  const char* name;
  std::function<Machine()> make;
};

inline std::string machine_name(const ::testing::TestParamInfo<MachineParameter>& info) {
  return info.param.name;
}

class KernelsConformance : public ::testing::TestWithParam<MachineParameter> {
 protected:
  void SetUp() override {
    Machine machine = GetParam().make();
    if (machine.backend == nullptr) GTEST_SKIP() << machine.why_not;
    backend_ = std::move(machine.backend);
    Result<Stream> stream = backend_->stream_create();
    ASSERT_TRUE(stream.ok()) << stream.status().to_string();
    stream_ = stream.value();
    Result<std::unique_ptr<Kernels>> kernels = Kernels::create(*backend_);
    ASSERT_TRUE(kernels.ok()) << kernels.status().to_string();
    kernels_ = std::move(kernels).value();
  }

  void TearDown() override {
    if (backend_ == nullptr) return;
    for (const DevicePtr block : blocks_) EXPECT_TRUE(backend_->free(block).ok());
    kernels_.reset();
    EXPECT_TRUE(backend_->stream_destroy(stream_).ok());
  }

  DevicePtr allocate(std::size_t bytes) {
    Result<DevicePtr> block = backend_->alloc(std::max<std::size_t>(bytes, 1));
    if (!block.ok()) {
      ADD_FAILURE() << block.status().to_string();
      std::abort();
    }
    blocks_.push_back(block.value());
    return block.value();
  }
  void forget_blocks() {
    for (const DevicePtr block : blocks_) ASSERT_TRUE(backend_->free(block).ok());
    blocks_.clear();
  }

  void copy(void* target, const void* source, std::size_t bytes) {
    if (bytes > 0) finish(backend_->copy_async(target, source, bytes, stream_));
  }
  template <typename T>
  T* upload(const std::vector<T>& values) {
    DevicePtr block = allocate(values.size() * sizeof(T));
    copy(block, values.data(), values.size() * sizeof(T));
    return reinterpret_cast<T*>(block);
  }
  template <typename T>
  T download(const T* source) {
    T value;
    copy(&value, source, sizeof value);
    return value;
  }

  // An array of the test's, on the device; the pointer is to its first element.
  std::byte* upload(Array& array) {
    DevicePtr block = allocate(array.allocation_bytes());
    copy(block, array.allocation(), array.allocation_bytes());
    return block + array.data_offset_bytes();
  }
  void download(Array& array, const void* data) {
    copy(array.allocation(), static_cast<const std::byte*>(data) - array.data_offset_bytes(),
         array.allocation_bytes());
  }

  void finish(Status queued) {
    ASSERT_TRUE(queued.ok()) << queued.to_string();
    const Status ran = backend_->stream_synchronize(stream_);
    ASSERT_TRUE(ran.ok()) << ran.to_string();
  }

  Array hard(DataType type, std::size_t count, std::size_t offset) {
    Array array(type, count, offset);
    fill_hard(array, type, random_);
    return array;
  }

  // More elements than one pass of a grid covers, and no multiple of anything.
  std::size_t beyond_the_grid(std::size_t elements_of_a_thread) const {
    const auto processors =
        static_cast<std::size_t>(std::max(backend_->capabilities().multiprocessor_count, 1));
    return processors * 32 * 256 * elements_of_a_thread * 5 / 4 + 1237;
  }

  std::mt19937_64 random_{test_seed()};
  std::unique_ptr<Backend> backend_;
  Stream stream_;
  std::unique_ptr<Kernels> kernels_;
  std::vector<DevicePtr> blocks_;
};

}  // namespace forebay::kernel_test
