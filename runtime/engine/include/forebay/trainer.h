// Trainer: an Engine and everything that it runs on, for one rank: device, kernels, communicator and a
// stream.
//
//   Trainer::on_threads(3, {{.stage = 3}}, [](Trainer& trainer) { ... });    // Three ranks in this process.
//   Trainer trainer({{.stage = 3}});                                         // This process is a rank.
//
// A program that has a device or a communicator already makes an Engine itself (engine.h).
// samples/01-first-trainer is a whole training on one page.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "forebay/engine.h"
#include "forebay/local_communicator.h"
#include "forebay/stream_call.h"

namespace forebay {

struct TrainerOptions {
  EngineOptions engine;
  // Compute on a GPU, and between processes over NCCL. False: on the host, over shared memory or TCP.
  bool cuda = false;
  int ordinal = -1;                            // The GPU. -1: the ranks of a host take the GPUs in turn.
  std::chrono::milliseconds deadline{60'000};  // For each operation between ranks.
};

class Trainer {
 public:
  // This process is one rank. The environment says which (read_launch_environment), and without a launcher it
  // is the only one. Collective.
  // Errors: kUnavailable for a device that is not there, kTimeout for ranks that did not come.
  explicit Trainer(const TrainerOptions& options = {});
  // Rank `rank` of ranks that are threads of this process. With cuda the GPUs have access to each other.
  Trainer(LocalGroup& group, int rank, const TrainerOptions& options = {});
  // Waits for the stream. In a child made by fork() it does nothing.
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Calls `train` on one thread for each rank, and returns when all have ended. Where one throws, the others
  // fail too, and the first exception is thrown: an Error, of kInternal if it was none.
  static void on_threads(int ranks, const TrainerOptions& options,
                         const std::function<void(Trainer&)>& train);

  Engine& engine() noexcept;
  Backend& backend() noexcept;
  Kernels& kernels() noexcept;
  Communicator& communicator() noexcept;
  Stream stream() const noexcept;  // All of the trainer's compute is queued here.
  int rank() const noexcept;
  int ranks() const noexcept;

  // Begins micro-step `index`, and with the first one the step.
  void begin(int index = 0);
  // The engine's leases, on the trainer's stream.
  Lease forward(UnitId unit);
  Lease backward(UnitId unit);
  // Call pass(lease) during a lease.
  template <typename Pass>
  void forward(UnitId unit, const Pass& pass) {
    const Lease lease = forward(unit);
    pass(lease);
  }
  template <typename Pass>
  void backward(UnitId unit, const Pass& pass) {
    Lease lease = backward(unit);
    pass(lease);
  }
  // Runs a closure on the host in the order of the stream. Requires: as call_on().
  template <typename Function>
  void run(Function function) {
    throw_failure(call_on(backend(), stream(), std::move(function)));
  }
  // Waits for the stream. Afterwards the host may read results, and inside of a lease it may compute at once.
  void wait();
  // Waits for the stream, and ends the step.
  StepResult step(const Hyperparameters& hyperparameters);

 private:
  static void throw_failure(const Status& status);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace forebay
