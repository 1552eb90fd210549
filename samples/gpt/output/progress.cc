#include "output/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

namespace forebay::gpt {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kTerminalPeriod{0.1};  // Faster: it flickers.
constexpr Seconds kLinePeriod{2.0};      // For a log: enough to see that the run is alive.

}  // namespace

std::string format_seconds(double seconds) {
  const auto whole = static_cast<std::uint64_t>(seconds + 0.5);
  char text[32];
  if (whole >= 3600) {
    std::snprintf(text, sizeof(text), "%llu h %02llu min", static_cast<unsigned long long>(whole / 3600),
                  static_cast<unsigned long long>(whole / 60 % 60));
  } else if (whole >= 60) {
    std::snprintf(text, sizeof(text), "%llu min %02llu s", static_cast<unsigned long long>(whole / 60),
                  static_cast<unsigned long long>(whole % 60));
  } else {
    std::snprintf(text, sizeof(text), "%llu s", static_cast<unsigned long long>(whole));
  }
  return text;
}

Progress::Progress(const Options& options)
    : options_(options), terminal_(::isatty(STDERR_FILENO) == 1), start_(Clock::now()), shown_(start_) {}

Progress::~Progress() {
  end();
}

void Progress::end() {
  if (line_open_) std::fputc('\n', stderr);
  line_open_ = false;
}

void Progress::show_evaluation(std::uint64_t step, double loss) {
  if (!options_.enabled) return;
  end();
  std::fprintf(stderr, "evaluation after step %llu: loss %.4f\n", static_cast<unsigned long long>(step),
               loss);
}

void Progress::show(std::uint64_t step, double loss, std::optional<double> grad_norm) {
  if (!options_.enabled) return;
  const Clock::time_point now = Clock::now();
  const bool edge = step == options_.first_step + 1 || step == options_.steps;
  if (!edge && now - shown_ < (terminal_ ? kTerminalPeriod : kLinePeriod)) return;
  shown_ = now;

  const double seconds = std::max(Seconds(now - start_).count(), 1e-9);
  const double done = static_cast<double>(step - options_.first_step);
  const double left = static_cast<double>(options_.steps - step) * seconds / done;
  char norm[32] = "skipped";
  if (grad_norm) std::snprintf(norm, sizeof(norm), "%.3f", *grad_norm);
  std::fprintf(
      stderr, "%sstep %llu/%llu  loss %.4f  grad norm %s  %.0f tokens/s  %s left%s", terminal_ ? "\r" : "",
      static_cast<unsigned long long>(step), static_cast<unsigned long long>(options_.steps), loss, norm,
      done * options_.tokens_per_step / seconds, format_seconds(left).c_str(), terminal_ ? "\033[K" : "\n");
  std::fflush(stderr);
  line_open_ = terminal_;
}

}  // namespace forebay::gpt
