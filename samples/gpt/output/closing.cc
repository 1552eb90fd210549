#include "output/closing.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>

#include "forebay/units.h"
#include "output/rows.h"

namespace forebay::gpt {
namespace {

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
  const MemorySummary memory = summarize(report);
  show_row("measured", memory.measured.text() + " at the peak of any rank");
  show_row("planned", memory.planned.text());
  show_row("digest", report.digest);
  const std::string files = files_text(options, report);
  if (!files.empty()) show_row("files", files);
}

}  // namespace forebay::gpt
