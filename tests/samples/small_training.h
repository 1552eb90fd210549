// A training of the sample that ends in well under a second, for tests.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

#include "model/random.h"
#include "trainer/options.h"

namespace forebay::gpt::testing {

// Letter `index` of a text that is drawn by `seed`.
inline char drawn_letter(std::uint64_t seed, std::uint64_t index) {
  return "the basin ahead of the turbine "[draw(seed, 0, index) % 31];
}

inline void write_text(const std::string& path, std::uint64_t bytes, std::uint64_t seed) {
  std::ofstream text(path, std::ios::binary);
  for (std::uint64_t i = 0; i < bytes; ++i) text << drawn_letter(seed, i);
}

// The text of the training.
inline constexpr std::uint64_t kTextBytes = 2000;
inline constexpr std::uint64_t kTextSeed = 5;

inline TrainerOptions small_options() {
  TrainerOptions o;
  o.model = {.layers = 2, .hidden = 24, .heads = 3, .sequence = 12};
  o.communicator = "local";
  o.matmul = "plain";
  o.threads = 1;
  o.batch = 2;
  o.steps = 4;
  o.progress = false;
  return o;
}

}  // namespace forebay::gpt::testing
