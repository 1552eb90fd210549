// ActivationTier holds offloaded activations, in pinned host memory or in files, and copies them in two
// queues, one for each direction. Files are reached through two Movers.
//
// Errors: create and make_home throw; the rest returns errors of the Backend. status() has the errors of the
// file store.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "forebay/activation_checkpointer.h"
#include "forebay/mover.h"
#include "forebay/pinned_pool.h"

namespace forebay {

class ActivationTier {
 public:
  // The offloaded bytes of one place.
  struct Home {
    std::uint64_t bytes = 0;
    std::byte* host = nullptr;  // Null: in a range.
    StoreRange range;
    std::uint64_t range_bytes = 0;
  };

  // Takes all host memory of `plan`. Requires: `backend` outlives it.
  static std::unique_ptr<ActivationTier> create(Backend& backend, const ActivationPlan& plan,
                                                const ActivationCheckpointerOptions& options, int rank);
  // Waits for queued copies.
  ~ActivationTier();
  ActivationTier(const ActivationTier&) = delete;
  ActivationTier& operator=(const ActivationTier&) = delete;

  // `name`: a new name, for the range.
  Home make_home(const std::string& name, std::uint64_t bytes);

  Stream down() const noexcept { return down_; }
  Stream up() const noexcept { return up_; }
  // Copies in the order of down() and up(). The source is device memory.
  Status spill(const std::byte* source, const Home& home);
  Status fetch(const Home& home, DevicePtr target);

  // The first failure of the file store.
  Status status() const;
  std::uint64_t host_bytes() const { return pool_->statistics().requested_bytes; }
  std::uint64_t file_bytes() const { return store_ == nullptr ? 0 : store_->statistics().range_bytes; }

 private:
  explicit ActivationTier(Backend& backend) noexcept : backend_(backend) {}
  void open_store(const ActivationPlan& plan, const ActivationCheckpointerOptions& options, int rank);

  Backend& backend_;
  std::unique_ptr<PinnedPool> pool_;
  std::byte* host_ = nullptr;     // Tier kPinned: all homes, one after the other.
  std::uint64_t host_used_ = 0;   // Bytes given out.
  std::unique_ptr<Store> store_;  // Tier kFile, like the members below.
  std::array<std::unique_ptr<StagingBuffers>, 2> buffers_;
  std::unique_ptr<Mover> mover_down_;
  std::unique_ptr<Mover> mover_up_;
  Stream down_;  // The streams of the movers, if there are movers.
  Stream up_;
};

}  // namespace forebay
