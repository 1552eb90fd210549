// Compares our all_gather over Gloo's transport with Gloo's own, among the same processes over loopback, in
// turns.
//
//   gloo_bench [RANKS [MIB [ROUNDS]]]       2 ranks, 64 MiB of fp32 in all on each, 21 rounds
//
// Prints the median over rounds of the slowest rank's time, for each, and the median of the rounds' quotients
// ours / Gloo's, which should be at most 1. With more ranks than processors, it measures the scheduler too.
#include <gloo/allgather.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "forebay/gloo_communicator.h"
#include "forebay/host_backend.h"
#include "tests/bench/ranks.h"

namespace forebay {
namespace {

// Debian 12's Gloo takes the store by reference; later versions share it.
template <typename Context>
void connect(Context& context, const std::string& directory,
             std::shared_ptr<gloo::transport::Device>& device) {
  const auto store = std::make_shared<gloo::rendezvous::FileStore>(directory);
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
  connect(*context, directory, device);

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
  const bench::Paired times = bench::measure_in_turns(
      rounds, [&] { return bench::slowest_ms(*communicator, ours); },
      [&] { return bench::slowest_ms(*communicator, plain); });
  if (rank == 0) {
    std::printf("all_gather  %d ranks  %zu MiB  ours %.2f ms  Gloo's %.2f ms  quotient %.3f\n", size,
                bytes >> 20, bench::median(times.one_ms), bench::median(times.other_ms),
                bench::median(times.quotients));
  }
  throw_if_error(communicator->barrier());
  throw_if_error(backend->stream_destroy(stream));
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
  return forebay::bench::run_ranks("gloo_bench", size, [&](int rank, const std::string& directory) {
    forebay::run_rank(rank, size, static_cast<std::size_t>(mib) << 20, rounds, directory);
  });
}
