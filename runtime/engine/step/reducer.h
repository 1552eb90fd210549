// The reduction of gradients: through buckets to the owner of each slice, averages and norms behind them, and
// offloaded gradients down to the host.
//
// Every collective moves a bucket: a column range of all slices of one unit, or the slices of several small
// units side by side. Two buckets are in flight: while the sum of one is averaged, the next is on the wire.
// Collectives are in the order of the engine's stream; averages and norms are in the order of the average
// stream. Where micro-steps add up on the host, each bucket's sum goes down to the host's stream instead.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "runtime/engine/step/context.h"

namespace forebay {

class Updater;

class Reducer : private StepPart {
 public:
  // Gradients go down in the order of the updater's host stream.
  Reducer(StepContext& context, const Updater& updater);

  // Recorded order: finds a slot for the unit's gradients, until its reduce().
  void open(int unit);
  void slots_changed();
  bool is_open(int unit) const { return open_[static_cast<std::size_t>(unit)]; }
  // Fills gradients that nobody wrote, and padding, with zeros.
  void complete(int unit, Stream stream);
  // Queues the reduction of a unit.
  // Order: after the work queued on the engine's stream.
  void reduce(int unit, int micro_step);
  // Queues the reductions of small units that wait for others. Order: after the last reduce() of a
  // micro-step.
  void flush() { reduce_fused(); }

  // The step is over after fewer micro-steps than planned: queues the averages and norms, and with
  // Accumulate::kLocal the reductions, that belong to the last one. Order: after every unit's reduce().
  void end_early(int micro_steps);
  void begin_step() { micro_steps_ = options_.micro_steps; }
  // The last reduction out of the unit's gradients.
  Event reduced(int unit) const;
  // Makes `stream` wait until the unit's gradients, if offloaded, are on the host.
  void wait_for_copy_down(int unit, Stream stream) const;
  // Makes the engine's stream wait for the norms of all units.
  void wait_for_norms() const;
  // The host waits for all queued averages and norms.
  void synchronize() const { average_stream_.synchronize(); }

 private:
  // The part of a unit that one bucket adds to on the host.
  struct HostSum {
    Reducer* reducer = nullptr;
    float* target = nullptr;
    std::uint64_t count = 0;
    void add() const;
  };
  // A unit whose micro-steps add up on the host.
  struct HostUnit {
    Reducer* reducer = nullptr;
    int unit = 0;
    std::vector<HostSum> sums;  // By bucket.
    void average() { reducer->average_on_host(unit); }
  };
  // A unit in the bucket of small units.
  struct FusedUnit {
    int unit = 0;
    std::uint64_t column = 0;
  };

  void open_host_sums();
  bool is_last() const { return micro_step_ == context_.options.micro_steps - 1; }
  float average_factor() const;
  std::size_t next_bucket();
  void average_after_reduction();
  ReduceScatterArguments bucket_of(int unit, std::uint64_t column, std::uint64_t count) const;
  void reduce_alone(int unit);
  void reduce_buckets(int unit);
  void fuse(int unit);
  void reduce_fused();
  void average_fused(const FusedUnit& part, const float* sums);
  void average_accumulator(int unit);
  void finish(int unit);
  // EngineOptions::on_reduced_gradient.
  Status offer(int unit, void* gradient, Stream stream) const;
  void add_over_stages(int unit);
  void queue_norm(int unit);
  void copy_down(int unit);
  void reduce_on_host(int unit);
  void finish_on_host(int unit);
  void take_down(int unit, HostSum& sum, std::size_t place);
  // Calls the hook for a pass over host memory. False: nothing is to be computed.
  bool passes_over_host(std::uint64_t bytes) const;
  void average_on_host(int unit);

  const Updater& updater_;
  int micro_step_ = 0;
  // That the sum is divided by. An average that is queued when it changes belongs to a step that was given
  // up.
  std::atomic<int> micro_steps_ = 1;
  int reduced_units_ = 0;   // In this micro-step.
  std::vector<bool> open_;  // By unit.

  std::uint64_t bucket_count_ = 0;  // Buckets so far.
  std::vector<FusedUnit> fused_units_;
  std::uint64_t fused_count_ = 0;  // Columns taken.

  std::array<int, kTransitCount> transit_user_{};  // The unit whose slice was there last, or -1.
  std::uint64_t sum_count_ = 0;                    // Sums that went down so far.
  std::vector<HostUnit> host_units_;
  double* host_norms_ = nullptr;  // Pinned.
  std::vector<double> norm_scratch_;
  std::vector<float> norm_aside_;  // Elements that another rank counts, while this rank's norm is taken.

  std::vector<EngineEvent> slot_reduced_;                      // By slot: the reduction out of it.
  std::vector<EngineEvent> unit_reduced_;                      // Stages 0 and 1, by unit.
  std::vector<EngineEvent> copied_down_;                       // By unit, the offloaded ones.
  std::array<EngineEvent, kBucketsInFlight> averaged_bucket_;  // The bucket's sum may be written again.
  std::array<EngineEvent, kTransitCount> sum_ready_;           // A sum has arrived in transit,
  std::array<EngineEvent, kTransitCount> sum_left_;            // and has left it.
  // Each is used from its record to the wait that follows.
  EngineEvent bucket_reduced_;
  EngineEvent averaged_;
  EngineStream average_stream_;
};

}  // namespace forebay
