#include <memory>
#include <string>

#include "forebay/host_backend.h"
#include "forebay/kernels.h"
#include "runtime/command/command_line.h"
#include "runtime/command/machine/devices_print.h"

namespace forebay {
namespace {

// The instruction set and the threads of the host's kernels, as they report them.
std::string describe_host_kernels() {
  Result<std::unique_ptr<HostBackend>> backend = HostBackend::create({});
  if (!backend.ok()) return backend.status().message();
  const Result<std::unique_ptr<Kernels>> kernels = Kernels::create(*backend.value());
  return kernels.ok() ? kernels.value()->description() : kernels.status().message();
}

int run(bool json) {
  DevicesReport report;
  Result<CudaSystem> cuda = read_cuda_system();
  if (cuda.ok()) {
    report.cuda = std::move(cuda).value();
  } else {
    report.cuda_status = cuda.status();
  }
  report.host = read_host_facts();
  report.host_kernels = describe_host_kernels();
  report.topology = read_topology();
  report.placements = place_devices(report.topology, report.cuda.devices);
  const std::string text = json ? devices_json(report) : devices_text(report);
  const Status written = write_standard_output(text);
  return written.ok() ? 0 : complain("forebay devices", written.message(), kFailed);
}

}  // namespace

void add_devices_command(CLI::App& app, Action& action) {
  const auto json = std::make_shared<bool>(false);  // Shared by the parser's field and the action.
  CLI::App* command = app.add_subcommand(
      "devices", "Print the CUDA devices, the host, its topology, and directories on flash drives");
  command->add_flag("--json", *json, "Print JSON");
  command->callback([json, &action] { action = [json] { return run(*json); }; });
}

}  // namespace forebay
