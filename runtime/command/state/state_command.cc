#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "forebay/error.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/command_line.h"
#include "runtime/command/state/state_export.h"
#include "runtime/command/state/state_print.h"
#include "runtime/command/state/tensor_source.h"
#include "runtime/command/terminal_line.h"

namespace forebay {
namespace {

struct StateOptions {
  std::string action;
  std::string directory;
  std::string name;
  bool json = false;
  std::string to;
  std::string dtype = "fp32";
  std::string max_shard_size;
  bool average = false;
  std::string from;
  std::string prefix;
  std::vector<std::string> leave_out;
  bool weights_only = false;
  std::string optimizer;
};

// "verifying step-000000000040: 34 % of 1.2 GiB".
std::function<void(std::uint64_t, std::uint64_t)> progress_on(TerminalLine& line, const std::string& work) {
  return [&line, work](std::uint64_t done, std::uint64_t all) {
    if (!line.due()) return;
    const double share = all == 0 ? 100.0 : 100.0 * static_cast<double>(done) / static_cast<double>(all);
    line.show(work + format_text(": %.0f %% of ", share) + format_bytes(all));
  };
}

int show(const StateOptions& options) {
  const SavedStateReader state(options.directory, options.name);
  const std::vector<std::string> names = saved_state_names(options.directory);
  throw_if_error(write_standard_output(options.json ? state_json(state.facts(), names)
                                                    : state_text(state.facts(), names)));
  return 0;
}

// The state that would be loaded comes first, so that its damage is told as loading would tell it.
int verify(const StateOptions& options) {
  const auto last_part = [](const std::string& path) { return path.substr(path.rfind('/') + 1); };
  std::vector<std::string> names;
  if (!options.name.empty()) {
    names = {options.name};
  } else {
    names = saved_state_names(options.directory);
    if (names.empty()) SavedStateReader(options.directory);  // Throws, and says why there is none.
  }
  int exit_code = 0;
  for (const std::string& name : names) {
    try {
      TerminalLine line;
      SavedStateReader state(options.directory, name);
      state.verify(progress_on(line, "verifying " + name));
      line.show("");
      throw_if_error(write_standard_output(shown_text(state.facts().path) +
                                           " is whole: " + state_size_text(state.facts()) + "\n"));
    } catch (const Error& error) {
      const std::vector<std::string> left = saved_state_names(options.directory);
      if (options.name.empty() && std::find(left.begin(), left.end(), name) == left.end()) {
        throw_if_error(write_standard_output(name + " was removed meanwhile, by the job that saves here\n"));
        continue;
      }
      if (error.code() != StatusCode::kCorruption && error.code() != StatusCode::kUnsupported &&
          names.size() == 1)
        throw;
      exit_code = complain("forebay state verify", error.status().message(), kFailed);
    }
  }
  if (options.name.empty()) {
    // The file `latest` too.
    const std::string loaded = last_part(SavedStateReader(options.directory).facts().path);
    throw_if_error(write_standard_output("to load: " + loaded + "\n"));
  }
  return exit_code;
}

int export_weights(const StateOptions& options) {
  if (options.to.empty())
    throw Error(StatusCode::kInvalidArgument, "export needs a file to write; add --to model.safetensors");
  StateExport wanted{.to = options.to};
  for (const DataType type : {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16}) {
    if (options.dtype == data_type_name(type)) wanted.dtype = type;
  }
  if (!options.max_shard_size.empty()) {
    std::uint64_t bytes = 0;
    if (!parse_bytes(options.max_shard_size.c_str(), &bytes) || bytes == 0) {
      throw Error(StatusCode::kInvalidArgument, "--max-shard-size is '" + options.max_shard_size +
                                                    "'; give a size, " + kBytesSyntax + ", or leave it out");
    }
    wanted.max_shard_bytes = bytes;
  }
  SavedStateReader state(options.directory, options.name);
  const std::vector<SavedParameter>& parameters = state.facts().parameters;
  wanted.average = options.average;
  if (options.average && std::none_of(parameters.begin(), parameters.end(),
                                      [](const SavedParameter& one) { return one.has_average; })) {
    throw Error(
        StatusCode::kInvalidArgument,
        "--average: the state " + shown_text(state.facts().path) +
            " has no moving average of the weights; it is of a run without --ema, so leave --average out");
  }
  TerminalLine line;
  const std::vector<std::string> paths = export_state(state, wanted, progress_on(line, "exporting"));
  line.show("");
  std::string text;
  for (const std::string& path : paths) text += shown_text(path) + "\n";
  throw_if_error(write_standard_output(text));
  std::size_t flat = 0;
  for (const SavedParameter& parameter : state.facts().parameters) flat += parameter.has_shape ? 0 : 1;
  if (flat > 0) {
    complain("forebay state export",
             "note: the shapes of " + format_count(flat, "parameter") +
                 " were not saved (Engine::declare_shape), so these tensors have one dimension",
             0);
  }
  return 0;
}

std::unique_ptr<TensorSource> open_source(const StateOptions& options) {
  if (is_distributed(options.from)) return open_distributed(options.from, options.weights_only);
  if (is_deepspeed(options.from)) return open_deepspeed(options.from, options.weights_only);
  return open_safetensors(options.from);
}

// The beginning of the names of the tensors to import.
std::string prefix_of(const TensorSource& source, const StateOptions& options) {
  const std::vector<std::string> found = source.prefixes();
  if (!options.prefix.empty() || found.empty()) return options.prefix;
  if (found.size() == 1) return found.front();
  std::string text;
  for (const std::string& prefix : found)
    text += (text.empty() ? "" : ", ") + (prefix.empty() ? "names without one" : shown_value(prefix));
  throw Error(
      StatusCode::kInvalidArgument,
      "--from " + options.from + " has weights under several prefixes; give one as --prefix: " + text);
}

void refuse_saved_state(const std::string& directory) {
  std::error_code error;
  if (!std::filesystem::exists(directory, error) || saved_state_names(directory).empty()) return;
  throw Error(StatusCode::kInvalidArgument,
              shown_path(directory) +
                  " holds a saved state already, which import would replace; give another directory");
}

// Errors: throws kInvalidArgument where an import would replace files of another tool.
void refuse_source(const StateOptions& options) {
  namespace fs = std::filesystem;
  std::error_code error;
  // A distributed checkpoint may be given by its file.
  const fs::path given = options.from;
  const fs::path source = given.filename() == ".metadata" ? given.parent_path() / "." : given;
  if (fs::equivalent(source, options.directory, error)) {
    throw Error(StatusCode::kInvalidArgument,
                shown_path(options.directory) +
                    " is the directory that the weights come from; give the state another directory");
  }
  const std::string latest = options.directory + "/latest";
  if (fs::exists(fs::symlink_status(latest, error))) {
    throw Error(StatusCode::kInvalidArgument,
                shown_path(latest) +
                    " is there, which import would replace, and it names no saved state; "
                    "give another directory");
  }
}

// Whether the pattern, in which `*` stands for any characters and nothing else is special, is the whole name.
bool matches(std::string_view pattern, std::string_view name) {
  std::size_t p = 0, n = 0;
  std::size_t star = std::string_view::npos;  // The last one in the pattern,
  std::size_t after = 0;                      // and the end of the part of the name that it stands for.
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      after = n;
    } else if (p < pattern.size() && pattern[p] == name[n]) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++after;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

// A state with the tensors of another tool: its masters, and m, v and step where it has them.
class Import {
 public:
  Import(TensorSource& source, const StateOptions& options)
      : source_(source), prefix_(prefix_of(source, options)), weights_only_(options.weights_only) {
    facts_.weights_only = true;
    facts_.trainer_state = "{}";
    for (const std::string& pattern : options.leave_out) not_wanted_.emplace(pattern, 0);
    for (std::size_t i = 0; i < source.tensors().size(); ++i) add(i);
    for (const auto& [pattern, count] : not_wanted_) {
      if (count > 0) continue;
      throw Error(
          StatusCode::kInvalidArgument,
          "--leave-out " + shown_value(pattern) + " is the name of no tensor; `*` stands for any characters");
    }
    if (facts_.parameters.empty()) {
      throw Error(StatusCode::kInvalidArgument, "--from " + options.from +
                                                    " has no tensor with a name that " + "begins with '" +
                                                    prefix_ + "'; give another --prefix, or none");
    }
    if (facts_.weights_only) return;
    leave_out_second_names();
    facts_.attempted_steps = source.steps().attempted;
    facts_.applied_steps = source.steps().applied;
    facts_.optimizer = source.optimizer();
    if (options.optimizer.empty() || options.optimizer == facts_.optimizer) return;
    if (facts_.optimizer != "adamw" || options.optimizer != "adam") {
      throw Error(StatusCode::kInvalidArgument, "--optimizer " + options.optimizer +
                                                    ": the moments are those of " + facts_.optimizer +
                                                    "; give that, or --weights-only");
    }
    facts_.optimizer = options.optimizer;
  }

  void write(const std::string& directory,
             const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
    std::uint64_t done = 0;
    SavedStateWriter state(directory, facts_);
    refuse_saved_state(directory);  // Again, now that nobody else writes there.
    for (std::size_t p = 0; p < numbers_.size(); ++p) {
      const SavedParameter& parameter = facts_.parameters[p];
      for (const SavedField field : {SavedField::kMaster, SavedField::kM, SavedField::kV}) {
        if (field == SavedField::kM && !parameter.has_m) continue;
        if (field == SavedField::kV && !parameter.has_v) continue;
        source_.read(numbers_[p], field, [&](Span<const float> piece) {
          state.write(piece);
          if (field == SavedField::kMaster) count_bad_values(piece, parameter.name);
          done += piece.size() * sizeof(float);
          progress(done, bytes_);
        });
      }
    }
    state.finish();
  }

  // Matrices without moments that have the bits of one with them: a tied parameter's other name, as in
  // distributed checkpoints of PyTorch.
  const std::vector<std::string>& second_names() const { return second_names_; }
  // Weights that are NaN or infinite, and the parameter of the first.
  std::uint64_t bad_values() const { return bad_values_; }
  const std::string& first_bad() const { return first_bad_; }

 private:
  void leave_out_second_names() {
    std::map<std::size_t, std::uint64_t> known;
    const auto hash_of = [&](std::size_t p) {
      const auto [place, is_new] = known.try_emplace(p);
      if (is_new) {
        XXH3_state_t hash;
        XXH3_64bits_reset(&hash);
        source_.read(numbers_[p], SavedField::kMaster, [&](Span<const float> piece) {
          XXH3_64bits_update(&hash, piece.data(), piece.size_bytes());
        });
        place->second = XXH3_64bits_digest(&hash);
      }
      return place->second;
    };
    std::vector<bool> is_second(numbers_.size(), false);
    for (std::size_t p = 0; p < numbers_.size(); ++p) {
      const SavedParameter& one = facts_.parameters[p];
      if (one.has_m || one.has_v || one.shape.size() < 2) continue;
      for (std::size_t q = 0; q < numbers_.size() && !is_second[p]; ++q) {
        const SavedParameter& other = facts_.parameters[q];
        is_second[p] = (other.has_m || other.has_v) && other.shape == one.shape && hash_of(p) == hash_of(q);
      }
    }
    for (std::size_t p = numbers_.size(); p-- > 0;) {
      if (!is_second[p]) continue;
      const auto at = static_cast<std::ptrdiff_t>(p);
      second_names_.insert(second_names_.begin(), facts_.parameters[p].name);
      bytes_ -= facts_.parameters[p].bytes();
      facts_.parameters.erase(facts_.parameters.begin() + at);
      numbers_.erase(numbers_.begin() + at);
    }
  }

  void count_bad_values(Span<const float> piece, const std::string& name) {
    const auto bad = std::count_if(piece.begin(), piece.end(), [](float x) { return !std::isfinite(x); });
    if (bad > 0 && bad_values_ == 0) first_bad_ = name;
    bad_values_ += static_cast<std::uint64_t>(bad);
  }

  void add(std::size_t number) {
    const TensorSource::Tensor& tensor = source_.tensors()[number];
    if (!tensor.name.starts_with(prefix_)) return;
    const std::string name = tensor.name.substr(prefix_.size());
    bool is_wanted = true;
    for (auto& [pattern, count] : not_wanted_) {
      if (!matches(pattern, name)) continue;
      ++count;
      is_wanted = false;
    }
    if (!is_wanted) return;
    SavedParameter parameter{.name = name,
                             .count = tensor.count,
                             .shape = tensor.shape,
                             .has_shape = !tensor.shape.empty() || tensor.count == 1,
                             .frozen = tensor.frozen && !weights_only_,
                             .has_m = tensor.has_m && !weights_only_,
                             .has_v = tensor.has_v && !weights_only_};
    if (parameter.has_m || parameter.has_v) facts_.weights_only = false;
    bytes_ += parameter.bytes();
    facts_.parameters.push_back(std::move(parameter));
    numbers_.push_back(number);
  }

  TensorSource& source_;
  const std::string prefix_;
  const bool weights_only_;
  std::map<std::string, std::size_t> not_wanted_;  // --leave-out, and the tensors that each matches.
  SavedStateFacts facts_;
  std::vector<std::string> second_names_;
  std::vector<std::size_t> numbers_;  // In the source, by parameter.
  std::uint64_t bytes_ = 0;
  std::uint64_t bad_values_ = 0;
  std::string first_bad_;
};

void note_left_out(const std::vector<std::string>& names, const std::string& kind) {
  if (names.empty()) return;
  const bool is_one = names.size() == 1;
  complain("forebay state import",
           "note: " + format_count(names.size(), "tensor") + " " + kind + (is_one ? " is" : " are") +
               " left out, " + shown_value(names.front()) + (is_one ? "" : " first"),
           0);
}

int import_weights(const StateOptions& options) {
  if (options.from.empty())
    throw Error(StatusCode::kInvalidArgument, "import needs weights; add --from model.safetensors");
  refuse_saved_state(options.directory);
  refuse_source(options);
  const std::unique_ptr<TensorSource> source = open_source(options);
  Import import(*source, options);
  note_left_out(source->left_out(), "of other types than fp32, bf16 and fp16");
  note_left_out(source->without_elements(), "without elements");
  note_left_out(import.second_names(), "with the bits of another, as a tied parameter's second name,");
  TerminalLine line;
  import.write(options.directory, progress_on(line, "importing"));
  line.show("");
  if (import.bad_values() > 0) {
    complain("forebay state import",
             "note: " + format_count(import.bad_values(), "weight") + " " +
                 (import.bad_values() == 1 ? "is" : "are") + " NaN or infinite, the first in " +
                 shown_value(import.first_bad()),
             0);
  }
  const SavedStateReader written(options.directory);
  throw_if_error(write_standard_output(shown_text(written.facts().path) + ": " +
                                       state_size_text(written.facts()) + "\n"));
  return 0;
}

int act(const StateOptions& options) {
  const bool has_import = !options.from.empty() || !options.prefix.empty() || !options.leave_out.empty() ||
                          !options.optimizer.empty() || options.weights_only;
  if (options.action != "import" && has_import) {
    throw Error(StatusCode::kInvalidArgument,
                "--from, --prefix, --leave-out, --optimizer and --weights-only are for import, not for " +
                    options.action);
  }
  if (options.action != "export" && !options.to.empty())
    throw Error(StatusCode::kInvalidArgument, "--to is for export, not for " + options.action);
  if (options.action != "show" && options.json)
    throw Error(StatusCode::kInvalidArgument, "--json is for show, not for " + options.action);
  if (options.action == "show") return show(options);
  if (options.action == "import") return import_weights(options);
  return options.action == "verify" ? verify(options) : export_weights(options);
}

int run(const StateOptions& options) {
  try {
    return act(options);
  } catch (const Error& error) {
    if (error.code() != StatusCode::kInvalidArgument) throw;
    return complain("forebay state " + options.action, error.status().message(), kBadUsage);
  }
}

}  // namespace

void add_state_command(CLI::App& app, Action& action) {
  const auto options = std::make_shared<StateOptions>();  // Shared by the parser's fields and the action.
  CLI::App* const command =
      app.add_subcommand("state", "Verify, show, export or import training state in a directory");
  const auto one_of = [](std::vector<std::string> words) {
    return [words](const std::string& given) {
      std::string all;
      for (const std::string& word : words) {
        if (word == given) return std::string();
        all += (all.empty() ? "" : ", ") + word;
      }
      return "'" + given + "' was given; use one of " + all;
    };
  };
  add_value(
      *command, "action", options->action, "verify|show|export|import",
      "verify: read all of every state and compare checksums; show: the contents of a state; export: write "
      "the fp32 weights as safetensors; import: make a state of another tool's weights and moments")
      ->required()
      ->check(one_of({"verify", "show", "export", "import"}));
  add_value(*command, "directory", options->directory, "DIR", "The directory that a run saved its state in")
      ->required();
  add_value(*command, "--state", options->name, "NAME",
            "One of several kept states, such as step-000000000040; otherwise the one that a run would load");
  command->add_flag("--json", options->json, "show: print JSON");
  add_value(*command, "--to", options->to, "FILE",
            "export: the file to write, FILE.safetensors. Only an earlier export is overwritten")
      ->group("Export");
  add_value(*command, "--dtype", options->dtype, "fp32|bf16|fp16", "export: the type of the tensors")
      ->capture_default_str()
      ->check(one_of({"fp32", "bf16", "fp16"}))
      ->group("Export");
  add_value(*command, "--max-shard-size", options->max_shard_size, "BYTES",
            "export: several files of at most so many bytes, and an index as Hugging Face writes it")
      ->group("Export");
  command
      ->add_flag("--average", options->average,
                 "export: the moving average of the weights, from a run with --ema")
      ->group("Export");
  add_value(*command, "--from", options->from, "PATH",
            "import: a .safetensors file, its index (.safetensors.index.json), or a directory with "
            "model.safetensors or its index; a checkpoint of DeepSpeed, ZeRO stages 1 to 3; a distributed "
            "checkpoint of PyTorch")
      ->group("Import");
  add_value(
      *command, "--prefix", options->prefix, "TEXT",
      "import: only tensors with names that begin so, such as transformer.; it is removed from the names")
      ->group("Import");
  command
      ->add_option(
          "--leave-out", options->leave_out,
          "import: no tensors with this name, such as '*.running_mean'; `*` stands for any characters. "
          "Once for each name")
      ->type_name("NAME")
      ->allow_extra_args(false)
      ->group("Import");
  command
      ->add_flag("--weights-only", options->weights_only,
                 "import: no moments, so that an engine with any optimizer begins at step 0")
      ->group("Import");
  add_value(
      *command, "--optimizer", options->optimizer, "NAME",
      "import: the optimizer of the moments, adamw or adam, whose moments look alike; adamw unless given")
      ->check(one_of({"adamw", "adam", "sgd", "lion"}))
      ->group("Import");
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace forebay
