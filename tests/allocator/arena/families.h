// Made-up jobs: the allocations of eight families of programs, each varied by a seed. They stand for patterns
// that recorded traces rarely hold, and in which an allocator can be weak.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "forebay/units.h"
#include "runtime/command/traces/allocation_trace.h"

namespace forebay::testing {

enum class Family : std::uint8_t {
  kZero3Loop,      // ZeRO stage 3: 10 to 500 equal steps.
  kRandomLengths,  // The same with a random sequence length in each step.
  kExperts,        // Mixture of experts: each expert gets a random share of the tokens.
  kServing,        // Requests come and go, with cache blocks of 16 KiB to 64 MiB.
  kCrossStream,    // FSDP: gathered on one stream, freed on another.
  kTrainEvaluate,  // Training steps and evaluation with other sizes alternate.
  kLeaks,          // Every step leaves some blocks live.
  kRobson,         // Blocks of one size, of which every few are freed, then larger ones.
};
inline constexpr int kFamilyCount = 8;

inline const char* family_name(Family family) {
  static constexpr const char* kNames[] = {"ZeRO-3 loop",  "random lengths", "experts", "serving",
                                           "cross-stream", "train-evaluate", "leaks",   "Robson"};
  return kNames[static_cast<int>(family)];
}

class FamilyMaker {
 public:
  FamilyMaker(Family family, std::uint64_t seed)
      : random_(seed * 8 + static_cast<std::uint64_t>(family)), family_(family) {}

  // The whole job. Blocks are 2 MiB or more where large_blocks_only says so.
  AllocationTrace make() {
    switch (family_) {
      case Family::kZero3Loop:
        train({.steps = static_cast<int>(pick(10, 500))});
        break;
      case Family::kRandomLengths:
        train({.steps = static_cast<int>(pick(10, 40)), .random_length = true});
        break;
      case Family::kExperts:
        train({.steps = static_cast<int>(pick(10, 30)), .expert_count = static_cast<int>(pick(4, 32))});
        break;
      case Family::kServing:
        serve();
        break;
      case Family::kCrossStream:
        train({.steps = static_cast<int>(pick(10, 30)),
               .random_length = pick(0, 1) == 1,
               .cross_stream = true});
        break;
      case Family::kTrainEvaluate:
        train({.steps = static_cast<int>(pick(10, 40)), .evaluate_every = static_cast<int>(pick(2, 6))});
        break;
      case Family::kLeaks:
        train({.steps = static_cast<int>(pick(10, 60)), .leaks = true});
        break;
      case Family::kRobson:
        thin_out();
        break;
    }
    AllocationTrace trace = builder_.finish();
    trace.name = family_name(family_);
    return trace;
  }

 private:
  struct Training {
    int steps = 0;
    bool random_length = false;
    int expert_count = 0;
    bool cross_stream = false;
    int evaluate_every = 0;
    bool leaks = false;
  };

  std::uint64_t pick(std::uint64_t least, std::uint64_t most) {
    return least + random_() % (most - least + 1);
  }
  // Any size between the two, small ones as often as large ones.
  std::uint64_t size(std::uint64_t least, std::uint64_t most) {
    const double share = static_cast<double>(pick(0, 1 << 20)) / (1 << 20);
    std::uint64_t bytes = least;
    while (bytes * 2 <= most && pick(0, 63) < 48) bytes *= 2;
    return std::min(most, bytes + static_cast<std::uint64_t>(share * static_cast<double>(bytes)));
  }
  std::uint64_t allocate(std::uint64_t bytes, std::uint32_t stream = 0) {
    static_cast<void>(builder_.allocate(next_id_, std::max<std::uint64_t>(bytes, 1), stream));
    return next_id_++;
  }
  void free(std::uint64_t id, std::optional<std::uint64_t> stream = std::nullopt) {
    static_cast<void>(builder_.free(id, stream));
  }

  // Layers whose parameters are gathered for their use, checkpoints of activations, and gradients.
  void train(const Training& options) {
    const std::uint64_t layers = pick(12, 48);
    const std::uint64_t hidden = 1024 * pick(1, 5);
    const std::uint64_t ranks = std::uint64_t{1} << pick(1, 4);
    const std::uint64_t layer_bytes = 12 * hidden * hidden * 2;
    const std::uint64_t length_max = 512 * pick(4, 16);
    const std::uint32_t communication = 1;
    for (std::uint64_t i = 0; i < layers; ++i) {
      allocate(layer_bytes / ranks);
      for (int j = 0; j < 3; ++j) allocate(2 * layer_bytes / ranks);
    }
    // The longest jobs are short of layers, so that a test of many seeds takes seconds.
    const std::uint64_t used_layers = options.steps > 100 ? std::min<std::uint64_t>(layers, 8) : layers;
    std::vector<std::uint64_t> leaked;
    for (int step = 0; step < options.steps; ++step) {
      const bool evaluation =
          options.evaluate_every != 0 && step % options.evaluate_every == options.evaluate_every - 1;
      std::uint64_t length = options.random_length ? pick(length_max / 8, length_max) : length_max;
      if (evaluation) length = length_max / 2 + 512 * pick(0, 2);
      const std::uint64_t activation = length * hidden * 2;
      const auto gather = [&](std::uint64_t) { return allocate(layer_bytes, communication); };
      const auto release = [&](std::uint64_t id) {
        free(id, options.cross_stream ? std::optional<std::uint64_t>(0)
                                      : std::optional<std::uint64_t>(communication));
      };
      std::vector<std::uint64_t> checkpoints;
      std::uint64_t next = gather(0);
      for (std::uint64_t i = 0; i < used_layers; ++i) {
        const std::uint64_t current = next;
        if (i + 1 < used_layers) next = gather(i + 1);
        if (!evaluation) checkpoints.push_back(allocate(activation));
        layer(options, activation, hidden, false);
        release(current);
      }
      if (evaluation) {
        free(allocate(length * 32000 * 2));
        continue;
      }
      const std::uint64_t logits = allocate(length * 32000 * 2);
      free(allocate(length * 32000 * 4));
      free(logits);
      next = gather(used_layers - 1);
      std::optional<std::uint64_t> reduced;
      for (std::uint64_t i = used_layers; i-- > 0;) {
        const std::uint64_t current = next;
        if (i > 0) next = gather(i - 1);
        layer(options, activation, hidden, true);
        const std::uint64_t gradient = allocate(layer_bytes);
        free(checkpoints[i]);
        if (reduced)
          free(*reduced, options.cross_stream ? std::optional<std::uint64_t>(communication) : std::nullopt);
        reduced = gradient;
        release(current);
      }
      if (reduced) free(*reduced);
      if (options.leaks) {
        for (std::uint64_t i = pick(1, 4); i > 0; --i) leaked.push_back(allocate(size(2_MiB, 24_MiB)));
      }
    }
  }

  // The short-lived blocks of one layer.
  void layer(const Training& options, std::uint64_t activation, std::uint64_t hidden, bool backward) {
    std::vector<std::uint64_t> parts;
    for (const std::uint64_t factor : {3, 1, 1}) parts.push_back(allocate(factor * activation));
    if (options.expert_count > 0) {
      const std::uint64_t token_bytes = hidden * 2;
      const std::uint64_t tokens = 2 * activation / token_bytes;
      std::vector<std::uint64_t> shares;
      std::uint64_t sum = 0;
      for (int i = 0; i < options.expert_count; ++i) {
        shares.push_back(pick(1, 1000));
        sum += shares.back();
      }
      for (const std::uint64_t share : shares) {
        parts.push_back(allocate(std::max<std::uint64_t>(tokens * share / sum * token_bytes, 512)));
      }
    } else {
      parts.push_back(allocate(4 * activation));
      if (backward) parts.push_back(allocate(4 * activation));
    }
    // The first ones live longest; the others are freed in any order.
    std::shuffle(parts.begin() + 1, parts.end(), random_);
    for (std::size_t i = parts.size(); i-- > 0;) free(parts[i]);
  }

  // Requests that arrive at random, grow by one cache block at a time and leave.
  void serve() {
    const std::uint64_t block_bytes = std::uint64_t{16_KiB} << pick(0, 12);
    const std::uint64_t capacity = 4_GiB + pick(0, 8) * 1_GiB;
    for (int i = 0; i < 64; ++i) allocate(size(16_MiB, 256_MiB));
    std::vector<std::vector<std::uint64_t>> requests;
    std::uint64_t live = 0;
    const std::uint64_t events = 24000;
    for (std::uint64_t i = 0; i < events; ++i) {
      const bool full = live + block_bytes > capacity;
      if (requests.empty() || (!full && pick(0, 15) == 0)) {
        requests.emplace_back();
        // The prompt, and the workspace of its prefill.
        const std::uint64_t prompt = std::min(pick(1, 24), (capacity - live) / block_bytes);
        const std::uint64_t workspace = allocate(pick(1, 24) * 8_MiB);
        for (std::uint64_t j = 0; j < prompt; ++j) requests.back().push_back(allocate(block_bytes));
        live += prompt * block_bytes;
        free(workspace);
        continue;
      }
      const std::size_t chosen = pick(0, requests.size() - 1);
      if (full || pick(0, 31) == 0) {
        for (const std::uint64_t block : requests[chosen]) free(block);
        live -= requests[chosen].size() * block_bytes;
        requests.erase(requests.begin() + static_cast<std::ptrdiff_t>(chosen));
      } else {
        requests[chosen].push_back(allocate(block_bytes));
        live += block_bytes;
      }
    }
  }

  // Robson's program: each phase keeps a few of the blocks and asks for larger ones with the memory set free.
  void thin_out() {
    const std::uint64_t total = 4_GiB + pick(0, 12) * 1_GiB;
    std::uint64_t bytes = 2_MiB * pick(1, 8) + (pick(0, 1) == 1 ? 512 * pick(1, 2000) : 0);
    std::vector<std::pair<std::uint64_t, std::uint64_t>> live;
    std::uint64_t live_bytes = 0;
    const std::uint64_t phases = pick(2, 5);
    for (std::uint64_t phase = 0; phase < phases; ++phase) {
      while (live_bytes + bytes <= total) {
        live.push_back({allocate(bytes), bytes});
        live_bytes += bytes;
      }
      const std::uint64_t keep_every = pick(2, 4);
      std::vector<std::pair<std::uint64_t, std::uint64_t>> kept;
      for (std::size_t i = 0; i < live.size(); ++i) {
        if (i % keep_every == 0) {
          kept.push_back(live[i]);
        } else {
          free(live[i].first);
          live_bytes -= live[i].second;
        }
      }
      live = std::move(kept);
      bytes = pick(0, 3) == 0 ? bytes * 3 / 2 : bytes * 2;
    }
    while (live_bytes + bytes <= total) {
      live.push_back({allocate(bytes), bytes});
      live_bytes += bytes;
    }
  }

  std::mt19937_64 random_;
  Family family_;
  TraceBuilder builder_;
  std::uint64_t next_id_ = 1;
};

}  // namespace forebay::testing
