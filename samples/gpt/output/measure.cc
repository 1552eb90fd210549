#include "output/measure.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "forebay/error.h"

namespace forebay::gpt {
namespace {

// The kinds of operations that carry payload.
constexpr const char* kCountedOperations[] = {"reduce_scatter", "all_gather", "exchange", "send", "recv"};

void measure_memory(const EngineStatistics& statistics, RankReport& mine) {
  mine.peak_bytes = statistics.peak;
  mine.planned_bytes = statistics.planned;
  mine.reserved_bytes = statistics.peak_reserved_bytes;
  mine.planned_reserved_bytes = statistics.planned_reserved_bytes;
  mine.host_bytes = statistics.host_bytes;
  mine.planned_host_bytes = statistics.planned_host_bytes;
  mine.file_bytes = statistics.file_bytes;
  mine.planned_file_bytes = statistics.planned_file_bytes;
}

void measure_files(const RankModel& model, const StepMeter& meter, RankReport& mine) {
  const FileBytes& planned = model.engine.plan().file_bytes;
  mine.file_read_bytes_per_step = meter.read_bytes_per_step();
  mine.file_written_bytes_per_step = meter.written_bytes_per_step();
  mine.planned_file_read_bytes_per_step = planned.read_per_step;
  mine.planned_file_written_bytes_per_step = planned.written_per_step;
}

// `outside`: the part of `traffic` that belongs to no step.
struct PerStep {
  double sent, received;
};
PerStep per_step(Traffic traffic, const Traffic& outside, double steps) {
  return {static_cast<double>(traffic.sent_bytes - outside.sent_bytes) / steps,
          static_cast<double>(traffic.received_bytes - outside.received_bytes) / steps};
}

void measure_wire(RankModel& model, const EngineStatistics& statistics, const Evaluation& evaluation,
                  double steps, RankReport& mine) {
  const PerStep data =
      per_step({statistics.traffic.sent, statistics.traffic.received}, evaluation.exchanged_traffic(), steps);
  mine.sent_bytes_per_step = data.sent;
  mine.received_bytes_per_step = data.received;
  mine.planned_sent_bytes_per_step = statistics.planned_wire_per_step.sent;
  mine.planned_received_bytes_per_step = statistics.planned_wire_per_step.received;
  mine.evaluation_sent_bytes = statistics.evaluation_traffic.sent;
  mine.planned_evaluation_sent_bytes = evaluation.planned_sent_bytes();
  const PerStep tensor = per_step(tensor_traffic(model.grid), evaluation.tensor_traffic(), steps);
  mine.tensor_sent_bytes_per_step = tensor.sent;
  mine.tensor_received_bytes_per_step = tensor.received;
  const PerStep pipeline = per_step(pipeline_traffic(model.grid), evaluation.pipeline_traffic(), steps);
  mine.pipeline_sent_bytes_per_step = pipeline.sent;
  mine.pipeline_received_bytes_per_step = pipeline.received;
}

void measure_activations(CheckpointedInputs& inputs, int micro_steps, double steps, RankReport& mine) {
  const ActivationStatistics saved = inputs.statistics();
  const ActivationPlan& plan = inputs.plan();
  mine.saved_device_bytes = saved.device_bytes;
  mine.planned_saved_device_bytes = plan.device_bytes();
  mine.saved_host_bytes = saved.host_bytes;
  mine.planned_saved_host_bytes = plan.host_bytes();
  mine.saved_file_bytes = saved.file_bytes;
  mine.planned_saved_file_bytes = plan.file_bytes;
  mine.saved_sent_bytes_per_step = static_cast<double>(saved.traffic.sent_bytes) / steps;
  mine.planned_saved_sent_bytes_per_step =
      plan.wire_per_micro_batch.sent * static_cast<std::uint64_t>(micro_steps);
}

void measure_exposure(const Timeline& timeline, double steps, RankReport& mine) {
  const Exposure communication = exposure(timeline.spans(), "engine", "trainer");
  mine.communication_ms_per_step = static_cast<double>(communication.busy.count()) / 1e6 / steps;
  mine.exposed_communication_ms_per_step = static_cast<double>(communication.exposed.count()) / 1e6 / steps;
}

RankReport measure_rank(RankModel& model, const EngineStatistics& statistics, const StepMeter& meter,
                        const Evaluation& evaluation) {
  const double steps = std::max<double>(static_cast<double>(meter.step_count()), 1);
  RankReport mine;
  mine.parameters = model.engine.model().parameter_count();
  measure_memory(statistics, mine);
  measure_files(model, meter, mine);
  measure_wire(model, statistics, evaluation, steps, mine);
  if (model.inputs != nullptr) measure_activations(*model.inputs, model.options.micro_steps, steps, mine);
  mine.step_ms = meter.mean_step_ms();
  if (!model.options.timeline_file.empty()) measure_exposure(model.timeline, steps, mine);
  return mine;
}

// Counts of one kind of operation on one rank, as words that ranks can exchange.
std::vector<std::uint64_t> traffic_words(const std::vector<OperationTraffic>& mine, std::string_view kind,
                                         std::size_t size) {
  std::vector<std::uint64_t> words(1 + 2 * size);
  for (const OperationTraffic& one : mine) {
    if (one.operation != kind) continue;
    words[0] = one.count;
    for (std::size_t peer = 0; peer < size; ++peer) {
      words[1 + peer] = one.peers[peer].sent_bytes;
      words[1 + size + peer] = one.peers[peer].received_bytes;
    }
  }
  return words;
}

// The counts of every rank's communicators so far; kinds that a rank has not used are left out.
std::vector<std::vector<OperationReport>> gather_traffic(RankModel& model) {
  const std::vector<OperationTraffic> mine = model.grid.operation_traffic(model.engine.operation_traffic());
  const auto size = static_cast<std::size_t>(model.rank.place.size);
  std::vector<std::vector<OperationReport>> all(size);
  for (const char* kind : kCountedOperations) {
    const std::vector<std::uint64_t> words = traffic_words(mine, kind, size);
    std::vector<std::uint64_t> by_rank(words.size() * size);
    throw_if_error(model.communicator.exchange(std::as_bytes(std::span(words)),
                                               std::as_writable_bytes(std::span(by_rank))));
    for (std::size_t rank = 0; rank < size; ++rank) {
      const auto first = by_rank.begin() + static_cast<std::ptrdiff_t>(rank * words.size());
      if (*first == 0) continue;
      const auto middle = first + 1 + static_cast<std::ptrdiff_t>(size);
      all[rank].push_back(
          {kind, *first, {first + 1, middle}, {middle, middle + static_cast<std::ptrdiff_t>(size)}});
    }
  }
  return all;
}

std::vector<RankReport> gather_ranks(RankModel& model, const RankReport& mine) {
  static_assert(std::is_trivially_copyable_v<RankReport>);
  std::vector<RankReport> all(static_cast<std::size_t>(model.rank.place.size));
  throw_if_error(model.communicator.exchange(std::as_bytes(std::span(&mine, 1)),
                                             std::as_writable_bytes(std::span(all))));
  return all;
}

std::string chosen_activations(RankModel& model) {
  if (model.options.activations != ActivationPlacement::kAuto) return activations_name(model.options);
  const std::vector<std::string> names =
      model.of_each_stage(model.inputs == nullptr ? "keep" : activations_name(model.inputs->plan()));
  std::string text = names.front();
  if (std::equal(names.begin() + 1, names.end(), names.begin())) return text;
  for (std::size_t stage = 1; stage < names.size(); ++stage) text += ", " + names[stage];
  return text;
}

std::string digest(RankModel& model) {
  std::string joined;
  for (const std::string& part : model.grid.of_each_part(model.engine.digest()))
    joined += (joined.empty() ? "" : "+") + part;
  return joined;
}

// The options of the run, with measured values in place of "auto". Collective for `activations`.
void fill_options(RankModel& model, TrainingReport& report) {
  const TrainerOptions& options = model.options;
  report.training = training_of(options);
  report.training.emplace_back("text", std::to_string(model.text.hash()));
  report.world_size = model.rank.place.size;
  report.tensor_parallel = model.grid.shape().tensor_parallel();
  report.data_parallel = model.grid.shape().data_parallel();
  report.pipeline_parallel = model.grid.shape().pipeline_parallel();
  report.recompute = recompute_name(options);
  report.activations = chosen_activations(model);
  report.dropout = options.dropout;
  report.parameters = parameter_count(options.model);
  report.offloaded_parameters = model.offloaded_parameters();
  report.sharding = options;
  report.sharding.bucket_bytes = model.engine.plan().options.bucket_bytes;
  if (options.offload_auto) {
    report.sharding.offload_fraction =
        static_cast<double>(report.offloaded_parameters) / static_cast<double>(report.parameters);
  }
}

}  // namespace

void StepMeter::end_step() {
  step_ms_.push_back(std::chrono::duration<double, std::milli>(Clock::now() - step_start_).count());
}

void StepMeter::pause() {
  const FileCount now = file_bytes();
  sum_.read += now.read - begin_.read;
  sum_.written += now.written - begin_.written;
}

double StepMeter::mean_step_ms() const {
  if (step_ms_.empty()) return 0;
  const auto first = step_ms_.begin() + (step_ms_.size() > 1 ? 1 : 0);
  return std::accumulate(first, step_ms_.end(), 0.0) / static_cast<double>(step_ms_.end() - first);
}

double StepMeter::per_metered_step(std::uint64_t bytes) const {
  const std::size_t steps = step_ms_.size() > 1 ? step_ms_.size() - 1 : 1;
  return static_cast<double>(bytes) / static_cast<double>(steps);
}

StepMeter::FileCount StepMeter::file_bytes() {
  if (!model_.offloads_to_files()) return {};  // Asking waits for the engine.
  const EngineStatistics statistics = model_.engine.statistics();
  return {statistics.file_read_bytes, statistics.file_written_bytes};
}

void fill_report(RankModel& model, const StepMeter& meter, const Evaluation& evaluation,
                 std::uint64_t most_passes_in_flight, TrainingReport& report) {
  model.pipeline.drain();  // A send counts when it has ended.
  const EngineStatistics statistics = model.engine.statistics();
  RankReport mine = measure_rank(model, statistics, meter, evaluation);
  mine.most_passes_in_flight = most_passes_in_flight;
  report.traffic = gather_traffic(model);
  report.ranks = gather_ranks(model, mine);
  fill_options(model, report);
  report.store = statistics.store_description;
  report.communicator = model.communicator.name();
  report.device = model.rank.on_gpu() ? model.rank.backend->capabilities().name : "host";
  report.matmul = model.operations->matmul();
  report.compute_threads = model.rank.threads;
  const double step_seconds = report.ranks.front().step_ms / 1e3;
  report.tokens_per_second = step_seconds > 0 ? model.tokens_per_step() / step_seconds : 0;
  report.digest = digest(model);
}

}  // namespace forebay::gpt
