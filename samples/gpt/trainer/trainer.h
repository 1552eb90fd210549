// The training loop: a Gpt under an Engine, on one rank of several.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "forebay/bootstrap.h"
#include "forebay/communicator.h"
#include "forebay/error.h"
#include "forebay/plan.h"
#include "trainer/options.h"

namespace forebay::gpt {

struct RankReport {
  std::uint64_t parameters = 0;  // Of the model, those that this rank has some or all of.
  PoolBytes peak_bytes;          // Live.
  PoolBytes planned_bytes;
  std::uint64_t reserved_bytes = 0;
  std::uint64_t planned_reserved_bytes = 0;
  std::uint64_t host_bytes = 0;  // Page-locked for what is offloaded.
  std::uint64_t planned_host_bytes = 0;
  std::uint64_t file_bytes = 0;
  std::uint64_t planned_file_bytes = 0;
  // Saving left out; of more than one step, the first too.
  double file_read_bytes_per_step = 0;
  double file_written_bytes_per_step = 0;
  std::uint64_t planned_file_read_bytes_per_step = 0;
  std::uint64_t planned_file_written_bytes_per_step = 0;
  double sent_bytes_per_step = 0;
  double received_bytes_per_step = 0;
  std::uint64_t planned_sent_bytes_per_step = 0;
  std::uint64_t planned_received_bytes_per_step = 0;
  // Of activations and their gradients, between the ranks that share every layer.
  double tensor_sent_bytes_per_step = 0;
  double tensor_received_bytes_per_step = 0;
  // Of activations and their gradients, between the stages of a pipeline.
  double pipeline_sent_bytes_per_step = 0;
  double pipeline_received_bytes_per_step = 0;
  // Micro-steps that were between their forward and their backward pass at one time.
  std::uint64_t most_passes_in_flight = 0;
  // With --activations but keep: what the inputs of recomputed blocks take, the device's part among
  // peak_bytes.activations, and what their gathers send.
  std::uint64_t saved_device_bytes = 0;
  std::uint64_t planned_saved_device_bytes = 0;
  std::uint64_t saved_host_bytes = 0;
  std::uint64_t planned_saved_host_bytes = 0;
  std::uint64_t saved_file_bytes = 0;
  std::uint64_t planned_saved_file_bytes = 0;
  double saved_sent_bytes_per_step = 0;
  std::uint64_t planned_saved_sent_bytes_per_step = 0;
  double step_ms = 0;  // Mean; of more than one step, the first left out.
  // With --timeline: of collectives on the stream, and what of it lay beside no layer of the trainer's.
  double communication_ms_per_step = 0;
  double exposed_communication_ms_per_step = 0;
};

// Payload of one kind of operation between one rank and the others, of the whole run but its end.
struct OperationReport {
  std::string operation;
  std::uint64_t count = 0;
  std::vector<std::uint64_t> sent_bytes;  // By rank.
  std::vector<std::uint64_t> received_bytes;
};

struct TrainingReport {
  std::vector<std::pair<std::string, std::string>> training;  // See training_of().
  std::vector<std::vector<OperationReport>> traffic;          // By rank.
  int world_size = 1;
  int tensor_parallel = 1;
  int data_parallel = 1;
  int pipeline_parallel = 1;
  std::string recompute = "none";
  std::string activations = "keep";  // Asked for, or chosen.
  double dropout = 0;
  ShardingOptions sharding;                // Measured values in place of "auto".
  std::uint64_t offloaded_parameters = 0;  // In units that are not on the device.
  std::string store;                       // Rank 0's, where the tier is files.
  std::string device;                      // Rank 0's: "host", or "cuda:0 NVIDIA H200".
  std::string communicator;
  std::string matmul;
  int compute_threads = 1;
  std::uint64_t parameters = 0;
  std::uint64_t first_step = 0;                  // Steps done before this run.
  std::uint64_t steps = 0;                       // In all.
  std::vector<double> loss;                      // Of this run's steps: mean over ranks and micro-steps.
  std::vector<std::optional<double>> grad_norm;  // Null: the step was skipped.
  std::string digest;  // Of several parts of the model: those of the parts, joined by "+".
  double tokens_per_second = 0;
  bool interrupted = false;
  std::vector<RankReport> ranks;
};

// Trains with options.ranks ranks as threads of this process; `options` are resolved. Every rank of it
// returns the same report, so there is one. Errors: throws Error with the first cause.
TrainingReport run_training(const TrainerOptions& options);
// The same with options of its own for each rank: by_rank.size() ranks.
TrainingReport run_training(const std::vector<TrainerOptions>& by_rank);

// A rank did not get as far as the others: nobody but it may know why.
class JoinError : public Error {
 public:
  explicit JoinError(const Status& status) : Error(status) {}
};

// One rank of several processes. All ranks return the same report; rank 0 alone writes files.
TrainingReport run_training_rank(const TrainerOptions& options, const LaunchEnvironment& environment);

// Asks the running training to end after the step it is in, on all ranks. False when none has begun. May be
// called from a signal handler.
bool request_stop() noexcept;
// Whether there has been a step in this process.
bool has_begun_steps() noexcept;

// Whether something beside what was trained could not be written, which was said when it happened.
bool output_failed() noexcept;
// For the next run_training() of this process.
void clear_stop() noexcept;

// The first of the steps at the end whose losses are infinite or no numbers; none when the last is finite.
std::optional<std::uint64_t> first_step_of_lost_loss(const TrainingReport& report);

std::string report_json(const TrainingReport& report);
// The first cause, and the last operations of a rank's communicator.
std::string flight_json(const Status& cause, const std::vector<OperationRecord>& operations);
// Writes `text` by an OutputFile. Errors: throws Error(kIoError).
void write_file(const std::string& path, const std::string& text);

}  // namespace forebay::gpt
