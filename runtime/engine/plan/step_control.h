// Sizes in a step that plan and engine must agree on, and the record by which the device decides about a
// step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "forebay/adafactor.h"
#include "forebay/kernels.h"
#include "forebay/muon.h"
#include "forebay/plan.h"
#include "forebay/sharding_options.h"
#include "forebay/units.h"

namespace forebay {

// Sums of buckets in flight: while one is averaged, the next bucket is on the wire. Smaller: the wire waits.
// Larger: more memory.
inline constexpr std::size_t kBucketsInFlight = 2;

// The bucket of small units is this fraction of the other buckets. A unit is small when two of it fit.
inline constexpr std::uint64_t kFusedBucketShare = 4;

// Uploaded for every step. The host knows the number of the step, so one bias correction is enough.
struct StepControl {
  StepState state;
  BiasCorrection correction;
};

// Gradient slices of offloaded units on their way to the host at a time.
inline constexpr std::uint64_t kTransitCount = 2;

// Elements that are updated together where 2-byte parameters take the place of fp32 gradients.
inline constexpr std::uint64_t kRoundedCount = 1u << 20;

// Tier kFile: pieces of the optimizer in host memory, of which some are read, one is updated and some are
// written; and pieces of parameters on their way to the device.
inline constexpr std::uint64_t kPassBuffers = 6;
inline constexpr std::uint64_t kMoverBuffers = 4;
// A piece has a multiple of this many elements, so that it is whole granules of the store in every type.
inline constexpr std::uint64_t kPieceGranule = 32768;
inline constexpr std::uint64_t kStagingBytesMin = 8u << 20;
// Optimizer states, in the order of the store's ranges and of saved state.
enum class StateField : int { kMaster, kM, kV, kAverage };
inline constexpr int kStateFieldCount = 4;
inline constexpr StateField kStateFieldsInOrder[kStateFieldCount] = {StateField::kMaster, StateField::kM,
                                                                     StateField::kV, StateField::kAverage};

// Whether the options have the state.
inline bool has_state(const ShardingOptions& options, StateField field) {
  if (field == StateField::kM) return has_first_moment(options.optimizer);
  if (field == StateField::kV) return has_second_moment(options.optimizer);
  return field != StateField::kAverage || options.ema > 0.0;
}

// The states that the options have, in order.
inline std::vector<StateField> states_of(const ShardingOptions& options) {
  std::vector<StateField> fields;
  for (const StateField field : kStateFieldsInOrder) {
    if (has_state(options, field)) fields.push_back(field);
  }
  return fields;
}

// Whether the parameter is its own master, wherever it lies.
inline bool is_own_master(const ShardingOptions& options) {
  return options.dtype == DataType::kFloat32 || !options.master_weights;
}

// The format in which a state is kept.
inline MomentFormat state_format(const ShardingOptions& options, StateField field) {
  if (field == StateField::kAverage) return MomentFormat::kFloat32;
  if (field != StateField::kMaster) return options.moments;
  return options.master_weights || options.dtype == DataType::kFloat32 ? MomentFormat::kFloat32
                                                                       : MomentFormat::kBfloat16;
}

// Bytes of all states of an element in a piece, at most. Exponents of codes are rounded up with them.
inline std::uint64_t state_bytes(const ShardingOptions& options) {
  std::uint64_t bytes = 0;
  for (const StateField field : states_of(options)) {
    const MomentFormat format = state_format(options, field);
    bytes += moment_bytes(format, 1) + (format == MomentFormat::kBlock8 ? 1 : 0);
  }
  return bytes;
}

// A range of the store has whole pages, which are the granules of a file store unless others are asked for.
inline constexpr std::uint64_t kPageBytes = 4096;
// A store may ask for granules that divide this.
inline constexpr std::uint64_t kStoreGranuleMost = 2 * kPieceGranule;

// Bytes of `count` elements of a state in one piece: values or codes, and the exponents of codes behind them.
inline constexpr std::uint64_t kept_bytes(MomentFormat format, std::uint64_t count) {
  constexpr std::uint64_t kAlignment = 64;  // The next state begins at a line of the caches.
  return moment_bytes(format, count) + round_up(moment_exponent_bytes(format, count), kAlignment);
}

// The same in a range of the store: pieces of `piece_count` elements, each in whole granules of any store.
inline constexpr std::uint64_t stored_bytes(MomentFormat format, std::uint64_t count,
                                            std::uint64_t piece_count) {
  return count / piece_count * round_up(kept_bytes(format, piece_count), kStoreGranuleMost) +
         round_up(kept_bytes(format, count % piece_count), kPageBytes);
}

// One buffer of the pass: the states, and the parameters where they are in files, too.
inline std::uint64_t pass_buffer_bytes(std::uint64_t piece_count, const ShardingOptions& options) {
  std::uint64_t bytes = 0;
  for (const StateField field : states_of(options))
    bytes += stored_bytes(state_format(options, field), piece_count, piece_count);
  const bool has_parameters = options.offload == Offload::kOptimizerAndParameters && !is_own_master(options);
  return bytes + (has_parameters ? piece_count * element_bytes(options.dtype) : 0);
}

// HalfMaster::key of a parameter: FNV-1a of its name, which all ranks that have the parameter know.
inline std::uint64_t rounding_key(std::string_view name) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return hash;
}

// Doubles that a rank sends in step() beside a flag for each unit that it used: its metric, its wish to stop,
// and a fingerprint of the values that must be the same on every rank.
inline constexpr std::uint64_t kStepFacts = 3;
// In a grid, doubles that a rank sends to all ranks: the same without the flags, and a fingerprint of the
// values given to shared units.
inline constexpr std::uint64_t kGridFacts = kStepFacts + 1;

// Adafactor: a rank's slice of a unit's sums has a multiple of this many elements, so that every access is
// aligned.
inline constexpr std::uint64_t kFactorGranule = 128;

// Muon: units that are gathered, orthogonalised or sent back at a time. Smaller: ranks wait for the wire.
// Larger: more memory.
inline constexpr std::size_t kMatricesInFlight = 2;

// Whether Muon orthogonalises the parameter.
inline bool is_muon_matrix(const ParameterShape& parameter) {
  const std::vector<std::uint64_t>& shape = parameter.split ? parameter.split->shape : parameter.shape;
  return !parameter.frozen && !parameter.elementwise && shape.size() == 2;
}

// Whether the parameter has a v, in a unit whose states have none: Muon, and no matrix.
inline bool has_own_v(const ShardingOptions& options, const ParameterShape& parameter) {
  return options.optimizer == Optimizer::kMuon && !parameter.frozen && !is_muon_matrix(parameter);
}

// Adafactor: a saved state has the factors of parameter NAME under "NAME/factors".
inline constexpr const char* kFactorsName = "/factors";

inline FactoredShape factored_shape_of(const ParameterShape& parameter) {
  const bool has_split = parameter.split && parameter.split->parts == 1;
  const std::vector<std::uint64_t>& shape = has_split ? parameter.split->shape : parameter.shape;
  return factored_shape({shape.data(), shape.size()}, parameter.count);
}

// Adafactor: the fp32 values that a unit on the device has beside its factors: for each trainable parameter
// the factor of u, and the row means of its matrices.
inline std::uint64_t factor_scalar_count(const UnitShape& unit) {
  std::uint64_t count = 0;
  for (const ParameterShape& parameter : unit.parameters) {
    if (parameter.frozen) continue;
    const FactoredShape shape = factored_shape_of(parameter);
    count += 1 + (shape.has_rows ? shape.batches : 0);
  }
  return count;
}

// Scratch for the leaves of the norm of `count` elements.
inline std::uint64_t leaf_bytes(std::uint64_t count) {
  return count / kLeafCount * sizeof(double);
}

// Staging for the decision: the norms of all ranks and units, and scratch of the same size.
inline std::uint64_t decision_bytes(int ranks, std::uint64_t units) {
  return 2 * static_cast<std::uint64_t>(ranks) * units * sizeof(double);
}

// The norms of this rank, then the StepControl.
inline std::uint64_t record_bytes(std::uint64_t units) {
  return units * sizeof(double) + sizeof(StepControl);
}

}  // namespace forebay
