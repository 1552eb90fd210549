// What a rank tells the others of itself when they meet, and how two of them can disagree.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "collectives/rendezvous/rendezvous_store.h"
#include "forebay/status.h"

namespace forebay::internal {

struct Introduction {
  Participant who;
  std::string version;  // Of this library.
  std::string host;
};

// That of this process.
Introduction introduce(const Participant& who);

// Ok, or how two ranks of what should be one run differ: the same words on both sides.
Status compare(const Introduction& a, const Introduction& b);

inline constexpr std::size_t kVersionBytesMax = 32;
inline constexpr std::size_t kHostBytesMax = 64;
inline constexpr std::size_t kConfigurationBytesMax = 1024;
// More ranks than this is damage, not a run.
inline constexpr int kRanksMax = 1 << 20;

std::string encode(const Introduction& introduction);
// Takes it off the front of `text`. False for what encode() did not make.
bool decode(std::string_view* text, Introduction* introduction);

}  // namespace forebay::internal
