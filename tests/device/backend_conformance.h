// The conformance suite of Backend: the contract of backend.h, in driver-API terms. Device memory is reached
// through copy_async alone, so the suite judges any implementation; no host memory that is not pinned is
// copied while a gate is closed, because queueing that may wait for the device. One instantiates it with a
// BackendUnderTest.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "forebay/backend.h"

namespace forebay {

struct BackendUnderTest {
  std::string name;
  std::function<std::unique_ptr<Backend>()> make;
  std::function<Status()> available;  // Not ok: the reason why this machine has none. Unset: it has.
  std::function<void()> after;        // Runs when the backend is gone, if set.
  // The queue limit of the backend, for back-pressure; 0: there is one, but its value is unknown.
  std::size_t queue_limit = 0;
  ModuleImage module;  // With a kernel of the name below.
  // For another kind of backend.
  ModuleImage foreign_module{.image = "PTX", .image_bytes = 4};
  const char* store_kernel = "";  // (int* target, int value): *target = value.
  bool keeps_bytes = true;        // False: a model; only its rules are tested.
};

class BackendConformance : public ::testing::TestWithParam<BackendUnderTest> {
 protected:
  void SetUp() override {
    if (GetParam().available) {
      const Status available = GetParam().available();
      if (!available.ok()) GTEST_SKIP() << available.message();
    }
    backend_ = GetParam().make();
    ASSERT_NE(backend_, nullptr);
    granule_ = backend_->capabilities().granularity;
    stream_ = backend_->stream_create().value();
  }
  void TearDown() override {
    if (backend_ == nullptr) return;
    EXPECT_TRUE(backend_->stream_destroy(stream_).ok());
    backend_.reset();
    if (GetParam().after) GetParam().after();
  }

  void write(DevicePtr target, unsigned char value, std::size_t bytes) {
    const std::vector<unsigned char> source(bytes, value);
    ASSERT_TRUE(backend_->copy_async(target, source.data(), bytes, stream_).ok());
    ASSERT_TRUE(backend_->stream_synchronize(stream_).ok());
  }
  int read(DevicePtr source) {
    unsigned char value = 0;
    EXPECT_TRUE(backend_->copy_async(&value, source, 1, stream_).ok());
    EXPECT_TRUE(backend_->stream_synchronize(stream_).ok());
    return value;
  }
  void expect_byte(DevicePtr source, int value) {
    const int found = read(source);
    if (GetParam().keeps_bytes) {
      EXPECT_EQ(found, value);
    }
  }
  // A closed gate holds a stream back until it is opened; nothing here waits for real time to pass.
  struct Gate {
    std::atomic<bool> open{false};
    static void wait(void* gate) { static_cast<Gate*>(gate)->open.wait(false); }
    void release() {
      open = true;
      open.notify_all();
    }
  };

  std::unique_ptr<Backend> backend_;
  std::size_t granule_ = 0;
  Stream stream_;
};

}  // namespace forebay
