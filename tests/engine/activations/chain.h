// Tests of the ActivationCheckpointer run a chain of layers without arithmetic. Each layer saves a known
// pattern in the forward pass and expects it in the backward pass.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "forebay/activation_checkpointer.h"
#include "forebay/pinned_pool.h"
#include "forebay/stream_call.h"
#include "runtime/engine/engine_hooks.h"
#include "tests/offload/memory_store.h"
#include "tests/support/elements.h"
#include "tests/support/local_world.h"

namespace forebay::testing {

// Byte `i` of an activation. A shared activation is the same on all ranks.
inline std::byte pattern(const ActivationKey& key, bool shared, int rank, std::uint64_t i) {
  const auto of = [](int number) { return static_cast<std::uint64_t>(number); };
  const std::uint64_t seed =
      (of(key.unit) << 40) ^ (of(key.slot) << 32) ^ (of(key.micro_batch) << 16) ^ (shared ? 99 : of(rank));
  return static_cast<std::byte>(mix(seed * 1'000'003 + i));
}

inline ActivationCheckpointerOptions memory_options(const ActivationPlanOptions& plan) {
  ActivationCheckpointerOptions options;
  options.plan = plan;
  static const internal::EngineHooks hooks{
      .make_store = [](int) { return make_memory_store({.granule_bytes = 4096}); },
      .before_host_update = {},
      .now = {}};
  options.hooks = &hooks;
  return options;
}

// One rank of the chain. The source of all saves is one buffer, overwritten as soon as it may be. Where the
// host does not reach device memory, patterns go by way of pinned memory.
class Chain {
 public:
  Chain(Rank& rank, const std::vector<ActivationSlot>& slots, const ActivationCheckpointerOptions& options)
      : rank_(rank), slots_(slots), checkpointer(*rank.backend, *rank.communicator, options) {
    for (const ActivationSlot& slot : slots_) {
      checkpointer.declare(slot);
      largest_ = std::max(largest_, slot.bytes);
    }
  }
  ~Chain() {
    if (stream.handle == nullptr) return;
    EXPECT_TRUE(rank_.backend->stream_synchronize(stream).ok());
    EXPECT_TRUE(rank_.backend->stream_destroy(stream).ok());
    EXPECT_TRUE(rank_.backend->free(source_).ok());
  }
  Chain(const Chain&) = delete;
  Chain& operator=(const Chain&) = delete;

  void commit() {
    checkpointer.commit();
    stream = value_or_throw(rank_.backend->stream_create());
    source_ = value_or_throw(rank_.backend->alloc(largest_));
    if (rank_.backend->capabilities().host_accessible) return;
    pool_ = value_or_throw(PinnedPool::create(*rank_.backend, {.slab_bytes = 1, .huge_pages = false}));
    written_ = value_or_throw(pool_->allocate(largest_));
    read_ = value_or_throw(pool_->allocate(largest_));
  }

  void save(std::size_t index, int micro_batch) {
    const ActivationSlot slot = slots_[index];
    const ActivationKey key{slot.unit, slot.slot, micro_batch};
    queue([this, slot, key, target = written_ != nullptr ? written_ : source_] {
      for (std::uint64_t i = 0; i < slot.bytes; ++i)
        target[i] = pattern(key, slot.shared, rank_.communicator->rank(), i);
    });
    copy(source_, written_, slot.bytes);
    const std::vector<std::byte> state = record(key, slot.state_bytes);
    checkpointer.save(key, source_, slot.bytes, stream, state);
    overwrite(source_, largest_);
  }

  // Compares in stream order, before the lease has ended.
  void load(std::size_t index, int micro_batch) {
    const ActivationSlot slot = slots_[index];
    const ActivationKey key{slot.unit, slot.slot, micro_batch};
    const ActivationLease lease = checkpointer.load(key, stream);
    ASSERT_EQ(lease.bytes(), slot.bytes);
    EXPECT_EQ(std::vector<std::byte>(lease.state().begin(), lease.state().end()),
              record(key, slot.state_bytes));
    copy(read_, lease.data(), slot.bytes);
    queue([this, slot, key, data = read_ != nullptr ? read_ : lease.data()] {
      for (std::uint64_t i = 0; i < slot.bytes; ++i)
        wrong_bytes += data[i] != pattern(key, slot.shared, rank_.communicator->rank(), i);
    });
    overwrite(lease.data(), slot.bytes);  // The lease's holder may write there.
  }

  void forward(int micro_batch) {
    for (std::size_t i = 0; i < slots_.size(); ++i) save(i, micro_batch);
  }
  void backward(int micro_batch) {
    for (std::size_t i = slots_.size(); i-- > 0;) load(i, micro_batch);
  }
  // As a stage of a pipeline does with one forward, one backward; `held` at the same time.
  void run(int micro_batches, int held) {
    for (int m = 0; m < micro_batches; ++m) {
      forward(m);
      if (m + 1 >= held) backward(m + 1 - held);
    }
    for (int m = std::max(0, micro_batches - held + 1); m < micro_batches; ++m) backward(m);
  }
  // All of it has run.
  void finish() {
    throw_if_error(rank_.backend->stream_synchronize(stream));
    checkpointer.check();
    EXPECT_EQ(wrong_bytes.load(), 0u);
  }

  template <typename Function>
  void queue(Function function) {
    throw_if_error(call_on(*rank_.backend, stream, std::move(function)));
  }

 private:
  static std::vector<std::byte> record(const ActivationKey& key, std::size_t bytes) {
    std::vector<std::byte> state(bytes);
    for (std::size_t i = 0; i < bytes; ++i) state[i] = pattern(key, true, 0, i + 77);
    return state;
  }

  // To or from pinned memory, if patterns go by way of it.
  void copy(std::byte* target, const std::byte* source, std::uint64_t bytes) {
    if (pool_ != nullptr) throw_if_error(rank_.backend->copy_async(target, source, bytes, stream));
  }
  void overwrite(DevicePtr target, std::uint64_t bytes) {
    if (pool_ == nullptr) {
      queue([target, bytes] { std::memset(target, 0xEE, bytes); });
    } else {
      throw_if_error(rank_.backend->fill_async(target, 0xEE, bytes, stream));
    }
  }

  Rank& rank_;
  const std::vector<ActivationSlot> slots_;
  std::uint64_t largest_ = 0;
  DevicePtr source_ = nullptr;
  std::unique_ptr<PinnedPool> pool_;
  std::byte* written_ = nullptr;
  std::byte* read_ = nullptr;

 public:
  std::atomic<std::uint64_t> wrong_bytes{0};
  Stream stream;
  ActivationCheckpointer checkpointer;
};

}  // namespace forebay::testing
