// A model with all awkward cases, and the comparison of a run with the plain loops of toy.h.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "tests/engine/toy.h"

namespace forebay::testing {

inline std::vector<ToyUnit> awkward_units() {
  std::vector<ToyUnit> units;
  units.push_back({{{700}, {65}}, {}, false});  // An embedding: tied, gradient-only backward.
  units.push_back({{{64, 1}, {64, 1}, {1000}, {13, 1}}, {}, true});
  units.push_back({{{3000}, {7, 1}}, {}, true});
  units.push_back({{{64, 1}, {64, 1}, {1000, 0, true}, {13, 1}}, {}, true});  // Partly frozen.
  units.push_back({{{5, 1}}, {{0, 0}}, true});                                // The head: ties the embedding.
  return units;
}

inline ToyOptions options_for(int stage, DataType type, int ranks) {
  ToyOptions options;
  options.units = awkward_units();
  options.engine.stage = stage;
  options.engine.dtype = type;
  options.engine.bucket_bytes = 5000;
  options.engine.loss_scale.initial = 1024;
  options.engine.loss_scale.growth_interval = 2;
  options.ranks = ranks;
  return options;
}

inline void expect_same(const ToyResult& actual, const ToyResult& expected, const std::string& what) {
  ASSERT_EQ(actual.grad_norms.size(), expected.grad_norms.size()) << what;
  for (std::size_t i = 0; i < expected.grad_norms.size(); ++i) {
    ASSERT_EQ(std::memcmp(&actual.grad_norms[i], &expected.grad_norms[i], 8), 0)
        << what << ": norm of step " << i << " is " << actual.grad_norms[i] << ", not "
        << expected.grad_norms[i];
    ASSERT_EQ(actual.metrics[i], expected.metrics[i])
        << what << ": forward of step " << i << " read other weights";
  }
  ASSERT_EQ(actual.averages, expected.averages) << what;
  ASSERT_EQ(actual.masters.size(), expected.masters.size()) << what;
  for (std::size_t q = 0; q < expected.masters.size(); ++q) {
    for (std::size_t i = 0; i < expected.masters[q].size(); ++i) {
      ASSERT_EQ(std::memcmp(&actual.masters[q][i], &expected.masters[q][i], 4), 0)
          << what << ": parameter " << q << " element " << i << " is " << actual.masters[q][i] << ", not "
          << expected.masters[q][i];
    }
  }
}

}  // namespace forebay::testing
