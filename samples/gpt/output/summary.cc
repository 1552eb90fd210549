#include "output/summary.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "forebay/text.h"
#include "forebay/units.h"

namespace forebay::gpt {
namespace {

constexpr int kColumns = 100;      // Narrow terminals and quoted logs still show a row as one.
constexpr int kLabelColumns = 14;  // With the indentation before the label and the space after it.

// Prints one row on stderr: a label, then a text that is wrapped behind it.
void show_row(const char* label, const std::string& text) {
  std::fprintf(stderr, "  %-*s%s\n", kLabelColumns - 2, label,
               wrap_text(text, kColumns, kLabelColumns).c_str());
}

// "7.99 MiB device, 6.05 MiB host, 0 B files".
std::string tiers_text(std::uint64_t device_bytes, std::uint64_t host_bytes, std::uint64_t file_bytes) {
  return format_bytes(device_bytes) + " device, " + format_bytes(host_bytes) + " host, " +
         format_bytes(file_bytes) + " files";
}

// --- before the first step ---

std::string model_text(const RankModel& model) {
  const GptShape& shape = model.options.model;
  return (shape.is_llama() ? "Llama, " : "") + format_count(shape.layers, "layer") + ", " +
         std::to_string(shape.hidden) + " columns, " + format_count(shape.heads, "head") + ", " +
         std::to_string(shape.sequence) + " positions";
}

std::string data_text(const RankModel& model) {
  const std::uint64_t tokens = model.options.batch * model.options.model.sequence;
  // No row has the word "step" before a space: scripts wait for "step " to know that steps have begun.
  return grouped(model.text.size()) +
         (model.text.is_token_file() ? " tokens of a file; "
          : model.text.is_bytes()    ? " bytes of text; "
                                     : " tokens of text; ") +
         grouped(tokens) + " tokens per rank and micro-step, " +
         grouped(static_cast<std::uint64_t>(model.tokens_per_step())) + " in each step";
}

std::string ranks_text(const RankModel& model) {
  const RankGrid& grid = model.grid.shape();
  std::string text = std::to_string(model.rank.place.size) + ", communicator " + model.communicator.name();
  if (model.grid.part_count() > 1) {
    text += "; " + std::to_string(grid.tensor_parallel()) + " tensor-parallel x " +
            std::to_string(grid.data_parallel()) + " data-parallel x " +
            std::to_string(grid.pipeline_parallel()) + " pipeline-parallel";
  }
  return text;
}

std::string device_text(const RankModel& model) {
  const std::string products = std::string(model.operations->matmul()) + " products";
  if (model.rank.on_gpu()) return std::string(model.rank.backend->capabilities().name) + ", " + products;
  return "host, " + format_count(static_cast<std::uint64_t>(model.rank.threads), "thread") + " per rank, " +
         products;
}

std::string sharding_text(RankModel& model) {
  const TrainerOptions& options = model.options;
  std::string text = "ZeRO stage " + std::to_string(options.stage) + ", " + data_type_name(options.dtype) +
                     ", buckets of " + format_bytes(model.engine.plan().options.bucket_bytes);
  const WireSpeed speed = model.engine.statistics().wire_speed;
  if (speed.bytes_per_second > 0) {
    char measured[96];
    std::snprintf(measured, sizeof measured, " (measured: latency %.0f us, bandwidth %s/s)",
                  speed.latency_seconds * 1e6,
                  format_bytes(static_cast<std::uint64_t>(speed.bytes_per_second)).c_str());
    text += measured;
  }
  if (options.group > 1) {
    text += ", all-reduce groups of " + std::to_string(options.group) + " ranks" +
            (options.shard_within_group ? ", sharded within them" : "");
  }
  return text;
}

std::string pipeline_text(const RankModel& model) {
  const int stages = model.grid.shape().pipeline_parallel();
  const int micro_steps = model.options.micro_steps;
  char text[128];
  std::snprintf(text, sizeof text,
                "each stage waits at least %.0f %% of the time; more --micro-steps make it less",
                100.0 * (stages - 1) / (micro_steps + stages - 1));
  return text;
}

std::string offload_text(RankModel& model) {
  if (model.options.offload == Offload::kNone) return "none";
  const std::string store = model.engine.statistics().store_description;
  char share[32];
  std::snprintf(share, sizeof share, "%.0f %%",
                100.0 * static_cast<double>(model.offloaded_parameters()) /
                    static_cast<double>(model.engine.model().parameter_count()));
  return std::string(offload_name(model.options.offload)) + " to " + tier_name(model.options.tier) + ": " +
         share + " of the model, " + std::to_string(model.engine.plan().device_units) + " of " +
         std::to_string(model.engine.model().units.size()) + " units stay on the device" +
         (store.empty() ? "" : "; " + store);
}

void show_activations(const std::vector<std::string>& choices) {
  const bool same = std::equal(choices.begin() + 1, choices.end(), choices.begin());
  for (std::size_t stage = 0; stage < (same ? 1 : choices.size()); ++stage) {
    show_row("activations",
             "auto" + (same ? "" : " at pipeline stage " + std::to_string(stage)) + ": " + choices[stage]);
  }
}

// "; each pass sends 1.12 MiB between data-parallel ranks", from the plan.
std::string pass_text(const RankModel& model) {
  const EvaluationBytes& planned = model.engine.plan().evaluation;
  if (planned.first.wire.sent == 0) return "";
  return "; each pass sends " + format_bytes(planned.first.wire.sent) + " per rank, as planned";
}

std::string evaluation_text(const RankModel& model, const Evaluation& evaluation) {
  const std::uint64_t every = model.options.evaluate_every;
  return format_count(evaluation.sample_count(), "sample") + " of another text in " +
         format_count(evaluation.pass_count(), "pass", "passes") + " at the end" +
         (every > 0 ? " and every " + format_count(every, "step") : "") + pass_text(model);
}

// The plan of rank 0. Without a pipeline every rank has the same.
std::string memory_text(RankModel& model) {
  const EngineStatistics statistics = model.engine.statistics();
  std::uint64_t host_bytes = statistics.planned_host_bytes;
  std::uint64_t file_bytes = statistics.planned_file_bytes;
  if (model.inputs != nullptr) {
    host_bytes += model.inputs->plan().host_bytes();
    file_bytes += model.inputs->plan().file_bytes;
  }
  return tiers_text(statistics.planned_reserved_bytes, host_bytes, file_bytes) +
         (model.grid.shape().pipeline_parallel() > 1 ? " on rank 0" : " per rank") + ", as planned";
}

// --- after the last step ---

struct TierBytes {
  std::uint64_t device = 0;
  std::uint64_t host = 0;
  std::uint64_t files = 0;
  std::string text() const { return tiers_text(device, host, files); }
};

// The largest figures of any rank, activations included.
struct MemorySummary {
  TierBytes measured;
  TierBytes planned;
};

MemorySummary summarize(const TrainingReport& report) {
  MemorySummary most;
  for (const RankReport& rank : report.ranks) {
    TierBytes& measured = most.measured;
    measured.device = std::max(measured.device, rank.reserved_bytes);
    measured.host = std::max(measured.host, rank.host_bytes + rank.saved_host_bytes);
    measured.files = std::max(measured.files, rank.file_bytes + rank.saved_file_bytes);
    TierBytes& planned = most.planned;
    planned.device = std::max(planned.device, rank.planned_reserved_bytes);
    planned.host = std::max(planned.host, rank.planned_host_bytes + rank.planned_saved_host_bytes);
    planned.files = std::max(planned.files, rank.planned_file_bytes + rank.planned_saved_file_bytes);
  }
  return most;
}

std::string files_text(const TrainerOptions& options, const TrainingReport& report) {
  std::string text;
  const auto add = [&](const std::string& path) {
    if (!path.empty()) text += (text.empty() ? "" : ", ") + path;
  };
  add(options.save_state);
  if (!report.interrupted) add(options.export_file);
  add(options.timeline_file);
  add(options.report_file);
  return text;
}

}  // namespace

void show_opening(RankModel& model, const Evaluation& evaluation) {
  std::vector<std::string> activations;
  if (model.options.activations == ActivationPlacement::kAuto) {
    activations = model.of_each_stage(
        model.inputs == nullptr ? "keep: the device has room for the inputs of all recomputed blocks"
                                : describe_choice(model.inputs->plan()));
  }
  if (model.rank.place.rank != 0 || !model.options.progress) return;
  std::fprintf(stderr, "forebay-gpt: training a GPT of %s parameters\n",
               grouped(parameter_count(model.options.model)).c_str());
  show_row("model", model_text(model));
  show_row("data", data_text(model));
  show_row("ranks", ranks_text(model));
  show_row("device", device_text(model));
  show_row("sharding", sharding_text(model));
  if (model.grid.shape().pipeline_parallel() > 1) show_row("pipeline", pipeline_text(model));
  show_row("offload", offload_text(model));
  if (!activations.empty()) {
    show_activations(activations);
  } else if (model.options.recompute_every > 0) {
    show_row("activations", "recompute " + recompute_name(model.options) +
                                ", inputs of these blocks: " + activations_name(model.options));
  }
  if (model.options.evaluates()) show_row("evaluation", evaluation_text(model, evaluation));
  if (model.options.generate > 0) {
    show_row("text",
             format_count(model.options.generate, model.options.tokenizer != nullptr ? "token" : "byte") +
                 " to generate, with a pass for each" + pass_text(model));
  }
  show_row("memory", memory_text(model));
}

void show_closing(const TrainerOptions& options, const TrainingReport& report) {
  if (!options.progress) return;
  std::string speed;
  if (!report.loss.empty()) {
    char text[96];
    std::snprintf(text, sizeof text, ", final loss %.4f, %.0f tokens/s", report.loss.back(),
                  report.tokens_per_second);
    speed = text;
  }
  std::fprintf(stderr, "forebay-gpt: trained %s of %s steps%s\n", grouped(report.steps).c_str(),
               grouped(options.steps).c_str(), speed.c_str());
  if (!report.evaluations.empty()) {
    char loss[64];
    std::snprintf(loss, sizeof loss, "loss %.4f after step %llu", report.evaluations.back().loss,
                  static_cast<unsigned long long>(report.evaluations.back().step));
    show_row("evaluation", loss);
  }
  const MemorySummary memory = summarize(report);
  show_row("measured", memory.measured.text() + " at the peak of any rank");
  show_row("planned", memory.planned.text());
  show_row("digest", report.digest);
  const std::string files = files_text(options, report);
  if (!files.empty()) show_row("files", files);
}

void show_generated(std::string_view text) {
  static const bool is_terminal = ::isatty(STDOUT_FILENO) == 1;
  for (const char byte : text) {
    const auto code = static_cast<unsigned char>(byte);
    const bool is_control = (code < 0x20 && byte != '\n' && byte != '\t') || code == 0x7F;
    std::fputc(is_terminal && is_control ? '?' : byte, stdout);
  }
  std::fflush(stdout);
}

}  // namespace forebay::gpt
