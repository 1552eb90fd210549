// One rank of a small training run, as a process, with a fault at a chosen collective:
//
//   fault_probe TRANSPORT STAGE STEPS DEADLINE_MS [FAULT RANK OPERATION [GO]]
//
//   TRANSPORT  auto, shm or gloo; rank, size and store come from the environment
//   STAGE      3, or 3/2: sharded within groups of two ranks
//   FAULT      kill, stop, exit: the process of RANK does this when its stream comes to OPERATION
//              mismatch: it issues another operation in its place
//              pause: it prints "paused" and goes on once the file GO exists
//
// It prints "ready" once the ranks are connected, "step S DIGEST OPERATIONS" after each step (0: before the
// first; the digest of the masters that this rank keeps, and how many collectives it has issued), and "done"
// at the end; or "failed CAUSE" and "committed S DIGEST", and then leaves with 7.

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "forebay/bootstrap.h"
#include "forebay/error.h"
#include "forebay/gloo_communicator.h"
#include "forebay/shm_communicator.h"
#include "tests/engine/toy_cases.h"
#include "tests/support/forwarding_communicator.h"

namespace forebay::testing {
namespace {

constexpr int kFailedExit = 7;

struct Fault {
  std::string kind;
  int rank = -1;
  std::uint64_t operation = 0;
  std::string go;
};

void pause_until(const std::string& go) {
  std::printf("paused\n");
  std::fflush(stdout);
  while (::access(go.c_str(), F_OK) != 0) ::usleep(1000);
}

// Processes of a busy machine start seconds apart, and the deadline is for the operations after the start:
// ranks with a directory as their store meet here first, in files beside it.
void gather(const ProcessOptions& options) {
  if (options.store.find("://") != std::string::npos) return;
  const auto file = [&](int rank) { return options.store + ".here-" + std::to_string(rank); };
  std::ofstream{file(options.rank)};
  for (int rank = 0; rank < options.size; ++rank) {
    while (::access(file(rank).c_str(), F_OK) != 0) ::usleep(1000);
  }
}

// Counts the collectives of the data plane, its own and those of communicators split from it, and carries out
// the fault at one of them.
class FaultyCommunicator final : public ForwardingCommunicator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> inner, Backend& backend, Fault fault)
      : FaultyCommunicator(std::move(inner), backend, std::move(fault), std::make_shared<std::uint64_t>(0)) {
    world_rank_ = rank();
  }

  std::uint64_t operation_count() const { return *count_; }

  Result<std::unique_ptr<Communicator>> split(int color, int key) override {
    Result<std::unique_ptr<Communicator>> part = ForwardingCommunicator::split(color, key);
    FOREBAY_RETURN_IF_ERROR(part.status());
    std::unique_ptr<FaultyCommunicator> faulty(
        new FaultyCommunicator(std::move(part).value(), backend_, fault_, count_));
    faulty->world_rank_ = world_rank_;
    return std::unique_ptr<Communicator>(std::move(faulty));
  }

  Status reduce_scatter(const ReduceScatterArguments& arguments, Stream stream) override {
    if (meets())
      return act(stream, [&] { return ForwardingCommunicator::reduce_scatter(arguments, stream); });
    return ForwardingCommunicator::reduce_scatter(arguments, stream);
  }
  Status all_gather(const AllGatherArguments& arguments, Stream stream) override {
    if (meets()) return act(stream, [&] { return ForwardingCommunicator::all_gather(arguments, stream); });
    return ForwardingCommunicator::all_gather(arguments, stream);
  }

 private:
  FaultyCommunicator(std::unique_ptr<Communicator> inner, Backend& backend, Fault fault,
                     std::shared_ptr<std::uint64_t> count)
      : ForwardingCommunicator(std::move(inner)),
        backend_(backend),
        fault_(std::move(fault)),
        count_(std::move(count)) {}

  bool meets() { return (*count_)++ == fault_.operation && fault_.rank == world_rank_; }

  template <typename Operation>
  Status act(Stream stream, Operation operation) {
    if (fault_.kind == "mismatch") {
      return ForwardingCommunicator::all_gather(
          {.source = scratch_, .target = scratch_, .target_stride_bytes = 1, .bytes = 1}, stream);
    }
    throw_if_error(call_on(backend_, stream, [kind = fault_.kind, go = fault_.go] {
      if (kind == "kill") static_cast<void>(::raise(SIGKILL));
      if (kind == "stop") static_cast<void>(::raise(SIGSTOP));
      if (kind == "exit") std::_Exit(0);
      if (kind == "pause") pause_until(go);
    }));
    return operation();
  }

  Backend& backend_;
  const Fault fault_;
  const std::shared_ptr<std::uint64_t> count_;
  int world_rank_ = 0;
  std::byte scratch_[64];
};

Result<std::unique_ptr<Communicator>> connect(const std::string& transport, const ProcessOptions& options,
                                              Backend& backend) {
  if (transport == "shm") return create_shm_communicator(options, backend);
  if (transport == "gloo") return create_gloo_communicator(options, backend);
  return create_process_communicator(options, backend);
}

int run(const std::vector<std::string>& words) {
  const LaunchEnvironment environment = value_or_throw(read_launch_environment());
  const ProcessOptions options{.rank = environment.rank,
                               .size = environment.size,
                               .store = environment.store,
                               .interface = environment.interface,
                               .deadline = std::chrono::milliseconds(std::stoi(words[3]))};
  Fault fault;
  if (words.size() > 6) fault = {words[4], std::stoi(words[5]), std::stoull(words[6]), {}};
  if (words.size() > 7) fault.go = words[7];
  gather(options);
  Rank rank;
  rank.backend = value_or_throw(HostBackend::create({.granularity = 64u << 10}));
  rank.kernels = value_or_throw(Kernels::create(*rank.backend, {.thread_count = 1}));
  auto communicator = std::make_unique<FaultyCommunicator>(
      value_or_throw(connect(words[0], options, *rank.backend)), *rank.backend, fault);
  const FaultyCommunicator& faulty = *communicator;
  rank.communicator = std::move(communicator);
  std::printf("ready %s\n", rank.communicator->name());
  std::fflush(stdout);

  ToyOptions toy = options_for(std::stoi(words[1]), DataType::kBfloat16, environment.size);
  if (const std::size_t slash = words[1].find('/'); slash != std::string::npos) {
    toy.engine.group = std::stoi(words[1].substr(slash + 1));
    toy.engine.shard_within_group = true;
  }
  ToyTrainer trainer(toy, rank);
  try {
    trainer.initialize();
    // Nobody fails before all have their weights.
    throw_if_error(rank.communicator->barrier());
    const int steps = std::stoi(words[2]);
    for (int step = 0; step <= steps; ++step) {
      if (step > 0) static_cast<void>(trainer.step(step));
      const std::string digest = trainer.engine().shard_digest();
      std::printf("step %d %s %llu\n", step, digest.c_str(),
                  static_cast<unsigned long long>(faulty.operation_count()));
    }
    throw_if_error(rank.communicator->barrier());
    std::printf("done\n");
    return 0;
  } catch (const Error& error) {
    rank.communicator->abort(error.status());
    std::printf("failed %s\ncommitted %llu %s\n", rank.communicator->status().to_string().c_str(),
                static_cast<unsigned long long>(trainer.engine().committed_step()),
                trainer.engine().shard_digest().c_str());
    return kFailedExit;
  }
}

}  // namespace
}  // namespace forebay::testing

int main(int argc, char** argv) {
  try {
    return forebay::testing::run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& error) {
    std::printf("failed %s\n", error.what());
    return forebay::testing::kFailedExit;
  }
}
