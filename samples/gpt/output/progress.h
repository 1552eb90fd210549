// The progress of a training on stderr: one line that refreshes on a terminal, a line every two seconds
// elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace forebay::gpt {

// "2 h 05 min", "5 min 07 s", "7 s".
std::string format_seconds(double seconds);

class Progress {
 public:
  struct Options {
    bool enabled = true;
    std::uint64_t first_step = 0;
    std::uint64_t steps = 0;     // The last step of the run.
    double tokens_per_step = 0;  // Over all ranks.
  };

  explicit Progress(const Options& options);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // After step number `step`, counted from 1.
  void show(std::uint64_t step, double loss, std::optional<double> grad_norm);
  // The loss of the evaluation text after that step, on a line of its own.
  void show_evaluation(std::uint64_t step, double loss);
  // Ends the open line, so that other text may follow.
  void end();

 private:
  using Clock = std::chrono::steady_clock;

  const Options options_;
  const bool terminal_;
  const Clock::time_point start_;
  Clock::time_point shown_;
  bool line_open_ = false;
};

}  // namespace forebay::gpt
