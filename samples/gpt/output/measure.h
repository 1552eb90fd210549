// The measurements of a run, taken during its steps and put into its report.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "output/report.h"
#include "trainer/evaluation.h"
#include "trainer/rank_model.h"

namespace forebay::gpt {

// The time of each step, and the file bytes of all steps. The engine counts every file byte, so the caller
// pauses the meter while it saves.
class StepMeter {
 public:
  explicit StepMeter(RankModel& model) : model_(model) {}

  void begin_step() { step_start_ = Clock::now(); }
  void end_step();
  // File bytes count between resume() and pause(). A second resume() forgets those since the first.
  void resume() { begin_ = file_bytes(); }
  void pause();

  std::size_t step_count() const { return step_ms_.size(); }
  // The means leave out the first step of several, which meets cold caches and new pages.
  double mean_step_ms() const;
  double read_bytes_per_step() const { return per_metered_step(sum_.read); }
  double written_bytes_per_step() const { return per_metered_step(sum_.written); }

 private:
  using Clock = std::chrono::steady_clock;
  struct FileCount {
    std::uint64_t read = 0;
    std::uint64_t written = 0;
  };
  FileCount file_bytes();
  double per_metered_step(std::uint64_t bytes) const;

  RankModel& model_;
  Clock::time_point step_start_;
  std::vector<double> step_ms_;
  FileCount begin_;
  FileCount sum_;
};

// Fills in everything but losses, norms and generated text. Collective over all ranks; every rank gets the
// same report. `most_passes_in_flight`: see RankReport.
void fill_report(RankModel& model, const StepMeter& meter, const Evaluation& evaluation,
                 std::uint64_t most_passes_in_flight, TrainingReport& report);

}  // namespace forebay::gpt
