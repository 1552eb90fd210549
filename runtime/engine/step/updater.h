// The update of a step: on the device, or on the host for offloaded units, in memory or piece by piece from
// files.
//
// The host's queue takes gradients down and updates units, in this order within every step. Parameters that
// stay on the device come up in a queue of their own, beside the next unit's update.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "forebay/block_runner.h"
#include "forebay/master_move.h"
#include "runtime/engine/step/context.h"
#include "runtime/engine/step/snapshot.h"

namespace forebay {

class Decision;
class FactoredMoments;
class MatrixUpdates;

// AdamW with the constants of the engine, or of a parameter group that has its own; the rest is to be filled
// in.
AdamWArguments adamw_arguments(const EngineOptions& options, const GroupHyperparameters& group = {});

// The move of masters that an update has, without `step` and `step_number`.
MasterMove move_of(const KeptUpdateArguments& kept);

// `count` values rounded to `type`, a 2-byte one.
void round_parameters(DataType type, const float* source, std::uint64_t count, std::byte* target);

class Updater : private StepPart {
 public:
  Updater(StepContext& context, const Decision& decision);
  // Adafactor, Muon. Requires: before the first step.
  void use(FactoredMoments& factored) { factored_ = &factored; }
  void use(MatrixUpdates& matrices) { matrices_ = &matrices; }

  // Queues the updates of a step: begin(), update() of each used unit in order, end(). They run when the
  // decision is known.
  // Order: Unit::updated is recorded when the unit's new parameters are in place.
  void begin(const std::vector<bool>& used, const Hyperparameters& hyperparameters);
  void update(int unit, const Hyperparameters& hyperparameters);
  void end();

  // Queues the copies after the last update; the next one waits for them. Memory that the host can read is
  // copied only in keep_copies() and synchronize(), and only what finish_copy() and finish_copies() have not
  // copied by then. Waits for the copies of leased memory. Order: when the copies before are complete, and
  // after end_copies(). Requires: `copies` stay until then.
  void copy(const std::vector<StateCopy>& copies);
  // Waits for them, and for the updates before. Threads: any.
  Status wait_for_copies() const;
  // See Snapshot::finish(), finish_rest(), end(). Order: after wait_for_copies(). Threads: one.
  void finish_copy(const std::byte* copy, std::uint64_t bytes, const Snapshot::See& see) {
    snapshot_.finish(copy, bytes, see);
  }
  void finish_copies() { snapshot_.finish_rest(); }
  void end_copies() { snapshot_.end(); }
  // Queues the copies that are left. Order: before anything is queued that changes states.
  void keep_copies();

  // Makes `stream` wait for all updates of the last step.
  void wait_for_step(const EngineStream& stream) const;
  // The host waits for all queued updates and copies, so the caller may change states.
  void synchronize();
  // The host waits for the updates on the device.
  void synchronize_device() const { device_stream_.synchronize(); }

  // The first failure keeps the others out. Threads: any.
  void fail(const Status& status);
  Status failure() const;

  // Forgets states read ahead, because the caller changes them. Requires: synchronize(), files.
  void drop_read_ahead() { pass_->drop(); }
  // Waits for the parts that are read ahead. The next update reports a read that failed, on every rank.
  void wait_for_read_ahead() {
    if (pass_ != nullptr) pass_->wait_for_reads();
  }

  const EngineStream& device_stream() const { return device_stream_; }
  // Offloaded units only.
  const EngineStream& host_stream() const { return host_stream_; }
  const BlockRunner& host_runner() const { return *host_runner_; }

 private:
  // One unit's update by the host. Two sets, because a step may be queued while updates of the step before
  // still run.
  struct HostUpdate {
    Updater* updater = nullptr;
    int unit = 0;
    std::vector<GroupHyperparameters> groups;
    const BiasCorrection* corrections = nullptr;
    void run() { updater->update_on_host(*this); }
  };
  // File tier: the parts of a step's pass.
  struct HostPass {
    Updater* updater = nullptr;
    std::vector<const StorePassPart*> parts;
    void begin() { updater->pass_->begin(parts); }
    void finish();
  };
  struct HostCopies {
    Updater* updater = nullptr;
    const std::vector<StateCopy>* copies = nullptr;
    void run() { updater->copy_on_host(*copies); }
  };
  // Elements of a unit whose states lie in one piece of memory; the addresses are of the first.
  struct Piece {
    std::uint64_t begin = 0;  // From the start of the updated range.
    std::uint64_t count = 0;
    std::array<std::byte*, kStateFieldCount> kept{};
    std::byte* parameters = nullptr;  // Null for parameters that are their own masters.
  };

  BiasCorrection* corrections() const { return corrections_[context_.attempted_steps % 2]; }
  void copy_on_host(const std::vector<StateCopy>& copies);
  const std::byte* live_source(const StateCopy& copy) const;
  void open_snapshot() { snapshot_.open(); }
  void keep_snapshot();
  void copy_leased();
  void copy_by_threads(std::byte* target, const std::byte* source, std::uint64_t bytes) const;
  const EngineStream& snapshot_stream() const { return plan_.offloads() ? host_stream_ : device_stream_; }
  void correct_for(int group);
  void update_on_device(int unit, const Hyperparameters& hyperparameters);
  void queue_host_update(int unit, const Hyperparameters& hyperparameters);
  void update_on_host(const HostUpdate& update);
  void update_all(const HostUpdate& update);
  Status update_in_files(const HostUpdate& update);
  void update_stored_part(const HostUpdate& update, std::size_t part, std::byte* memory, bool applied);
  void update_piece(const HostUpdate& update, const Piece& piece);
  void update_run(const HostUpdate& update, const StepContext::Segment& segment,
                  const KeptUpdateArguments& kept, std::uint64_t begin);
  static float* master_of(const Piece& piece);  // Requires: an fp32 master.
  KeptUpdateArguments update_of(const Unit& unit, const Piece& piece, std::uint64_t at,
                                const StepContext::Segment& segment, const GroupHyperparameters& group) const;

  const Decision& decision_;
  FactoredMoments* factored_ = nullptr;  // Adafactor.
  MatrixUpdates* matrices_ = nullptr;    // Muon.
  // The corrections of a step by parameter group, in pinned memory. Two sets, like those of host updates.
  std::array<BiasCorrection*, 2> corrections_{};
  BiasCorrection on_device_{};  // For the next update on the device.

  // File tier. The pass belongs to the host's stream while anything is queued there.
  std::unique_ptr<StorePass> pass_;
  std::array<HostPass, 2> host_passes_;
  HostPass all_parts_;

  std::unique_ptr<BlockRunner> host_runner_;
  bool has_host_stream_ = false;  // The plan offloads.
  std::array<std::vector<HostUpdate>, 2> host_updates_;
  std::vector<std::byte> rounded_;  // 2-byte parameters of a few elements, before their place is free.

  mutable std::mutex mutex_;
  Status failure_;  // Guarded by mutex_.
  std::atomic<bool> failed_{false};

  std::vector<EngineEvent> updated_on_host_;  // By unit, the offloaded ones.
  EngineEvent copied_on_device_;              // The last copies from the device,
  EngineEvent copied_on_host_;                // and from offloaded states.
  HostCopies host_copies_;
  std::vector<const StateCopy*> leased_copies_;  // Memory that the host can read.
  Snapshot snapshot_;
  EngineEvent kept_on_host_;
  EngineEvent device_done_;     // The last update of a step on the device,
  EngineEvent host_done_;       // and on the host.
  EngineStream device_stream_;  // Not the engine's stream: the next step's first gathers pass the updates.
  EngineStream host_stream_;
  EngineStream up_stream_;
};

}  // namespace forebay
