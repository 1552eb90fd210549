// Compares a pass over optimizer states in files (read, update and write at the same time) with its limits,
// in turns: fio's time to read and to write the same bytes, and the update's time in memory.
//
//   optimizer_pass_bench DIRECTORY [MIB_OF_STATES [ROUNDS [BLOCK_KIB [DEPTH [PIECE_KIB]]]]]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "forebay/file_store.h"
#include "forebay/host_adam.h"
#include "forebay/host_backend.h"
#include "forebay/store_pass.h"
#include "tests/bench/fio.h"
#include "tests/bench/huge_pages.h"

namespace forebay {
namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

double seconds_of(const std::function<void()>& work) {
  const Clock::time_point begin = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

int run(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(
        stderr,
        "usage: optimizer_pass_bench DIRECTORY [MIB_OF_STATES [ROUNDS [BLOCK_KIB [DEPTH [PIECE_KIB]]]]]\n");
    return 2;
  }
  const auto number = [&](int index, unsigned long otherwise) {
    return argc > index ? std::strtoul(argv[index], nullptr, 10) : otherwise;
  };
  const std::string directory = argv[1];
  const std::size_t piece_count = number(6, 4096) * 1024 / sizeof(float) / 32768 * 32768;
  const std::size_t pieces = std::max<std::size_t>((number(2, 1536) << 20) / (12 * piece_count), 1);
  const std::size_t count = pieces * piece_count;
  const std::size_t field_bytes = count * sizeof(float);
  const unsigned long rounds = number(3, 9);
  FileStoreOptions options;
  options.directories = {directory};
  options.block_bytes = number(4, 4096) << 10;
  options.depth = static_cast<unsigned>(number(5, options.depth));

  const auto backend = value_or_throw(HostBackend::create({}));
  const auto pool = value_or_throw(PinnedPool::create(*backend));
  constexpr std::size_t kBuffers = 6;
  const auto buffers = value_or_throw(
      StagingBuffers::create(*pool, {.buffer_bytes = 12 * piece_count, .buffer_count = kBuffers}));
  const auto store = value_or_throw(make_file_store(options));
  throw_if_error(store->register_memory(buffers->memory().data(), buffers->memory().size()));
  std::printf("%s\n", store->facts().description.c_str());
  StoreRange ranges[3];
  for (int f = 0; f < 3; ++f) ranges[f] = value_or_throw(store->create_range(std::to_string(f), field_bytes));
  std::vector<StorePassPart> parts(pieces);
  std::vector<const StorePassPart*> order;
  for (std::size_t i = 0; i < pieces; ++i) {
    for (int f = 0; f < 3; ++f) {
      parts[i].fields[static_cast<std::size_t>(f)] = {ranges[f], i * piece_count * sizeof(float),
                                                      piece_count * sizeof(float)};
    }
    parts[i].field_count = 3;
    order.push_back(&parts[i]);
  }
  const bench::HugePages<std::uint16_t> gradients(count);
  const BlockRunner runner(0);
  std::uint64_t step = 0;
  const auto update = [&](std::size_t piece, std::byte* memory) {
    HostAdamArguments adam{};
    AdamWArguments& a = adam.update;
    a.gradient = gradients.data() + piece * piece_count;
    a.gradient_type = a.parameter_type = DataType::kBfloat16;
    a.master = reinterpret_cast<float*>(memory);
    a.parameter = gradients.data() + piece * piece_count;
    a.count = piece_count;
    a.lr = 1e-3f;
    a.beta1 = 0.9f;
    a.beta2 = 0.95f;
    a.a1 = 0.1f;
    a.a2 = 0.05f;
    a.eps = 1e-8f;
    a.c1 = a.s2 = a.factor = 1;
    adam.moments = {MomentFormat::kFloat32, memory + parts[0].field_offset(1),
                    memory + parts[0].field_offset(2), nullptr, nullptr};
    throw_if_error(host_adam(adam, runner));
  };
  StorePass pass(*store, *buffers);
  const auto whole_pass = [&] {
    pass.begin(order);
    for (std::size_t i = 0; i < pieces; ++i) {
      update(i, value_or_throw(pass.next()));
      throw_if_error(pass.done(true));
    }
    throw_if_error(pass.finish());
    ++step;
  };
  const bench::HugePages<std::byte> memory(kBuffers * 12 * piece_count);
  const auto updates_alone = [&] {
    for (std::size_t i = 0; i < pieces; ++i) update(i, memory.data() + i % kBuffers * 12 * piece_count);
  };

  const bool has_fio = bench::Fio::is_there();
  if (!has_fio) std::printf("fio is not installed: only the updates are compared\n");
  const bench::Fio fio(directory, 3 * field_bytes, options.block_bytes, options.depth);
  whole_pass();
  std::vector<double> times[4];
  std::vector<double> ratios;
  for (unsigned long round = 0; round < rounds; ++round) {
    times[0].push_back(seconds_of(whole_pass));
    times[1].push_back(has_fio ? fio.run(false).seconds : 0);
    times[2].push_back(has_fio ? fio.run(true).seconds : 0);
    times[3].push_back(seconds_of(updates_alone));
    ratios.push_back(std::max(times[1].back() + times[2].back(), times[3].back()) / times[0].back());
  }
  std::printf(
      "%zu MiB of states, pieces of %zu KiB, blocks of %zu KiB, depth %u, %lu rounds; medians\n"
      "pass %.3f s; fio reads in %.3f s and writes in %.3f s; updates alone %.3f s\n"
      "least time / pass %.3f; all rounds:",
      3 * field_bytes >> 20, piece_count * sizeof(float) >> 10, options.block_bytes >> 10, options.depth,
      rounds, median(times[0]), median(times[1]), median(times[2]), median(times[3]), median(ratios));
  for (const double ratio : ratios) std::printf(" %.2f", ratio);
  std::printf("\n");
  return 0;
}

}  // namespace
}  // namespace forebay

int main(int argc, char** argv) {
  try {
    return forebay::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "optimizer_pass_bench: %s\n", error.what());
    return 1;
  }
}
