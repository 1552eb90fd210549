#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "runtime/command/command_line.h"
#include "runtime/command/report/run_report.h"

namespace forebay {
namespace {

struct ReportOptions {
  std::vector<std::string> files;
  bool json = false;
};

// 1 when the runs cannot be compared or differ: a script can rely on the exit code.
int report(const ReportOptions& options) {
  std::vector<RunReport> runs;
  for (const std::string& file : options.files) runs.push_back(read_run_report(file));
  if (options.json) {
    print_report_json(std::cout, runs);
  } else {
    print_report_table(std::cout, runs);
  }
  std::cout.flush();
  if (!std::cout) {
    throw Error(StatusCode::kIoError, "cannot write the report to standard output; is the disk full?");
  }
  return compare_runs(runs).difference.empty() ? 0 : 1;
}

}  // namespace

void add_report_command(CLI::App& app, Action& action) {
  const auto options = std::make_shared<ReportOptions>();  // Shared by the parser's fields and the action.
  CLI::App* command = app.add_subcommand(
      "report", "Print reports of forebay-gpt as one table, and say whether the results are equal");
  command->add_option("files", options->files, "Files that forebay-gpt wrote with --report")->required();
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &action] { action = [options] { return report(*options); }; });
}

}  // namespace forebay
