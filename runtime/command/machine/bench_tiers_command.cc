#include <algorithm>
#include <charconv>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "forebay/bootstrap.h"
#include "forebay/cuda_backend.h"
#include "forebay/host_backend.h"
#include "forebay/sharding_arguments.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/command_line.h"
#include "runtime/command/host_limits.h"
#include "runtime/command/machine/bench_tiers_print.h"
#include "runtime/command/machine/machine_description.h"
#include "runtime/command/machine/offload_choice.h"
#include "runtime/command/machine/tier_measurement.h"
#include "runtime/command/plan/model_arguments.h"
#include "runtime/command/run/output_file.h"
#include "runtime/command/terminal_line.h"

namespace forebay {
namespace {

// Smaller, and a measurement is one of caches. One block of the largest kind must be in it.
constexpr std::uint64_t kBytesMin = 4u << 20;

struct BenchArguments {
  std::vector<std::string> directories;
  std::string device = "host";
  std::string bytes = "256MiB";
  double seconds = 12;
  bool json = false;
  std::string save;
  std::vector<std::string> runs;
  std::string link = "shm";

  const CLI::Option* link_option = nullptr;
  const CLI::Option* ranks_option = nullptr;
  ModelArguments model;
  std::int64_t ranks = 1;
  std::int64_t host_ranks = 0;
  ShardingArguments<CLI::App> sharding;
  std::string device_budget;

  const CLI::Option* host_ranks_option = nullptr;
  std::vector<const CLI::Option*> plan_options;  // Options that need a model.
};

struct Device {
  std::unique_ptr<Backend> backend;
  std::vector<int> nodes;  // Nearest; empty: unknown.
  bool in_host = false;
};

Result<Device> open_device(const std::string& word, const Topology& topology) {
  Device device;
  if (word == "host") {
    HostBackendOptions options;
    options.poison = false;
    FOREBAY_ASSIGN_OR_RETURN(device.backend, HostBackend::create(options));
    device.in_host = true;
    return device;
  }
  CudaBackendOptions options;
  if (word != "cuda") {
    const std::string prefix = "cuda:";
    const char* const end = word.data() + word.size();
    const auto parsed = word.starts_with(prefix)
                            ? std::from_chars(word.data() + prefix.size(), end, options.ordinal)
                            : std::from_chars_result{nullptr, std::errc::invalid_argument};
    if (parsed.ec != std::errc() || parsed.ptr != end || options.ordinal < 0) {
      return refuse("--device is '" + word + "'; use host, cuda or cuda:N (N counts GPUs from 0)");
    }
  }
  FOREBAY_ASSIGN_OR_RETURN(device.backend, CudaBackend::create(options));
  const int node = device.backend->capabilities().numa_node;
  if (topology.find_node(node) != nullptr) device.nodes = {node};
  return device;
}

// The smallest of the host's limits; a limit that is not known does not bind.
std::uint64_t host_memory_limit() {
  std::uint64_t least = ~std::uint64_t{0};
  for (const HostLimit& limit : read_host_limits()) {
    least = std::min(least, limit.bytes);
  }
  return least;
}

// Everything of the model but the choice. None when no model was given.
Result<std::optional<BenchedModel>> read_benched_model(const BenchArguments& arguments, const Device& device,
                                                       std::uint64_t file_bytes, ModelShape* shape) {
  const bool has_model = arguments.model.has_config() || arguments.model.has_shape();
  if (!has_model) {
    for (const CLI::Option* option : arguments.plan_options) {
      if (option->get_name() == "--ranks" && !arguments.save.empty()) continue;
      if (option->count() > 0) {
        return refuse(option->get_name() +
                      " says how a model would run, and none was given; add its shape (--layers --hidden "
                      "--heads --sequence --vocabulary) or --config");
      }
    }
    return std::optional<BenchedModel>();
  }
  BenchedModel model;
  FOREBAY_ASSIGN_OR_RETURN(const ModelChoice read, read_model(arguments.model));
  model.description = describe_model(read);
  FOREBAY_RETURN_IF_ERROR(read_positive("ranks", arguments.ranks, 1'000'000, &model.options.ranks));
  FOREBAY_RETURN_IF_ERROR(arguments.sharding.read(model.options));
  if (!arguments.device_budget.empty())
    FOREBAY_RETURN_IF_ERROR(
        read_bytes("device-budget", arguments.device_budget, &model.options.memory_bytes));
  model.limits.host_ranks = static_cast<std::uint64_t>(arguments.ranks);
  if (given(arguments.host_ranks_option)) {
    FOREBAY_RETURN_IF_ERROR(
        read_positive("host-ranks", arguments.host_ranks, arguments.ranks, &model.limits.host_ranks));
  }

  const Capabilities& facts = device.backend->capabilities();
  model.options.chunk_bytes = facts.granularity;
  if (model.options.memory_bytes != 0) {
    model.limits.device_bytes = model.options.memory_bytes;
  } else if (device.in_host) {
    return refuse(
        "--memory was not given, and a device in the host's memory has no size of its own; add --memory, the "
        "device memory of a rank");
  } else {
    model.limits.device_bytes = facts.memory_bytes;
  }
  model.limits.device_in_host = device.in_host;
  model.limits.host_bytes = host_memory_limit();
  model.limits.file_bytes = file_bytes;

  FOREBAY_ASSIGN_OR_RETURN(*shape, make_model_shape(read.shape));
  model.parameters = shape->parameter_count();
  FOREBAY_ASSIGN_OR_RETURN(
      shape->activation_bytes,
      estimate_activation_bytes(
          read.shape, {.batch = read.batch, .sequence = read.sequence, .dtype = model.options.dtype}));
  return std::optional<BenchedModel>(std::move(model));
}

// Checked before the measurements, because fitting does not depend on them.
Status check_something_fits(const ModelShape& shape, const BenchedModel& model) {
  FOREBAY_ASSIGN_OR_RETURN(const OffloadChoice choice,
                           choose_offload(shape, model.options, model.limits, {}));
  if (choice.chosen >= 0) return Status();
  return Status(StatusCode::kOutOfMemory, "no offload setting fits: " + choice.reason);
}

// How the time is divided. Files have most points.
constexpr double kCopyPart = 0.15;
constexpr double kHostPart = 0.2;
constexpr double kFilePart = 0.65;
// With --save, in addition.
constexpr double kRankPart = 0.5;

std::chrono::nanoseconds part_of(double seconds, double part) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds * part));
}

// The runs of --run, and all that --save needs.
Result<std::vector<MeasuredRun>> read_runs(const BenchArguments& arguments) {
  if (arguments.device != "host")
    return refuse(
        "--save describes --device host only; for GPUs copy an installed description, such as "
        "share/forebay/machines/dgx-h100.json, and put your figures in");
  if (arguments.runs.empty()) {
    return refuse(
        "--save needs the speed of a trainer, and no --run was given; train one rank by forebay-gpt "
        "--ranks 1 --report FILE, for as many copies at the same time as --ranks, and add --run FILE");
  }
  if (arguments.link != "shm" && arguments.link != "tcp")
    return refuse("--link is '" + arguments.link + "'; use shm or tcp");
  std::vector<MeasuredRun> runs;
  for (const std::string& path : arguments.runs) {
    FOREBAY_ASSIGN_OR_RETURN(runs.emplace_back(), read_measured_run(path));
  }
  return runs;
}

// `launched`: null if this process starts the ranks itself.
Result<MachineFigures> measure_machine(const BenchArguments& arguments, const std::vector<MeasuredRun>& runs,
                                       const Topology& topology, std::uint64_t bytes,
                                       LaunchedRanks* launched) {
  constexpr int kHostRanksMax = 256;
  MachineFigures machine;
  int ranks = 1;
  if (launched == nullptr)
    FOREBAY_RETURN_IF_ERROR(read_positive("ranks", arguments.ranks, kHostRanksMax, &ranks));
  machine.host_memory_bytes = host_memory_limit();
  std::size_t cores = 0;
  for (const NumaNode& node : topology.nodes) cores += node.cores.size();
  machine.processors = static_cast<int>(std::max<std::size_t>(cores, 1));
  if (topology.processor_quota)
    machine.processors = std::clamp(static_cast<int>(*topology.processor_quota), 1, machine.processors);
  const RankRequest request{.dtype = runs.front().request.options.dtype,
                            .bytes = std::max(bytes / static_cast<std::uint64_t>(arguments.ranks), kBytesMin),
                            .duration = part_of(arguments.seconds, kRankPart)};
  if (launched != nullptr) {
    machine.link = launched->link();
    FOREBAY_ASSIGN_OR_RETURN(machine.rank, launched->measure(request));
  } else {
    machine.link = arguments.link == "shm" ? LinkKind::kShm : LinkKind::kGloo;
    FOREBAY_ASSIGN_OR_RETURN(machine.rank, measure_ranks(ranks, machine.link, request));
  }
  return machine;
}

// The file of --save, whose directory is made. Errors: also kInvalidArgument if it cannot be written.
Result<std::string> file_to_save(const std::string& name) {
  std::string path = name;
  if (name == "this") {
    FOREBAY_ASSIGN_OR_RETURN(path, this_machine_path());
  }
  std::error_code error;
  const std::filesystem::path directory = std::filesystem::path(path).parent_path();
  if (name == "this" && !directory.empty()) std::filesystem::create_directories(directory, error);
  FOREBAY_RETURN_IF_ERROR(check_run_file("--save", path, kMachineBeginning));
  return path;
}

Result<BenchTiersReport> bench(const BenchArguments& arguments, LaunchedRanks* launched) {
  BenchTiersReport report;
  FOREBAY_RETURN_IF_ERROR(read_bytes("bytes", arguments.bytes, &report.bytes));
  if (report.bytes < kBytesMin) {
    return refuse("--bytes is " + format_bytes(report.bytes) + "; use at least " + format_bytes(kBytesMin));
  }
  report.bytes = report.bytes / kBytesMin * kBytesMin;
  constexpr double kSecondsMax = 3600;
  if (!(arguments.seconds > 0 && arguments.seconds <= kSecondsMax)) {
    return refuse(
        format_text("--seconds is %g; use more than 0 and at most %g", arguments.seconds, kSecondsMax));
  }
  if (arguments.save.empty() && (!arguments.runs.empty() || given(arguments.link_option)))
    return refuse("--run and --link describe the machine that --save writes; add --save, or leave them out");

  // All that can be refused is, before anything is measured.
  const Topology topology = read_topology();
  report.topology_source = topology.source;
  for (const std::string& directory : arguments.directories) {
    FOREBAY_ASSIGN_OR_RETURN(report.files.emplace_back(), prepare_files(topology, {directory}, report.bytes));
  }
  if (arguments.directories.size() > 1) {
    FOREBAY_ASSIGN_OR_RETURN(report.files.emplace_back(),
                             prepare_files(topology, arguments.directories, report.bytes));
  }
  TerminalLine line;
  std::optional<MachineFigures> machine;
  std::vector<MeasuredRun> runs;
  std::string saved_path;
  if (!arguments.save.empty()) {
    FOREBAY_ASSIGN_OR_RETURN(saved_path, file_to_save(arguments.save));
    FOREBAY_ASSIGN_OR_RETURN(runs, read_runs(arguments));
    line.show("measuring ranks at the same time");
    // Forks, so it comes before the threads of a backend.
    FOREBAY_ASSIGN_OR_RETURN(machine, measure_machine(arguments, runs, topology, report.bytes, launched));
    report.ranks = machine->rank;
    report.ranks_link = machine->link;
  }
  FOREBAY_ASSIGN_OR_RETURN(const Device device, open_device(arguments.device, topology));
  report.device = device.backend->capabilities().name;
  report.device_in_host = device.in_host;
  report.placement = place(topology, {.nodes = device.nodes});
  ModelShape shape;
  FOREBAY_ASSIGN_OR_RETURN(report.model,
                           read_benched_model(arguments, device, report.files.back().free_bytes, &shape));
  if (report.model) FOREBAY_RETURN_IF_ERROR(check_something_fits(shape, *report.model));

  const Progress progress = [&](const std::string& what) { line.show("measuring " + what); };
  FOREBAY_ASSIGN_OR_RETURN(report.copies, measure_copies(*device.backend, report.placement, report.bytes,
                                                         part_of(arguments.seconds, kCopyPart), progress));
  const DataType dtype = report.model ? report.model->options.dtype : DataType::kBfloat16;
  FOREBAY_ASSIGN_OR_RETURN(report.host, measure_host(*device.backend, topology, dtype, report.bytes,
                                                     part_of(arguments.seconds, kHostPart), progress));
  for (FileMeasurement& files : report.files) {
    const double part = kFilePart / static_cast<double>(report.files.size());
    FOREBAY_RETURN_IF_ERROR(measure_files(report.bytes, part_of(arguments.seconds, part), progress, &files));
  }

  if (machine) {
    const StoreMeasurementPoint& chosen = report.files.back().store.chosen;
    machine->drive_read_bytes_per_second = chosen.read_bytes_per_second;
    machine->drive_write_bytes_per_second = chosen.write_bytes_per_second;
    FOREBAY_ASSIGN_OR_RETURN(const std::string description, describe_machine(*machine, runs));
    FOREBAY_RETURN_IF_ERROR(write_run_text(saved_path, description));
  }
  if (report.model) {
    const StoreMeasurementPoint& chosen = report.files.back().store.chosen;
    const TierRates rates{.to_device_bytes_per_second = report.copies.to_device_bytes_per_second,
                          .from_device_bytes_per_second = report.copies.from_device_bytes_per_second,
                          .both_bytes_per_second = report.copies.both_bytes_per_second,
                          .adamw_elements_per_second = report.host.adamw_elements_per_second,
                          .file_read_bytes_per_second = chosen.read_bytes_per_second,
                          .file_write_bytes_per_second = chosen.write_bytes_per_second};
    FOREBAY_ASSIGN_OR_RETURN(report.model->choice,
                             choose_offload(shape, report.model->options, report.model->limits, rates));
  }
  return report;
}

int complain_of(const Status& status) {
  return complain("forebay bench-tiers", status.message(),
                  status.code() == StatusCode::kInvalidArgument ? kBadUsage : kFailed);
}

// The ranks that a launcher started for --save; null without --save, and for a process alone. Corrects
// --ranks.
Result<std::unique_ptr<LaunchedRanks>> join_launched(BenchArguments& arguments, int* rank) {
  if (arguments.save.empty()) return std::unique_ptr<LaunchedRanks>();
  FOREBAY_ASSIGN_OR_RETURN(const LaunchEnvironment place, read_launch_environment());
  if (place.size == 1) return std::unique_ptr<LaunchedRanks>();
  if (given(arguments.ranks_option) && arguments.ranks != place.size)
    return refuse("--ranks is " + std::to_string(arguments.ranks) + ", and the launcher started " +
                  std::to_string(place.size) + " ranks; leave --ranks out");
  arguments.ranks = place.size;
  *rank = place.rank;
  return LaunchedRanks::join({.rank = place.rank,
                              .size = place.size,
                              .store = place.store,
                              .interface = place.interface,
                              .configuration = "forebay bench-tiers"},
                             given(arguments.link_option) && arguments.link == "tcp");
}

int run(BenchArguments& arguments) {
  int rank = 0;
  const auto launched = join_launched(arguments, &rank);
  if (!launched.ok()) return complain_of(launched.status());
  LaunchedRanks* const ranks = launched.value().get();
  if (rank != 0) {
    const auto measured = ranks->measure(Status(StatusCode::kUnavailable, "rank 0 decides"));
    return measured.ok() ? 0 : complain_of(measured.status());
  }
  const Result<BenchTiersReport> report = bench(arguments, ranks);
  if (!report.ok()) {
    if (ranks != nullptr && !ranks->measured()) static_cast<void>(ranks->measure(report.status()));
    return complain_of(report.status());
  }
  const std::string text =
      arguments.json ? bench_tiers_json(report.value()) : bench_tiers_text(report.value());
  const Status written = write_standard_output(text);
  return written.ok() ? 0 : complain("forebay bench-tiers", written.message(), kFailed);
}

}  // namespace

void add_bench_tiers_command(CLI::App& app, Action& action) {
  const auto arguments = std::make_shared<BenchArguments>();  // Shared by the parser's fields and the action.
  BenchArguments& a = *arguments;
  CLI::App* command = app.add_subcommand(
      "bench-tiers",
      "Measure copies to and from a device, host memory and files; with a model, choose its offload setting");
  command->footer(
      "Bytes are written 4096, 64KiB, 1.5GiB or 2GB. Rates are printed in GB/s (1e9 bytes) and, with --json, "
      "in bytes per second.\nThe files are anonymous and vanish with the process. Progress is shown if "
      "standard error is a terminal.");
  add_value(*command, "DIR", a.directories, "",
            "Directories for the file tier; several are measured one by one, then striped")
      ->required();
  add_value(*command, "--device", a.device, "DEVICE", "host, cuda or cuda:N (N counts GPUs from 0)")
      ->capture_default_str();
  add_value(*command, "--bytes", a.bytes, "BYTES",
            "Bytes of each copy, of the file, and of each of three arrays of the host; in whole 4 MiB")
      ->capture_default_str();
  add_value(*command, "--seconds", a.seconds, "S",
            "Approximate time of all measurements together; a slow drive takes longer")
      ->capture_default_str();
  command->add_flag("--json", a.json, "Print JSON");
  add_value(
      *command, "--save", a.save, "FILE|this",
      "Write a description of this machine, for forebay simulate --cluster FILE, or --cluster this. Its "
      "links and kernels are measured by --ranks ranks at the same time; or, if a launcher starts this "
      "command (mpirun, srun, torchrun, FOREBAY_RANK and FOREBAY_SIZE), by its ranks, over all of "
      "their hosts. Rank 0 measures the rest, and prints");
  add_value(
      *command, "--run", a.runs, "FILE",
      "With --save: a report of forebay-gpt --ranks 1 --report FILE, by which the speed of products is set; "
      "give two sizes or more")
      ->allow_extra_args(false);
  a.link_option =
      add_value(*command, "--link", a.link, "shm|tcp", "With --save: the link between the ranks of a host")
          ->capture_default_str();

  add_model_options(*command, a.model);
  const auto number = [&](const char* name, std::int64_t& target, const char* what) {
    return add_value(*command, name, target, "N", what);
  };
  a.plan_options.push_back(a.model.batch_option);
  a.ranks_option = number("--ranks", a.ranks, "Data-parallel ranks")->capture_default_str();
  a.plan_options.push_back(a.ranks_option);
  a.sharding.add(*command, kBenchTiersProgram, {.dtype = DataType::kBfloat16});
  for (const char* const name : {"stage", "dtype", "micro-steps", "memory"})
    a.plan_options.push_back(a.sharding.option(name));
  a.plan_options.push_back(
      add_value(*command, "--device-budget", a.device_budget, "BYTES", "The same as --memory"));
  a.host_ranks_option = number("--host-ranks", a.host_ranks,
                               "Ranks that share this host's cores, memory and drives (default: all)");
  a.plan_options.push_back(a.host_ranks_option);
  command->callback([arguments, &action] { action = [arguments] { return run(*arguments); }; });
}

}  // namespace forebay
