// AdamW with its states in files: host memory never holds all of the master weights, m and v at once. Then
// the same steps with states in memory; both give the same result, bit for bit.
//
//   build/release/bin/adam-in-files [DIRECTORY]      default: the temporary directory
//
// A StorePass reads the next parts, hands out one part to change, and writes finished parts, all at the same
// time and through a few pinned buffers. A part here is a piece of master, of m and of v.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "forebay/file_store.h"
#include "forebay/host_adam.h"
#include "forebay/host_backend.h"
#include "forebay/pinned_pool.h"
#include "forebay/staging_buffers.h"
#include "forebay/store_pass.h"
#include "forebay/units.h"

namespace {

constexpr std::size_t kCount = 2'500'000;  // Elements.
constexpr std::size_t kPieceCount = 256
                                    << 10;  // Elements of one piece: 1 MiB of each state, so whole granules.
constexpr std::size_t kBuffers = 4;
constexpr int kSteps = 3;

// One step on `count` elements at these addresses.
forebay::Status adam(int step, const float* gradient, float* master, float* m, float* v, std::size_t count,
                     const forebay::BlockRunner& runner) {
  constexpr double kBeta1 = 0.9, kBeta2 = 0.95;
  forebay::BiasCorrection correction;
  forebay::bias_corrections(kBeta1, kBeta2, static_cast<std::uint64_t>(step), &correction, 1);
  forebay::HostAdamArguments arguments{};
  arguments.update = {.gradient = gradient,
                      .master = master,
                      .m = nullptr,
                      .v = nullptr,
                      .parameter = nullptr,
                      .count = count,
                      .gradient_type = forebay::DataType::kFloat32,
                      .parameter_type = forebay::DataType::kFloat32,
                      .factor = 1,
                      .lr = 1e-3f,
                      .weight_decay = 0.1f,
                      .beta1 = static_cast<float>(kBeta1),
                      .beta2 = static_cast<float>(kBeta2),
                      .eps = 1e-8f,
                      .a1 = static_cast<float>(1 - kBeta1),
                      .a2 = static_cast<float>(1 - kBeta2),
                      .c1 = correction.c1,
                      .s2 = correction.s2};
  arguments.moments = {forebay::MomentFormat::kFloat32, m, v, nullptr, nullptr};
  return forebay::host_adam(arguments, runner);
}

// The parts of a pass over three ranges. The last part may be shorter.
std::vector<forebay::StorePassPart> parts_of(const std::array<forebay::StoreRange, 3>& states) {
  std::vector<forebay::StorePassPart> parts;
  for (std::size_t begin = 0; begin < kCount; begin += kPieceCount) {
    forebay::StorePassPart& part = parts.emplace_back();
    part.field_count = states.size();
    for (std::size_t i = 0; i < states.size(); ++i) {
      part.fields[i] = {.range = states[i],
                        .offset = begin * sizeof(float),
                        .bytes = std::min(kPieceCount, kCount - begin) * sizeof(float)};
    }
  }
  return parts;
}

bool run(const std::string& directory) {
  using namespace forebay;
  const auto backend = value_or_throw(HostBackend::create({}));
  const auto store = value_or_throw(make_file_store({.directories = {directory}}));
  const auto pool = value_or_throw(PinnedPool::create(*backend, {.slab_bytes = 1}));
  const auto buffers = value_or_throw(StagingBuffers::create(
      *pool, {.buffer_bytes = 3 * kPieceCount * sizeof(float), .buffer_count = kBuffers}));
  throw_if_error(store->register_memory(buffers->memory().data(), buffers->memory().size()));
  const BlockRunner runner(0);

  std::array<StoreRange, 3> states;  // Bytes that were never written read as zeros.
  const char* const names[] = {"master", "m", "v"};
  for (std::size_t i = 0; i < states.size(); ++i)
    states[i] = value_or_throw(store->create_range(names[i], kCount * sizeof(float)));
  const std::vector<StorePassPart> parts = parts_of(states);
  std::vector<const StorePassPart*> order;
  for (const StorePassPart& part : parts) order.push_back(&part);
  StorePass pass(*store, *buffers);

  std::array<std::vector<float>, 3> in_memory;
  for (std::vector<float>& state : in_memory) state.assign(kCount, 0.0f);
  std::vector<float> gradient(kCount);
  bool same = true;
  for (int step = 1; step <= kSteps; ++step) {
    for (std::size_t i = 0; i < kCount; ++i) gradient[i] = std::sin(static_cast<float>(i * step));
    throw_if_error(adam(step, gradient.data(), in_memory[0].data(), in_memory[1].data(), in_memory[2].data(),
                        kCount, runner));
    pass.begin(order);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      std::byte* const memory = value_or_throw(pass.next());
      const std::size_t count = parts[i].fields[0].bytes / sizeof(float);
      std::array<float*, 3> piece;
      for (std::size_t field = 0; field < piece.size(); ++field)
        piece[field] = reinterpret_cast<float*>(memory + parts[i].field_offset(field));
      throw_if_error(adam(step, &gradient[i * kPieceCount], piece[0], piece[1], piece[2], count, runner));
      if (step == kSteps) {
        for (std::size_t field = 0; field < piece.size(); ++field) {
          same = same &&
                 std::memcmp(piece[field], &in_memory[field][i * kPieceCount], count * sizeof(float)) == 0;
        }
      }
      throw_if_error(pass.done(/*write=*/true));
    }
    throw_if_error(pass.finish());
  }

  const StoreStatistics moved = store->statistics();
  std::printf("store: %s\n", store->facts().description.c_str());
  std::printf("%d steps over %s of states through %s of pinned memory: read %s, wrote %s; %s\n", kSteps,
              format_bytes(moved.range_bytes).c_str(), format_bytes(buffers->memory().size()).c_str(),
              format_bytes(moved.read_bytes).c_str(), format_bytes(moved.written_bytes).c_str(),
              same ? "bit for bit the same as with states in memory" : "DIFFERENT from states in memory");
  return same;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2 || (argc == 2 && argv[1][0] == '-')) {
    std::fprintf(stderr, "usage: adam-in-files [DIRECTORY]\n");
    return 2;
  }
  try {
    return run(argc > 1 ? argv[1] : std::filesystem::temp_directory_path().string()) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "adam-in-files: %s\n", error.what());
    return 1;
  }
}
