// TrainingReport: the results of a training, and their JSON. measure.h fills it in.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "forebay/communicator.h"
#include "forebay/data_type.h"
#include "forebay/plan.h"
#include "forebay/status.h"

namespace forebay::gpt {

// The figures of one rank: type and name, which is also the key in JSON.
#define FOREBAY_RANK_FIGURES(ROW)                                                                         \
  /* Parameters of this rank's part of the model. */                                                      \
  ROW(std::uint64_t, parameters)                                                                          \
  /* Live bytes, not chunks. */                                                                           \
  ROW(PoolBytes, peak_bytes)                                                                              \
  ROW(PoolBytes, planned_bytes)                                                                           \
  ROW(std::uint64_t, reserved_bytes)                                                                      \
  ROW(std::uint64_t, planned_reserved_bytes)                                                              \
  /* Pinned memory for offloaded states. */                                                               \
  ROW(std::uint64_t, host_bytes)                                                                          \
  ROW(std::uint64_t, planned_host_bytes)                                                                  \
  ROW(std::uint64_t, file_bytes)                                                                          \
  ROW(std::uint64_t, planned_file_bytes)                                                                  \
  /* Saving is left out, and so is the first step of several. */                                          \
  ROW(double, file_read_bytes_per_step)                                                                   \
  ROW(std::uint64_t, planned_file_read_bytes_per_step)                                                    \
  ROW(double, file_written_bytes_per_step)                                                                \
  ROW(std::uint64_t, planned_file_written_bytes_per_step)                                                 \
  ROW(double, sent_bytes_per_step)                                                                        \
  ROW(double, received_bytes_per_step)                                                                    \
  ROW(std::uint64_t, planned_sent_bytes_per_step)                                                         \
  ROW(std::uint64_t, planned_received_bytes_per_step)                                                     \
  /* Activations and their gradients, between tensor-parallel ranks and between pipeline stages. */       \
  ROW(double, tensor_sent_bytes_per_step)                                                                 \
  ROW(double, tensor_received_bytes_per_step)                                                             \
  ROW(double, pipeline_sent_bytes_per_step)                                                               \
  ROW(double, pipeline_received_bytes_per_step)                                                           \
  /* Evaluations and generated text, in all, between data-parallel ranks. */                              \
  ROW(std::uint64_t, evaluation_sent_bytes)                                                               \
  ROW(std::uint64_t, planned_evaluation_sent_bytes)                                                       \
  /* The most micro-steps that were between their forward and their backward pass at one time. */         \
  ROW(std::uint64_t, most_passes_in_flight)                                                               \
  /* The inputs of recomputed blocks, unless --activations is keep. peak_bytes includes the device's. */  \
  ROW(std::uint64_t, saved_device_bytes)                                                                  \
  ROW(std::uint64_t, planned_saved_device_bytes)                                                          \
  ROW(std::uint64_t, saved_host_bytes)                                                                    \
  ROW(std::uint64_t, planned_saved_host_bytes)                                                            \
  ROW(std::uint64_t, saved_file_bytes)                                                                    \
  ROW(std::uint64_t, planned_saved_file_bytes)                                                            \
  ROW(double, saved_sent_bytes_per_step)                                                                  \
  ROW(std::uint64_t, planned_saved_sent_bytes_per_step)                                                   \
  /* Mean, without the first step of several. */                                                          \
  ROW(double, step_ms)                                                                                    \
  /* With --timeline: the time in collectives, and the part of it that no layer's computation covered. */ \
  ROW(double, communication_ms_per_step)                                                                  \
  ROW(double, exposed_communication_ms_per_step)

struct RankReport {
#define FOREBAY_FIGURE_MEMBER(Type, name) Type name{};
  FOREBAY_RANK_FIGURES(FOREBAY_FIGURE_MEMBER)
#undef FOREBAY_FIGURE_MEMBER
};

// The payload of one kind of operation between one rank and the others, up to the last step.
struct OperationReport {
  std::string operation;
  std::uint64_t count = 0;
  std::vector<std::uint64_t> sent_bytes;  // By peer.
  std::vector<std::uint64_t> received_bytes;
};

struct Evaluated {
  std::uint64_t step = 0;
  double loss = 0;
};

struct TrainingReport {
  std::vector<std::pair<std::string, std::string>> training;  // See training_of().
  std::vector<std::vector<OperationReport>> traffic;          // By rank.
  int world_size = 1;
  int tensor_parallel = 1;
  int data_parallel = 1;
  int pipeline_parallel = 1;
  std::string recompute = "none";
  std::string activations = "keep";  // Never "auto": the choice that was made.
  double dropout = 0;
  ShardingOptions sharding;                // Measured values in place of "auto".
  std::uint64_t offloaded_parameters = 0;  // In units that are offloaded.
  std::string store;                       // Rank 0's file store; empty without one.
  std::string device;                      // Rank 0's: "host", or "cuda:0 NVIDIA H200".
  std::string communicator;
  std::string matmul;
  int compute_threads = 1;
  std::uint64_t parameters = 0;
  std::uint64_t first_step = 0;                  // Steps before this run.
  std::uint64_t steps = 0;                       // With those before this run.
  std::vector<double> loss;                      // One per step: the mean over ranks and micro-steps.
  std::vector<std::optional<double>> grad_norm;  // None: the step was skipped.
  std::vector<Evaluated> evaluations;            // The loss of --evaluation-text.
  std::string generated;                         // With the prompt; empty without --generate.
  std::string digest;                            // One per part of the model, joined by "+".
  double tokens_per_second = 0;
  bool interrupted = false;
  std::vector<RankReport> ranks;
};

// The first step from which on every loss is infinite or NaN; none when the last loss is finite.
std::optional<std::uint64_t> first_step_of_lost_loss(const TrainingReport& report);

std::string report_json(const TrainingReport& report);
// The first failure and the last operations of a rank's communicator.
std::string flight_json(const Status& cause, const std::vector<OperationRecord>& operations);

}  // namespace forebay::gpt
