#include "trainer/trainer.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "output/export.h"
#include "output/files.h"
#include "output/output_file.h"
#include "output/progress.h"
#include "output/safetensors.h"
#include "output/summary.h"
#include "parallel/parted_state.h"
#include "trainer/initial.h"
#include "trainer/stop_request.h"

namespace forebay::gpt {
namespace {

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// While alive, the weights are their moving average, if there is one that may take their place.
class AverageInUse {
 public:
  AverageInUse(const TrainerOptions& options, Engine& engine, Evaluation& evaluation)
      : in_use_(options.ema > 0 && options.master_weights), engine_(engine), evaluation_(evaluation) {
    swap();
  }
  ~AverageInUse() noexcept(false) {
    if (std::uncaught_exceptions() == 0) swap();
  }
  AverageInUse(const AverageInUse&) = delete;
  AverageInUse& operator=(const AverageInUse&) = delete;

 private:
  void swap() {
    if (!in_use_) return;
    engine_.swap_average();
    evaluation_.weights_changed();
  }

  const bool in_use_;
  Engine& engine_;
  Evaluation& evaluation_;
};

}  // namespace

Trainer::Trainer(const TrainerOptions& options, const Rank& rank)
    : options_(options), model_(options, rank), meter_(model_), evaluation_(model_) {
  if (!options_.save_state.empty()) model_.engine.lock_state(options_.save_state);
  set_weights();
  show_opening(model_, evaluation_);
}

TrainingReport Trainer::train() {
  TrainingReport report;
  report.first_step = steps_done();
  Progress progress({.enabled = options_.progress && model_.rank.place.rank == 0,
                     .first_step = report.first_step,
                     .steps = options_.steps,
                     .tokens_per_step = model_.tokens_per_step()});
  meter_.resume();
  while (steps_done() < options_.steps && !report.interrupted) {
    const StepResult result = step();
    report.loss.push_back(result.metric_sum / model_.grid.shape().data_parallel());
    report.grad_norm.push_back(result.grad_norm);
    report.interrupted = result.stop && steps_done() < options_.steps;
    progress.show(steps_done(), report.loss.back(), result.grad_norm);
    const bool is_last = steps_done() == options_.steps || report.interrupted;
    // The first step of several fills the engine's buffers.
    if (meter_.step_count() == 1 && !is_last) meter_.resume();
    if (options_.evaluate_every > 0 && steps_done() % options_.evaluate_every == 0)
      evaluate(report, progress);
    if (options_.save_every > 0 && steps_done() % options_.save_every == 0) {
      meter_.pause();
      save();
      meter_.resume();
    }
  }
  const bool was_evaluated = !report.evaluations.empty() && report.evaluations.back().step == steps_done();
  if (options_.evaluates() && !report.interrupted && !was_evaluated) evaluate(report, progress);
  meter_.pause();
  progress.end();
  report.steps = steps_done();
  if (options_.generate > 0 && !report.interrupted) report.generated = generate();
  if (!options_.logits_file.empty() && !report.interrupted) write_logits();
  if (!options_.tokens_file.empty() && !report.interrupted) write_tokens();
  fill_report(model_, meter_, evaluation_, most_passes_in_flight_, report);

  if (!options_.save_state.empty() && saved_step_ != report.steps) save();
  finish_save();
  if (!options_.export_file.empty() && !report.interrupted) {
    const AverageInUse average(options_, model_.engine, evaluation_);
    export_weights(model_, options_.export_file);
  }
  if (!options_.timeline_file.empty()) write_timeline();
  throw_if_error(model_.communicator.barrier());  // No rank leaves while another still needs it.
  return report;
}

StepResult Trainer::step() {
  meter_.begin_step();
  note_step_begins();
  model_.engine.step_begin();
  run_passes();
  model_.compute.synchronize();
  if (model_.inputs != nullptr) model_.inputs->check();
  const StepResult result = model_.engine.step(hyperparameters());
  cursor_.samples += model_.samples_per_step();
  meter_.end_step();
  return result;
}

Hyperparameters Trainer::hyperparameters() {
  Hyperparameters values;
  const double lr = learning_rate(schedule_of(options_), steps_done());
  values.groups = {{.lr = lr, .weight_decay = options_.weight_decay}, {.lr = lr, .weight_decay = 0.0}};
  values.clip = options_.clip;
  // All tensor-parallel ranks of the last pipeline stage know the same loss. One of them tells it.
  if (model_.grid.stage().is_last()) {
    const double loss = mean(model_.feed.take_losses());
    values.metric = model_.grid.at().tensor == 0 ? loss : 0;
  }
  values.stop = stop_is_requested();
  return values;
}

// One forward, one backward: forward passes run ahead by the number of pipeline stages behind this one.
void Trainer::run_passes() {
  Gpt& gpt = model_.gpt;
  PipelineGroup& pipeline = model_.pipeline;
  StageLink* const forward = pipeline.forward();
  StageLink* const backward = pipeline.backward();
  const int ahead = forwards_ahead(model_.grid.stage());
  if (forward != nullptr) forward->receive(gpt.input(0), gpt.stage_bytes());
  if (backward != nullptr && pipeline.asks_ahead()) backward->receive(gpt.gradient(0), gpt.stage_bytes());
  int forwards = 0;
  for (int micro_step = 0; micro_step < options_.micro_steps; ++micro_step) {
    while (forwards < options_.micro_steps && forwards - micro_step <= ahead) {
      run_forward(forwards++);
      most_passes_in_flight_ =
          std::max(most_passes_in_flight_, static_cast<std::uint64_t>(forwards - micro_step));
    }
    run_backward(micro_step);
  }
}

void Trainer::run_forward(int micro_step) {
  Gpt& gpt = model_.gpt;
  const BatchPlace place = batch_place(micro_step);
  write_batch(place);
  gpt.begin(pass_of(place));
  model_.feed.send(gpt, model_.compute.stream());
  StageLink* const link = model_.pipeline.forward();
  if (link == nullptr) return model_.engine_model.forward_pass(micro_step);
  link->wait_for_received();
  link->wait_for_place(place.micro_step);
  model_.engine_model.forward_pass(micro_step);
  link->send(gpt.output(place.micro_step), gpt.stage_bytes(), place.micro_step);
  if (micro_step + 1 < options_.micro_steps)
    link->receive(gpt.input(place.micro_step + 1), gpt.stage_bytes());
}

void Trainer::run_backward(int micro_step) {
  Gpt& gpt = model_.gpt;
  const bool asks_ahead = model_.pipeline.asks_ahead();
  const BatchPlace place = batch_place(micro_step);
  gpt.begin(pass_of(place));
  if (StageLink* const link = model_.pipeline.backward(); link != nullptr) {
    if (!asks_ahead) link->receive(gpt.gradient(place.micro_step), gpt.stage_bytes());
    link->wait_for_received();
    link->wait_for_place(place.micro_step);
    model_.engine_model.backward_pass();
    link->send(gpt.gradient(place.micro_step), gpt.stage_bytes(), place.micro_step);
    if (asks_ahead && micro_step + 1 < options_.micro_steps)
      link->receive(gpt.gradient(place.micro_step + 1), gpt.stage_bytes());
  } else {
    model_.engine_model.backward_pass();
  }
  model_.engine_model.end_backward_pass();
  if (model_.grid.stage().is_last()) model_.feed.receive(gpt, model_.compute.stream());
}

void Trainer::write_batch(const BatchPlace& place) {
  const std::size_t sequence = options_.model.sequence;
  const BatchFeed::Batch batch = model_.feed.next();
  for (std::size_t b = 0; b < options_.batch; ++b) {
    copy_sample(model_.text, options_.seed, place.sample() + b, batch.tokens.subspan(b * sequence, sequence),
                batch.targets.subspan(b * sequence, sequence));
  }
}

BatchPlace Trainer::batch_place(int micro_step) const {
  return {.first_sample = cursor_.samples,
          .micro_step = static_cast<std::uint64_t>(micro_step),
          .rank = static_cast<std::uint64_t>(model_.grid.at().data),
          .rank_count = static_cast<std::uint64_t>(model_.grid.shape().data_parallel()),
          .batch = options_.batch};
}

Pass Trainer::pass_of(const BatchPlace& place) const {
  return {.step = steps_done(), .micro_step = place.micro_step, .first_sample = place.rank * options_.batch};
}

void Trainer::set_weights() {
  cursor_ = {.samples = 0,
             .seed = options_.seed,
             .text = model_.text.hash(),
             .heads = options_.model.heads,
             .part = static_cast<std::uint64_t>(model_.grid.part())};
  if (options_.model.is_llama()) {
    cursor_.rope_theta = options_.model.rope_theta;
    cursor_.norm_epsilon = options_.model.norm_epsilon;
  }
  if (!options_.load_state.empty()) return load();
  const ParameterSetter set = [&](std::size_t unit, std::size_t index, std::span<const float> values) {
    const GptParameter& parameter = model_.whole_units[unit].parameters[index];
    if (const std::optional<ParameterId> place = model_.find_parameter(parameter))
      model_.engine.set_parameter(*place, take_part(parameter, model_.grid.tensor_part(), values));
  };
  if (options_.initial_file.empty()) {
    set_random(model_.whole_units, options_.seed, set);
  } else {
    set_from_file(model_.whole_units, options_.initial_file, set);
  }
}

void Trainer::load() {
  std::optional<std::uint64_t> step;  // The newest.
  if (options_.load_step > 0) step = options_.load_step;
  const std::string directory = directory_to_load(model_.grid, options_.load_state, step);
  const std::string text = model_.engine.load_state(directory, step);
  if (text == "{}") return;  // `forebay state import` made it: the data begin at their start.
  Cursor saved = Cursor::from_text(text);
  if (directory == options_.load_state) saved.part = cursor_.part;  // A state of all parts.
  check_may_resume(cursor_, saved, options_.load_state, directory);
  cursor_.samples = saved.samples;
}

void Trainer::save() {
  finish_save();
  saved_step_ = steps_done();
  is_saving_ = true;
  if (options_.save_async)
    return model_.engine.save_state_begin(options_.save_state, cursor_.to_text(), options_.keep);
  model_.engine.save_state(options_.save_state, cursor_.to_text(), options_.keep);
  finish_save();
}

void Trainer::finish_save() {
  if (!is_saving_) return;
  is_saving_ = false;
  model_.engine.save_state_end();
}

void Trainer::evaluate(TrainingReport& report, Progress& progress) {
  meter_.pause();
  const AverageInUse average(options_, model_.engine, evaluation_);
  report.evaluations.push_back({steps_done(), evaluation_.loss()});
  progress.show_evaluation(steps_done(), report.evaluations.back().loss);
  meter_.resume();
}

// The text goes to stdout as it comes: the end of a line of progress, and a line feed, frame it.
std::string Trainer::generate() {
  const bool shows = model_.rank.place.rank == 0;
  const AverageInUse average(options_, model_.engine, evaluation_);
  const std::string text = evaluation_.generate([&](std::string_view part) {
    if (shows) show_generated(part);
  });
  if (shows) show_generated("\n");
  return text;
}

void Trainer::write_logits() {
  const AverageInUse average(options_, model_.engine, evaluation_);
  std::unique_ptr<SafetensorsWriter> writer;
  const GptShape& shape = options_.model;
  const std::vector<TensorHeader> headers = {{"logits", {shape.sequence, shape.vocabulary}}};
  if (model_.rank.place.rank == 0)
    writer = std::make_unique<SafetensorsWriter>(options_.logits_file, headers);
  evaluation_.logits([&](std::span<const float> row) {
    if (writer != nullptr) writer->write(row);
  });
  if (writer != nullptr) writer->finish();
}

// As TokenFile reads them: 16-bit numbers without a header.
void Trainer::write_tokens() {
  constexpr std::size_t kTokensAtOnce = std::size_t{1} << 16;
  if (model_.rank.place.rank != 0) return;
  OutputFile file(options_.tokens_file);
  std::vector<Token> tokens;
  for (std::uint64_t first = 0; first < model_.text.size(); first += tokens.size()) {
    tokens.resize(std::min<std::uint64_t>(kTokensAtOnce, model_.text.size() - first));
    model_.text.copy(first, tokens);
    file.write(tokens.data(), tokens.size() * sizeof(Token));
  }
  file.finish();
}

// Each rank writes its own. A timeline that cannot be written does not fail the training.
void Trainer::write_timeline() {
  static_cast<void>(model_.engine.statistics());  // Waits for queued work.
  const int rank = model_.rank.place.rank;
  std::vector<std::vector<Timeline::Span>> spans(static_cast<std::size_t>(rank) + 1);
  spans.back() = model_.timeline.spans();
  try {
    write_file(timeline_file(options_, rank), timeline_json(spans));
  } catch (const Error& error) {
    std::fprintf(stderr, "forebay-gpt: %s; all else is there\n", error.status().message().c_str());
    note_output_failed();
  }
}

}  // namespace forebay::gpt
