#include "runtime/command/plan/activation_print.h"

#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/text_table.h"

namespace forebay {
namespace {

// The formula stands beside the bytes, or below them if the line would be too long.
std::string line(const std::string& label, std::uint64_t bytes, const std::string& formula = "") {
  const std::string text = format_text("  %-42s %15llu B %11s", label.c_str(),
                                       static_cast<unsigned long long>(bytes), format_bytes(bytes).c_str());
  if (formula.empty()) return text + "\n";
  const bool fits = text.size() + 3 + formula.size() <= kTableWidth;
  return text + (fits ? "   " + formula : "\n      " + wrap_text(formula, kTableWidth, 6)) + "\n";
}

// "16 of 48 keep, 32 partition", in that order.
std::string placements(const ActivationPlan& plan) {
  std::string text;
  for (const ActivationPlacement placement : {ActivationPlacement::kKeep, ActivationPlacement::kPartition,
                                              ActivationPlacement::kPartitionAndSpill}) {
    std::size_t count = 0;
    for (const ActivationSlot& slot : plan.slots) count += slot.placement == placement ? 1 : 0;
    if (count == 0) continue;
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + activation_placement_name(placement);
  }
  return text;
}

std::string share_text(std::uint64_t part, std::uint64_t whole) {
  return format_text("%.1f %%", 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

// The paper recomputes all layers between two saved inputs together.
std::string zero_lines(const ActivationReport& report) {
  const ActivationFormulas& formulas = report.formulas;
  const int every = report.blocks.recompute_every;
  std::string text = "ZeRO's count, with " + format_count(static_cast<std::uint64_t>(every), "layer") +
                     " recomputed at a time:\n";
  text += line("alive meanwhile", formulas.zero_segment, "12hbs e of each layer");
  return text + line("  with the saved inputs, whole", formulas.saved + formulas.zero_segment);
}

// "one layer of every 2 recomputed, 4 of 8; the others keep everything".
std::string recompute_text(const ActivationReport& report) {
  const int every = report.blocks.recompute_every;
  if (every == 0) return "nothing recomputed";
  if (every == 1) return "each layer recomputed";
  return "one layer of every " + std::to_string(every) + " recomputed, " +
         std::to_string(report.formulas.saved_count) + " of " + std::to_string(report.blocks.layers) +
         "; the others keep everything";
}

// Kept activations exist for each micro-batch in flight.
std::string korthikanti_text(const ActivationReport& report) {
  if (report.in_flight == 1 || report.formulas.kept == 0) return "Korthikanti's";
  return "Korthikanti's, kept activations " + std::to_string(report.in_flight) + " times";
}

std::string loss_line(const ActivationReport& report) {
  if (report.formulas.loss == 0) return "";
  return line("alive while the loss is computed", report.formulas.loss, "sbV(e + 8)/t: logits, fp32 copies");
}

std::string plan_lines(const ActivationReport& report) {
  const ActivationPlan& plan = *report.plan;
  const ActivationFormulas& formulas = report.formulas;
  const bool in_files = plan.options.tier == Tier::kFile;
  std::string text = "saved, " + format_count(plan.slots.size(), "input") + " (" + placements(plan) + "):\n";
  text += line("whole", formulas.saved, "sbh e each");
  text += line("partitioned (Pa)", formulas.saved_partitioned, "divided by t");
  text += line("planned: kept on the device", plan.kept_bytes);
  if (plan.staging_bytes > 0) text += line("planned: spilled bytes leave from", plan.staging_bytes);
  if (plan.gathered_bytes > 0) text += line("planned: gathered and fetched into", plan.gathered_bytes);
  if (plan.host_bytes() > 0) {
    text += line(in_files ? "planned: pinned, passed through" : "planned: pinned, on the host",
                 plan.host_bytes());
  }
  if (in_files && plan.file_bytes > 0) text += line("planned: in files", plan.file_bytes);
  if (plan.spilled_bytes_per_micro_batch > 0)
    text += line("planned: down, and up again", plan.spilled_bytes_per_micro_batch, "per micro-step");
  if (const std::uint64_t others = report.blocks.layers - formulas.saved_count; others > 0) {
    text += "kept by the " + format_count(others, "layer") + " that " + (others == 1 ? "is" : "are") +
            " not recomputed:\n";
    text += line("Korthikanti's", formulas.kept);
  }
  text += "alive while one layer is computed again:\n";
  text += line("Korthikanti's", formulas.block);
  text += loss_line(report);
  text += line("= on the device, as planned", report.device_bytes(),
               "planned + " + korthikanti_text(report) +
                   (formulas.loss > formulas.block ? ", the loss in place of a layer" : ""));
  return text + zero_lines(report);
}

// "4 all-reduces of sbh e a layer, 1 a recomputed one, 2 at the ends, each 2(t-1)/t".
std::string all_reduces_text(const ActivationReport& report) {
  const int ends = (report.blocks.has_embedding ? 1 : 0) + (report.blocks.has_output ? 1 : 0);
  std::string text = "4 all-reduces of sbh e a layer";
  if (report.plan) text += ", 1 a recomputed one";
  if (ends > 0) text += ", " + std::to_string(ends) + (ends == 2 ? " at the ends" : " at the end");
  return text + ", each 2(t-1)/t";
}

std::string wire_lines(const ActivationReport& report) {
  const ActivationFormulas& formulas = report.formulas;
  std::string text = "wire per micro-step, received (as much is sent):\n";
  text += line("tensor parallelism", formulas.tensor_parallel_wire, all_reduces_text(report));
  if (!report.plan) return text;
  text += line("  by ZeRO's count", formulas.zero_tensor_parallel_wire, "6 all-reduces a layer");
  text += line(
      "Pa adds, by the formula", formulas.partition_wire,
      "(t-1)/t sbh e a saved input: " + share_text(formulas.partition_wire, formulas.tensor_parallel_wire) +
          ", of ZeRO's count " + share_text(formulas.partition_wire, formulas.zero_tensor_parallel_wire));
  return text + line("planned", report.plan->wire_per_micro_batch.received);
}

std::string stage_text(const ActivationReport& report) {
  const ModelPart& part = report.request.part;
  if (part.pipeline_parallel == 1) return "";
  return " of pipeline stage " + std::to_string(part.pipeline_stage) + " (" +
         format_count(report.blocks.layers, "layer") + ", " +
         format_count(static_cast<std::uint64_t>(report.in_flight), "micro-batch", "micro-batches") +
         " in flight)";
}

}  // namespace

std::string activation_text(const ActivationReport& report) {
  const TransformerBlocks& blocks = report.blocks;
  const ActivationFormulas& formulas = report.formulas;
  std::string text = "\nactivations of one micro-step, per rank" + stage_text(report) + ": " +
                     std::string(data_type_name(report.request.dtype)) +
                     ", t = " + std::to_string(blocks.tensor_parallel) + " tensor-parallel " +
                     (blocks.tensor_parallel == 1 ? "rank, " : "ranks, ");
  text += recompute_text(report) + "\n";
  text += blocks.recompute_every == 0 ? "kept by all layers:\n" : "if nothing were recomputed:\n";
  text += line("ZeRO's count", formulas.zero_all, "12hbsL e");
  const bool scores = blocks.keeps_scores;
  text += line("Korthikanti's", formulas.all, scores ? "sbh(10 + 24/t + 5as/(ht))L" : "sbh(10 + 24/t)L");
  text += line("  with sequence parallelism", formulas.all_sequence_parallel,
               scores ? "sbh(34 + 5as/h)L/t" : "34sbhL/t");
  text += line("  and attention recomputed", formulas.selective, "34sbhL/t");
  text +=
      line("  without scores, masks, as forebay-gpt", formulas.without_scores_and_masks, "sbh e(4 + 12/t)L");
  text += report.plan
              ? plan_lines(report)
              : loss_line(report) + line("= on the device", report.device_bytes(),
                                         korthikanti_text(report) + (formulas.loss == 0 ? "" : " + loss"));
  if (blocks.tensor_parallel > 1) text += wire_lines(report);
  if (report.request.part.pipeline_parallel > 1) {
    text += line("between pipeline stages, sent per micro-step", report.boundary_bytes(),
                 "sbh e forward, and as much back");
  }
  text +=
      "e: bytes of an element; the bracketed terms are those of 2-byte types and of GPT-2's blocks\n"
      "note: ZeRO's count leaves out the attention's scores and the dropout masks (arXiv 1910.02054, 3.2; "
      "Korthikanti et al., arXiv 2205.05198)\n";
  return text;
}

nlohmann::ordered_json activation_json(const ActivationReport& report) {
  using Json = nlohmann::ordered_json;
  const ActivationFormulas& formulas = report.formulas;
  Json json{{"tensor_parallel", report.blocks.tensor_parallel},
            {"layers", report.blocks.layers},
            {"micro_batches", report.in_flight},
            {"recompute_every", report.request.recompute_every},
            {"formulas",
             {{"zero_all", formulas.zero_all},
              {"korthikanti_all", formulas.all},
              {"korthikanti_sequence_parallel", formulas.all_sequence_parallel},
              {"korthikanti_selective", formulas.selective},
              {"without_scores_and_masks", formulas.without_scores_and_masks},
              {"saved_count", formulas.saved_count},
              {"saved", formulas.saved},
              {"saved_partitioned", formulas.saved_partitioned},
              {"korthikanti_kept", formulas.kept},
              {"korthikanti_block", formulas.block},
              {"loss", formulas.loss},
              {"zero_segment", formulas.zero_segment},
              {"tensor_parallel_wire", formulas.tensor_parallel_wire},
              {"zero_tensor_parallel_wire", formulas.zero_tensor_parallel_wire},
              {"partition_wire", formulas.partition_wire}}},
            {"device", report.device_bytes()}};
  if (!report.plan) return json;
  const ActivationPlan& plan = *report.plan;
  json["plan"] = {{"placements", placements(plan)},
                  {"kept", plan.kept_bytes},
                  {"staging", plan.staging_bytes},
                  {"gathered", plan.gathered_bytes},
                  {"device", plan.device_bytes()},
                  {"pinned", plan.host_bytes()},
                  {"files", plan.file_bytes},
                  {"spilled_per_micro_step", plan.spilled_bytes_per_micro_batch},
                  {"wire_received_per_micro_step", plan.wire_per_micro_batch.received},
                  {"wire_sent_per_micro_step", plan.wire_per_micro_batch.sent}};
  return json;
}

}  // namespace forebay
