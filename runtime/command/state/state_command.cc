#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
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

// A state at step 0 with the weights of another tool.
int import_weights(const StateOptions& options) {
  if (options.from.empty())
    throw Error(StatusCode::kInvalidArgument, "import needs weights; add --from model.safetensors");
  std::error_code error;
  if (std::filesystem::exists(options.directory, error) && !saved_state_names(options.directory).empty()) {
    throw Error(StatusCode::kInvalidArgument, shown_path(options.directory) +
                                                  " holds a saved state already, which import would "
                                                  "replace; give another directory");
  }
  const std::unique_ptr<TensorSource> source = open_safetensors(options.from);
  SavedStateFacts facts;
  facts.weights_only = true;
  facts.trainer_state = "{}";
  std::uint64_t all = 0;
  for (const TensorSource::Tensor& tensor : source->tensors()) {
    if (!tensor.name.starts_with(options.prefix)) continue;
    facts.parameters.push_back({.name = tensor.name.substr(options.prefix.size()),
                                .count = tensor.count,
                                .shape = tensor.shape,
                                .has_shape = !tensor.shape.empty()});
    all += facts.parameters.back().bytes();
  }
  if (facts.parameters.empty()) {
    throw Error(StatusCode::kInvalidArgument, "--from " + options.from + " has no tensor with a name that " +
                                                  "begins with '" + options.prefix +
                                                  "'; give another --prefix, or none");
  }
  TerminalLine line;
  const auto progress = progress_on(line, "importing");
  std::uint64_t done = 0;
  SavedStateWriter state(options.directory, facts);
  for (std::size_t tensor = 0; tensor < source->tensors().size(); ++tensor) {
    if (!source->tensors()[tensor].name.starts_with(options.prefix)) continue;
    source->read(tensor, [&](Span<const float> piece) {
      state.write(piece);
      done += piece.size() * sizeof(float);
      progress(done, all);
    });
  }
  state.finish();
  line.show("");
  const SavedStateReader written(options.directory);
  throw_if_error(write_standard_output(shown_text(written.facts().path) + ": " +
                                       state_size_text(written.facts()) + "\n"));
  return 0;
}

int act(const StateOptions& options) {
  if (options.action != "import" && !(options.from.empty() && options.prefix.empty()))
    throw Error(StatusCode::kInvalidArgument,
                "--from and --prefix are for import, not for " + options.action);
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
      "the fp32 weights as safetensors; import: make a state of weights in safetensors")
      ->required()
      ->check(one_of({"verify", "show", "export", "import"}));
  add_value(*command, "directory", options->directory, "DIR", "The directory that a run saved its state in")
      ->required();
  add_value(*command, "--state", options->name, "NAME",
            "One of several kept states, such as step-000000000040; otherwise the one that a run would load");
  command->add_flag("--json", options->json, "show: print JSON");
  add_value(*command, "--to", options->to, "FILE", "export: the file to write, FILE.safetensors")
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
            "model.safetensors or its index")
      ->group("Import");
  add_value(
      *command, "--prefix", options->prefix, "TEXT",
      "import: only tensors with names that begin so, such as transformer.; it is removed from the names")
      ->group("Import");
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace forebay
