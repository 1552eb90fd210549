// The facts that a rank tells the others when they meet, and how two ranks can disagree.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "collectives/rendezvous/rendezvous_store.h"
#include "forebay/status.h"

namespace forebay::internal {

struct Introduction {
  Participant who;
  std::string version;  // This library's version.
  std::string host;
};

// The introduction of this process.
Introduction introduce(const Participant& who);

// Ok, or an error that says how two ranks that should be of one run differ, in the same words on both.
Status compare(const Introduction& a, const Introduction& b);

inline constexpr std::size_t kVersionBytesMax = 32;
inline constexpr std::size_t kHostBytesMax = 64;
inline constexpr std::size_t kConfigurationBytesMax = 1024;
// A larger number of ranks is taken for damage.
inline constexpr int kRanksMax = 1 << 20;

std::string encode(const Introduction& introduction);
// Takes an introduction off the front of `text`. False if encode() did not make it.
bool decode(std::string_view* text, Introduction* introduction);

}  // namespace forebay::internal
