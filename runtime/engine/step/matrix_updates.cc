#include "runtime/engine/step/matrix_updates.h"

#include <algorithm>

#include "forebay/host_muon.h"
#include "runtime/engine/step/decision.h"
#include "runtime/engine/step/updater.h"

namespace forebay {
MatrixUpdates::MatrixUpdates(StepContext& context, const Decision& decision, Updater& updater)
    : StepPart(context), decision_(decision), updater_(updater), decided_(context), stream_(context) {
  stream_.open();
  divide_over_ranks();
  for (int index = 0; index < context.unit_count(); ++index) {
    work_.push_back({this, index});
    taken_.emplace_back(context);
    gathered_.emplace_back(context);
    done_.emplace_back(context);
  }
}

// The largest matrix of a unit first, each to the rank with the least work so far. All ranks do the same.
void MatrixUpdates::divide_over_ranks() {
  std::vector<double> loads(static_cast<std::size_t>(context_.ranks()));
  for (Unit& u : context_.units) {
    std::vector<StepContext::Matrix*> largest_first;
    for (StepContext::Matrix& matrix : u.matrices) largest_first.push_back(&matrix);
    const auto cost = [](const StepContext::Matrix* matrix) {
      return orthogonal_cost(matrix->rows, matrix->columns);
    };
    std::stable_sort(largest_first.begin(), largest_first.end(),
                     [&](const auto* a, const auto* b) { return cost(a) > cost(b); });
    for (StepContext::Matrix* matrix : largest_first) {
      const auto least = std::min_element(loads.begin(), loads.end());
      matrix->owner = static_cast<int>(least - loads.begin());
      *least += cost(matrix);
    }
  }
}

// While one unit's matrices are multiplied, the next unit's are gathered and the last unit's sent back.
void MatrixUpdates::queue(const std::vector<bool>& used, const Hyperparameters& hyperparameters) {
  groups_ = hyperparameters.groups;
  engine_stream_.record(decided_);
  stream_.wait(decided_);
  updater_.device_stream().wait(decided_);
  if (plan_.offloads()) updater_.host_stream().wait(decided_);
  std::vector<int> queued;
  for (int index = 0; index < context_.unit_count(); ++index) {
    const auto number = static_cast<std::size_t>(index);
    if (used[number] && plan_.muon[number].has_matrices) queued.push_back(index);
  }
  const auto memory = [&](std::size_t i) { return context_.matrices[i % kMatricesInFlight]; };
  for (const int index : queued) queue_momentum(index);
  for (std::size_t i = 0; i < queued.size() + 1; ++i) {
    if (i < queued.size()) {
      queue_gather(queued[i], memory(i));
      queue_products(queued[i], memory(i));
    }
    if (i > 0) queue_return(queued[i - 1], memory(i - 1));
  }
}

void MatrixUpdates::queue_momentum(int index) {
  const Unit& u = unit(index);
  const EngineStream& stream = u.offloaded ? updater_.host_stream() : updater_.device_stream();
  if (u.offloaded) {
    stream.call<&Work::take_momentum>(work_[static_cast<std::size_t>(index)]);
  } else {
    for (const StepContext::Segment& segment : u.segments) {
      if (segment.matrix == nullptr) continue;
      must(kernels_.muon_momentum({momentum_of(u, segment, u.updated_gradients), decision_.on_device()},
                                  stream));
    }
  }
  stream.record(taken_[static_cast<std::size_t>(index)]);
}

void MatrixUpdates::queue_gather(int index, float* gathered) {
  const Unit& u = unit(index);
  const std::uint64_t bytes = u.updated_count * sizeof(float);
  float* const own = gathered + u.updated_begin;
  engine_stream_.wait(taken_[static_cast<std::size_t>(index)]);
  engine_stream_.copy(own, u.orthogonal, bytes);
  if (options_.stage > 0 && context_.ranks() > 1) {
    must(context_.communicator.all_gather({.source = reinterpret_cast<const std::byte*>(own),
                                           .target = reinterpret_cast<std::byte*>(gathered),
                                           .target_stride_bytes = bytes,
                                           .bytes = bytes},
                                          engine_stream_));
  }
  engine_stream_.record(gathered_[static_cast<std::size_t>(index)]);
}

// Afterwards all is zero but this rank's matrices, so the sum over ranks has the matrices of all.
void MatrixUpdates::queue_products(int index, float* gathered) {
  const auto number = static_cast<std::size_t>(index);
  stream_.wait(gathered_[number]);
  const MarkedSpan span = context_.marked(stream_, "products", "orthogonalise", index);
  std::uint64_t end = 0;  // The elements before it are done.
  const auto zero_until = [&](std::uint64_t begin) {
    if (begin == end) return;
    stream_.fill(reinterpret_cast<std::byte*>(gathered + end), 0, (begin - end) * sizeof(float));
  };
  for (const StepContext::Matrix& matrix : unit(index).matrices) {
    if (matrix.owner != context_.rank() || unit(index).fixed[matrix.parameter]) continue;
    zero_until(matrix.begin);
    end = matrix.begin + matrix.count();
    must(kernels_.orthogonalise(
        {{gathered + matrix.begin, context_.matrix_work, matrix.rows, matrix.columns}, decision_.on_device()},
        stream_));
  }
  zero_until(layout(index).trainable_count);
  stream_.record(done_[number]);
}

// Bucket by bucket, with the buckets' memory.
void MatrixUpdates::queue_return(int index, float* gathered) {
  const Unit& u = unit(index);
  engine_stream_.wait(done_[static_cast<std::size_t>(index)]);
  const std::uint64_t whole = layout(index).trainable_count * sizeof(float);
  if (context_.ranks() == 1) return engine_stream_.copy(u.orthogonal, gathered, whole);
  const std::uint64_t slice = trainable_slice(index);
  const std::uint64_t most = plan_.bucket_columns * element() / sizeof(float);
  float* const sum = context_.bucket_sums[0];
  for (std::uint64_t at = 0; at < slice; at += most) {
    const std::uint64_t count = std::min(most, slice - at);
    must(context_.communicator.reduce_scatter({.source = reinterpret_cast<const std::byte*>(gathered + at),
                                               .source_stride_bytes = slice * sizeof(float),
                                               .count = count,
                                               .type = DataType::kFloat32,
                                               .receive = context_.staging,
                                               .target = sum,
                                               .first = true},
                                              engine_stream_));
    if (options_.stage > 0) {
      engine_stream_.copy(u.orthogonal + at, sum, count * sizeof(float));
      continue;
    }
    must(context_.communicator.all_gather({.source = reinterpret_cast<const std::byte*>(sum),
                                           .target = reinterpret_cast<std::byte*>(gathered + at),
                                           .target_stride_bytes = slice * sizeof(float),
                                           .bytes = count * sizeof(float)},
                                          engine_stream_));
  }
  if (options_.stage == 0) engine_stream_.copy(u.orthogonal, gathered, whole);
}

// Runs in the order of the unit's stream. m stays until the step is applied. Files are read here, between the
// writing of the last step and the update. If that fails, no rank may vote for the step.
void MatrixUpdates::take_momentum(int index) {
  const bool is_applied = decision_.on_host().outcome == StepOutcome::kApplied;
  if (context_.counts_only() || !is_applied || !updater_.failure().ok()) return;
  const Unit& u = unit(index);
  const auto field = static_cast<std::size_t>(StateField::kM);
  if (u.part_count > 0) {
    if (const Status read =
            context_.read_offloaded(u.states[field], 0, u.orthogonal, u.updated_count * sizeof(float));
        !read.ok()) {
      updater_.fail(read);
      return context_.communicator.abort(updater_.failure());
    }
  }
  for (const StepContext::Segment& segment : u.segments) {
    if (segment.matrix == nullptr) continue;
    MuonMomentumArguments momentum = momentum_of(u, segment, u.host_gradients);
    momentum.gradient.factor = decision_.on_host().factor;
    muon_momentum(momentum, updater_.host_runner());
  }
}

// Without the clipping factor. An m in files has been read into its place.
MuonMomentumArguments MatrixUpdates::momentum_of(const Unit& u, const StepContext::Segment& segment,
                                                 const std::byte* gradients) const {
  MuonMomentumArguments a;
  a.gradient = {gradients + segment.begin * element_bytes(u.gradient_type), u.gradient_type};
  a.a1 = adamw_arguments(options_, groups_[static_cast<std::size_t>(segment.group)]).a1;
  a.values = u.orthogonal + segment.begin;
  const auto* const m = reinterpret_cast<const float*>(u.kept[static_cast<std::size_t>(StateField::kM)]);
  a.m = m == nullptr ? a.values : m + segment.begin;
  a.count = segment.count;
  return a;
}

MuonUpdateArguments MatrixUpdates::update_of(int index, const StepContext::Segment& segment,
                                             std::uint64_t begin, const KeptUpdateArguments& kept,
                                             const GroupHyperparameters& group) const {
  const Unit& u = unit(index);
  MuonUpdateArguments a;
  static_cast<MasterMove&>(a) = move_of(kept);
  a.step = muon_step(group.lr, segment.matrix->rows, segment.matrix->columns, options_.muon_matches_rms);
  a.gradient = {kept.update.gradient, u.gradient_type};
  a.a1 = kept.update.a1;
  a.m = kept.update.m;
  a.u = u.orthogonal + begin;
  a.count = kept.update.count;
  return a;
}

}  // namespace forebay
