// The one suite that judges every Communicator. An implementation gives a factory and an INSTANTIATE line;
// everything communicator.h promises is tested here, with ranks as threads, at 1 to 4 ranks: two hide every
// error of order. Device memory is reached through copy_async alone, so the suite runs over any Backend.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "forebay/communicator.h"
#include "forebay/error.h"
#include "forebay/grouped_communicator.h"
#include "forebay/host_backend.h"
#include "forebay/kernels.h"
#include "tests/support/elements.h"

namespace forebay::testing {

inline std::unique_ptr<HostBackend> create_host_backend(int rank, HostClock* clock = nullptr) {
  HostBackendOptions options{
      .name = "host rank " + std::to_string(rank), .granularity = 64u << 10, .clock = clock};
  return value_or_throw(HostBackend::create(options));
}

// The meeting place of one test's ranks.
class CommunicatorWorld {
 public:
  virtual ~CommunicatorWorld() = default;
  // The backend of `rank`.
  virtual std::unique_ptr<Backend> create_backend(int rank) { return create_host_backend(rank); }
  virtual Result<std::unique_ptr<Communicator>> join(int rank, Backend& backend, Kernels& kernels) = 0;
};

struct CommunicatorFactory {
  std::string name;
  std::string unavailable;  // Why this build cannot run it; empty when it can.
  std::function<std::unique_ptr<CommunicatorWorld>(int size, std::chrono::milliseconds deadline)> create;
  // A data operation waits where it is issued until the peers have issued it too.
  bool waits_for_peers = false;
};

inline void PrintTo(const CommunicatorFactory& factory, std::ostream* out) {
  *out << factory.name;
}

// One rank of a test: a device, a stream and memory that is given back at the end.
class Member {
 public:
  explicit Member(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {
    kernels_ = value_or_throw(Kernels::create(*backend_, {.thread_count = 1}));
    stream_ = value_or_throw(backend_->stream_create());
    transfer_stream_ = value_or_throw(backend_->stream_create());
  }
  ~Member() {
    communicator_.reset();
    static_cast<void>(backend_->stream_destroy(stream_));
    static_cast<void>(backend_->stream_destroy(transfer_stream_));
    for (const Block& block : blocks_) {
      static_cast<void>(backend_->unmap(block.address, block.bytes));
      static_cast<void>(backend_->chunk_destroy(block.chunk));
      static_cast<void>(backend_->release(block.address, block.bytes));
    }
  }
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  Backend& backend() { return *backend_; }
  Kernels& kernels() { return *kernels_; }
  Stream stream() const { return stream_; }
  Communicator& communicator() { return *communicator_; }
  void set_communicator(std::unique_ptr<Communicator> communicator) {
    communicator_ = std::move(communicator);
  }

  // A mapped chunk, like an arena's memory: all devices with peer access reach it.
  template <typename T = std::byte>
  T* allocate(std::size_t count) {
    const std::size_t granularity = backend_->capabilities().granularity;
    Block block;
    block.bytes = (std::max<std::size_t>(count, 1) * sizeof(T) + granularity - 1) / granularity * granularity;
    block.address = value_or_throw(backend_->reserve(block.bytes, 0));
    block.chunk = value_or_throw(backend_->chunk_create(block.bytes));
    throw_if_error(backend_->map(block.address, block.chunk));
    throw_if_error(backend_->set_access(block.address, block.bytes));
    blocks_.push_back(block);
    return reinterpret_cast<T*>(block.address);
  }

  // A block with these bytes. Done when it returns, independently of `stream()`.
  std::byte* allocate_filled(std::size_t bytes, int value) {
    std::byte* block = allocate(bytes);
    throw_if_error(backend_->fill_async(block, static_cast<std::uint8_t>(value), bytes, transfer_stream_));
    throw_if_error(backend_->stream_synchronize(transfer_stream_));
    return block;
  }
  template <typename T>
  T* allocate_copy(const std::vector<T>& values) {
    T* block = allocate<T>(values.size());
    throw_if_error(backend_->copy_async(block, values.data(), values.size() * sizeof(T), transfer_stream_));
    throw_if_error(backend_->stream_synchronize(transfer_stream_));
    return block;
  }
  template <typename T>
  std::vector<T> read(const T* source, std::size_t count) {
    std::vector<T> values(count);
    throw_if_error(backend_->copy_async(values.data(), source, count * sizeof(T), transfer_stream_));
    throw_if_error(backend_->stream_synchronize(transfer_stream_));
    return values;
  }

  // Waits for the stream and gives the communicator's verdict.
  Status finish() {
    const Status stream_status = backend_->stream_synchronize(stream_);
    return stream_status.ok() ? communicator_->status() : stream_status;
  }

 private:
  struct Block {
    DevicePtr address = nullptr;
    std::size_t bytes = 0;
    Chunk chunk;
  };

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Kernels> kernels_;
  Stream stream_;
  Stream transfer_stream_;  // For copies of the test itself.
  std::unique_ptr<Communicator> communicator_;
  std::vector<Block> blocks_;
};

// A float that depends on rank and place, of any sign, with magnitudes so far apart that the order of a sum
// shows.
inline float sample(std::uint64_t seed, int rank, std::size_t index) {
  const std::uint64_t x = mix(seed + static_cast<std::uint64_t>(rank) * 1'000'003 + index);
  const float unit = static_cast<float>(x >> 40) / 16777216.0f - 0.5f;
  return std::ldexp(unit, static_cast<int>(x & 7) - 4);
}

inline std::uint64_t test_seed() {
  static const std::uint64_t seed = [] {
    const char* given = std::getenv("FOREBAY_SEED");
    const std::uint64_t value =
        given != nullptr
            ? std::strtoull(given, nullptr, 0)
            : static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
    std::printf("FOREBAY_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

class CommunicatorConformance : public ::testing::TestWithParam<std::tuple<CommunicatorFactory, int>> {
 protected:
  static constexpr std::chrono::milliseconds kDeadline{60'000};
  // Real time for implementations that have no clock to drive, so short; nothing but a missing rank meets it.
  static constexpr std::chrono::milliseconds kShortDeadline{2000};

  void SetUp() override {
    const std::string& reason = std::get<0>(GetParam()).unavailable;
    if (!reason.empty()) GTEST_SKIP() << reason;
  }

  int size() const { return std::get<1>(GetParam()); }
  bool waits_for_peers() const { return std::get<0>(GetParam()).waits_for_peers; }

  // Runs body(member, rank) on one thread per rank. An exception of any thread fails the test.
  void run(const std::function<void(Member&, int)>& body, std::chrono::milliseconds deadline = kDeadline) {
    const std::unique_ptr<CommunicatorWorld> world = std::get<0>(GetParam()).create(size(), deadline);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          Member member(world->create_backend(rank));
          member.set_communicator(value_or_throw(world->join(rank, member.backend(), member.kernels())));
          body(member, rank);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // Runs body, which returns the rank's failure, and checks that all ranks have the same one, of `code`, and
  // that it mentions all of `words`.
  void expect_one_cause(StatusCode code, const std::vector<std::string>& words,
                        const std::function<Status(Member&, int)>& body,
                        std::chrono::milliseconds deadline = kDeadline) {
    std::vector<Status> causes(static_cast<std::size_t>(size()));
    run([&](Member& member, int rank) { causes[static_cast<std::size_t>(rank)] = body(member, rank); },
        deadline);
    for (const Status& cause : causes) {
      EXPECT_EQ(cause.code(), code) << cause.to_string();
      EXPECT_EQ(cause.to_string(), causes[0].to_string());
    }
    for (const std::string& word : words) {
      EXPECT_NE(causes[0].message().find(word), std::string::npos)
          << "no \"" << word << "\" in: " << causes[0].message();
    }
  }

  struct Sum {
    std::size_t count;
    DataType type;
    std::size_t gap_bytes = 0;  // Between slices.
    bool first = true;
  };

  // One reduce_scatter of samples, compared bit by bit with the naive sum in rank order.
  void check_sum(Member& member, int rank, const Sum& sum, std::uint64_t seed) {
    const std::size_t element = element_bytes(sum.type);
    const std::size_t stride = sum.count * element + sum.gap_bytes;
    const auto ranks = static_cast<std::size_t>(size());
    std::vector<std::byte> contribution(stride * ranks, std::byte{0xCB});
    for (std::size_t r = 0; r < ranks; ++r) {
      for (std::size_t i = 0; i < sum.count; ++i) {
        store(sum.type, &contribution[r * stride], i, sample(seed, rank, r * sum.count + i));
      }
    }
    const std::byte* source = member.allocate_copy(contribution);
    std::byte* receive = member.allocate(sum.count * element * ranks);
    float* target = member.allocate_copy(std::vector<float>(sum.count, 0.5f));

    const Status queued = member.communicator().reduce_scatter({.source = source,
                                                                .source_stride_bytes = stride,
                                                                .count = sum.count,
                                                                .type = sum.type,
                                                                .receive = receive,
                                                                .target = target,
                                                                .first = sum.first},
                                                               member.stream());
    ASSERT_TRUE(queued.ok()) << queued.to_string();
    const Status done = member.finish();
    ASSERT_TRUE(done.ok()) << done.to_string();

    const std::vector<float> actual = member.read(target, sum.count);
    for (std::size_t i = 0; i < sum.count; ++i) {
      const std::size_t index = static_cast<std::size_t>(rank) * sum.count + i;
      float expected = round_to(sum.type, sample(seed, 0, index));
      for (int r = 1; r < size(); ++r) expected += round_to(sum.type, sample(seed, r, index));
      if (!sum.first) expected = 0.5f + expected;
      ASSERT_EQ(float_bits(actual[i]), float_bits(expected))
          << "rank " << rank << " element " << i << " of " << sum.count << " " << data_type_name(sum.type);
    }
  }
};

inline std::string conformance_name(
    const ::testing::TestParamInfo<std::tuple<CommunicatorFactory, int>>& info) {
  return std::get<0>(info.param).name + "_" + std::to_string(std::get<1>(info.param)) + "_ranks";
}

}  // namespace forebay::testing
