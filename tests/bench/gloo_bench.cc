// Our all_gather over Gloo's transport beside Gloo's own, among the same processes over loopback, in turns.
//
//   gloo_bench [RANKS [MIB [ROUNDS]]]       2 ranks, 64 MiB of fp32 in all on each, 21 rounds
//
// Prints the medians over rounds, of the slowest rank of each, and the median of the rounds' quotients ours /
// Gloo's: at most 1 is what we want. More ranks than processors measure the scheduler too.
#include <gloo/allgather.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "forebay/gloo_communicator.h"
#include "forebay/host_backend.h"

namespace forebay {
namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Gloo's releases differ: Debian 12's takes the store by reference, later ones share it.
template <typename Context, typename Store>
void connect_full_mesh(Context& context, const std::shared_ptr<Store>& store,
                       std::shared_ptr<gloo::transport::Device>& device) {
  if constexpr (requires { context.connectFullMesh(store, device); }) {
    context.connectFullMesh(store, device);
  } else {
    context.connectFullMesh(*store, device);
  }
}

void run_rank(int rank, int size, std::size_t bytes, int rounds, const std::string& directory) {
  const std::unique_ptr<HostBackend> backend = value_or_throw(HostBackend::create({}));
  const std::unique_ptr<Communicator> communicator = value_or_throw(
      create_gloo_communicator({.rank = rank, .size = size, .store = directory + "/ours"}, *backend));
  const Stream stream = value_or_throw(backend->stream_create());
  gloo::transport::tcp::attr attributes;
  attributes.hostname = "127.0.0.1";
  std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(attributes);
  auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);
  connect_full_mesh(*context, std::make_shared<gloo::rendezvous::FileStore>(directory), device);

  const std::size_t count = bytes / sizeof(float) / static_cast<std::size_t>(size);
  std::vector<float> part(count, 1.0f), whole(count * static_cast<std::size_t>(size), 2.0f);
  const auto ours = [&] {
    throw_if_error(communicator->all_gather({.source = reinterpret_cast<std::byte*>(part.data()),
                                             .target = reinterpret_cast<std::byte*>(whole.data()),
                                             .target_stride_bytes = count * sizeof(float),
                                             .bytes = count * sizeof(float)},
                                            stream));
    throw_if_error(backend->stream_synchronize(stream));
    throw_if_error(communicator->status());
  };
  std::uint32_t tag = 0;
  const auto plain = [&] {
    gloo::AllgatherOptions options(context);
    options.setInput(part.data(), part.size());
    options.setOutput(whole.data(), whole.size());
    options.setTag(tag++);
    gloo::allgather(options);
  };
  // Milliseconds of the slowest rank; all begin together.
  const auto measure = [&](const auto& function) {
    throw_if_error(communicator->barrier());
    const Clock::time_point start = Clock::now();
    function();
    const double mine = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    std::vector<double> all(static_cast<std::size_t>(size));
    throw_if_error(
        communicator->exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all))));
    return *std::max_element(all.begin(), all.end());
  };
  measure(ours);
  measure(plain);
  std::vector<double> ours_ms, plain_ms, quotients;
  for (int round = 0; round < rounds; ++round) {
    // Each first in turn.
    if (round % 2 == 0) ours_ms.push_back(measure(ours));
    plain_ms.push_back(measure(plain));
    if (round % 2 == 1) ours_ms.push_back(measure(ours));
    quotients.push_back(ours_ms.back() / plain_ms.back());
  }
  if (rank == 0) {
    std::printf("all_gather  %d ranks  %zu MiB  ours %.2f ms  Gloo's %.2f ms  quotient %.3f\n", size,
                bytes >> 20, median(ours_ms), median(plain_ms), median(quotients));
  }
  throw_if_error(communicator->barrier());
  throw_if_error(backend->stream_destroy(stream));
}

int run(int size, std::size_t bytes, int rounds) {
  std::string directory = (std::filesystem::temp_directory_path() / "forebay-bench-XXXXXX").string();
  if (mkdtemp(directory.data()) == nullptr) return 1;
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    try {
      run_rank(rank, size, bytes, rounds, directory);
      std::fflush(stdout);
      _exit(0);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "gloo_bench: %s\n", error.what());
      _exit(1);
    }
  }
  int code = 0;
  for (const pid_t child : children) {
    int state = 0;
    if (waitpid(child, &state, 0) != child || state != 0) code = 1;
  }
  std::error_code ignored;
  std::filesystem::remove_all(directory, ignored);
  return code;
}

}  // namespace
}  // namespace forebay

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 2;
  const int mib = argc > 2 ? std::atoi(argv[2]) : 64;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 21;
  if (size < 2 || mib < 1 || rounds < 1) {
    std::fprintf(stderr, "usage: gloo_bench [RANKS [MIB [ROUNDS]]], at least 2 ranks, 1 MiB and 1 round\n");
    return 2;
  }
  return forebay::run(size, static_cast<std::size_t>(mib) << 20, rounds);
}
