// A rank for peer_loss_test to start, and to kill: joins over gloo as its environment says, prints "ready"
// once all have, and then does one thing until that fails:
//
//   peer_probe exchange | reduce_scatter | idle    prints "lost: " or "failed: " and the cause, ends with 7
//   peer_probe leave MICROSECONDS                  leaves in order after that time; ends with 0 if nothing
//   failed
//   peer_probe met before | after                  meets the others, prints "met" once it has, before or
//   after it gave them the addresses where it listens, and does not connect
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "collectives/process/joining.h"
#include "collectives/process/proven_connections.h"
#include "forebay/bootstrap.h"
#include "forebay/error.h"
#include "forebay/gloo_communicator.h"
#include "forebay/host_backend.h"
#include "tests/support/let_others_run.h"

namespace forebay {
namespace {

constexpr int kFailedExit = 7;
// More than the sockets hold, so that a kill finds sends half-way.
constexpr std::size_t kElements = 512 * 1024;

Status exchange_until_failed(Communicator& communicator) {
  std::vector<std::byte> mine(4096);
  std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(communicator.size()));
  Status status;
  while (status.ok()) status = communicator.exchange(mine, all);
  return status;
}

Status reduce_scatter_until_failed(Communicator& communicator, HostBackend& backend) {
  const auto ranks = static_cast<std::size_t>(communicator.size());
  const std::size_t bytes = kElements * ranks * sizeof(float);
  const Stream stream = value_or_throw(backend.stream_create());
  std::byte* source = value_or_throw(backend.alloc(bytes));
  std::byte* receive = value_or_throw(backend.alloc(bytes));
  std::byte* target = value_or_throw(backend.alloc(kElements * sizeof(float)));
  throw_if_error(backend.fill_async(source, 0, bytes, stream));
  Status status;
  while (status.ok()) {
    status = communicator.reduce_scatter({.source = source,
                                          .source_stride_bytes = kElements * sizeof(float),
                                          .count = kElements,
                                          .type = DataType::kFloat32,
                                          .receive = receive,
                                          .target = reinterpret_cast<float*>(target),
                                          .first = true},
                                         stream);
    throw_if_error(backend.stream_synchronize(stream));
    if (status.ok()) status = communicator.status();
  }
  throw_if_error(backend.stream_destroy(stream));
  for (std::byte* block : {source, receive, target}) throw_if_error(backend.free(block));
  return status;
}

// Calls nothing that a peer takes part in.
Status idle_until_failed(Communicator& communicator) {
  while (communicator.status().ok()) testing::let_others_run();
  return communicator.status();
}

[[noreturn]] void stay_unconnected(const GlooOptions& options, HostBackend& backend, bool gives_addresses) {
  const internal::Joining joining = value_or_throw(internal::meet_others("gloo", options, backend));
  const internal::ProvenConnections listening = value_or_throw(internal::ProvenConnections::listen(
      {.address = "127.0.0.1", .rank = options.rank, .size = options.size}));
  if (gives_addresses) {
    throw_if_error(joining.store->write(joining.name("address." + std::to_string(options.rank)),
                                        listening.introduction()));
  }
  std::printf("met\n");
  std::fflush(stdout);
  for (;;) pause();
}

int run(const std::vector<std::string>& arguments) {
  const LaunchEnvironment environment = value_or_throw(read_launch_environment());
  const std::unique_ptr<HostBackend> backend = value_or_throw(HostBackend::create({}));
  GlooOptions options{.rank = environment.rank, .size = environment.size, .store = environment.store};
  if (const char* given = std::getenv("FOREBAY_TEST_DEADLINE_MS"))
    options.deadline = std::chrono::milliseconds(std::atoi(given));
  if (arguments[0] == "met") stay_unconnected(options, *backend, arguments.at(1) == "after");
  std::unique_ptr<Communicator> communicator = value_or_throw(create_gloo_communicator(options, *backend));
  throw_if_error(communicator->barrier());
  std::printf("ready\n");
  std::fflush(stdout);
  if (arguments[0] == "leave") {
    std::this_thread::sleep_for(std::chrono::microseconds(std::atoi(arguments[1].c_str())));
    throw_if_error(communicator->status());
    communicator.reset();
    return 0;
  }
  Status status;
  if (arguments[0] == "exchange") status = exchange_until_failed(*communicator);
  if (arguments[0] == "reduce_scatter") status = reduce_scatter_until_failed(*communicator, *backend);
  if (arguments[0] == "idle") status = idle_until_failed(*communicator);
  communicator.reset();
  std::printf("%s: %s\n", status.code() == StatusCode::kPeerLost ? "lost" : "failed",
              status.message().c_str());
  return kFailedExit;
}

}  // namespace
}  // namespace forebay

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.empty()) return 98;
  try {
    return forebay::run(arguments);
  } catch (const std::exception& error) {
    std::printf("failed: %s\n", error.what());
    return 99;
  }
}
