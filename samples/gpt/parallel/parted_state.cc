#include "parallel/parted_state.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "forebay/error.h"
#include "forebay/text.h"
#include "output/output_file.h"

namespace forebay::gpt {
namespace {

namespace fs = std::filesystem;

std::string parts_file(const std::string& directory) {
  return directory + "/parts";
}

std::string step_name(std::uint64_t step) {
  return "step-" + std::to_string(step);
}

std::string part_directory(Grid& grid, const std::string& directory, const std::string& step) {
  return directory + "/" + step + "/part-" + std::to_string(grid.part());
}

std::string parts_text(const std::string& step, const RankGrid& shape) {
  return step + " tensor-parallel " + std::to_string(shape.tensor_parallel()) + " pipeline-parallel " +
         std::to_string(shape.pipeline_parallel()) + "\n";
}

// Keeps the states of `keep` steps: `newest` and those before it. States of later steps go: they are those of
// a run that was left. Other files stay. Order: once `newest` is complete and named.
void remove_superseded(const std::string& directory, std::uint64_t newest, int keep) {
  std::error_code error;
  std::map<std::uint64_t, fs::path> before;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("step-") || !fs::is_directory(entry.symlink_status())) continue;
    const std::uint64_t step = std::strtoull(name.c_str() + 5, nullptr, 10);
    if (name != step_name(step) || step == newest) continue;
    if (step < newest) {
      before.emplace(step, entry.path());
    } else {
      fs::remove_all(entry.path(), error);
    }
  }
  for (auto oldest = before.begin(); before.size() >= static_cast<std::size_t>(keep);
       oldest = before.erase(oldest))
    fs::remove_all(oldest->second, error);
}

}  // namespace

std::string part_to_save(Grid& grid, const std::string& directory, std::uint64_t step) {
  if (grid.part_count() == 1) return directory;
  const std::string mine = part_directory(grid, directory, step_name(step));
  std::error_code error;
  fs::create_directories(mine, error);
  if (error) {
    throw Error(StatusCode::kIoError, "--save-state: cannot make " + shown_path(mine) + ": " +
                                          error.message() + "; give a directory that may be written");
  }
  return mine;
}

void name_saved_parts(Grid& grid, const std::string& directory, std::uint64_t step, int keep) {
  if (grid.part_count() == 1) return;
  throw_if_error(grid.world().barrier());
  if (grid.world().rank() != 0) return;
  write_file(parts_file(directory), parts_text(step_name(step), grid.shape()));
  remove_superseded(directory, step, keep);
}

std::string saved_part(Grid& grid, const std::string& directory, std::optional<std::uint64_t> wanted) {
  std::error_code error;
  const bool in_parts = fs::exists(parts_file(directory), error);
  const RankGrid& shape = grid.shape();
  if (grid.part_count() == 1 && !in_parts) return directory;
  if (!in_parts) {
    throw Error(StatusCode::kIoError,
                "--load-state: no state in parts is saved in " + shown_path(directory) +
                    " (no file named parts), and this run has --tensor-parallel " +
                    std::to_string(shape.tensor_parallel()) + " and --pipeline-parallel " +
                    std::to_string(shape.pipeline_parallel()) +
                    "; give the directory that a run with the same ones saved in, or weights with --initial");
  }
  std::ifstream file(parts_file(directory));
  std::string step;
  std::getline(file, step, ' ');
  std::ostringstream rest;
  rest << step << ' ' << file.rdbuf();
  if (step.rfind("step-", 0) != 0 || step.find('/') != std::string::npos ||
      !fs::is_directory(directory + "/" + step, error)) {
    throw Error(StatusCode::kCorruption, shown_path(parts_file(directory)) +
                                             " names no saved state; it says \"" + shown_value(step) +
                                             "\"; give another directory with --load-state");
  }
  if (rest.str() != parts_text(step, shape)) {
    throw Error(StatusCode::kInvalidArgument,
                "--load-state " + shown_path(directory) + " was saved in other parts than this run has: " +
                    shown_value(rest.str().substr(0, rest.str().find('\n'))) +
                    "; resume with these, or carry the weights over with --export and --initial");
  }
  if (wanted && !fs::is_directory(directory + "/" + step_name(*wanted), error)) {
    throw Error(StatusCode::kIoError, "--load-step: no state of step " + std::to_string(*wanted) +
                                          " is saved in " + shown_path(directory) + "; the newest is " +
                                          step);
  }
  return part_directory(grid, directory, wanted ? step_name(*wanted) : step);
}

bool holds_state(const std::string& directory) {
  std::error_code error;
  for (const std::string& name : {directory + "/latest", parts_file(directory)}) {
    // A damaged name, such as a link in a loop, counts: there may be states that it should name.
    if (fs::exists(fs::symlink_status(name, error))) return true;
  }
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("step-") && fs::exists(entry.path() / "manifest.json", error)) return true;
  }
  return false;
}

}  // namespace forebay::gpt
