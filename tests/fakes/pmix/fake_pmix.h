// The fake PMIx: a libpmix.so.2 for one process, whose ranks are sessions that a test opens one by one. A
// test opens it first, and the program's own dlopen finds it by its name.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "collectives/rendezvous/pmix_abi.h"

namespace forebay::fake_pmix {

inline constexpr int kRefused = -1;

// Calls and answers of the launcher. Used by one thread.
struct FakePmix {
  using Key = std::pair<std::uint32_t, std::string>;  // A rank and its name for a value.

  std::uint32_t rank = 0;  // The next session has it, and so do values that are put.
  // Results of calls.
  int init_result = pmix::kSuccess;
  int put_result = pmix::kSuccess;
  int commit_result = pmix::kSuccess;
  int get_result = pmix::kSuccess;  // Anything else: the answer never comes.
  // The answers of questions.
  int not_found_count = 0;  // So many questions are answered before the value is there.
  bool keeps_answers = false;
  std::uint16_t type = pmix::kString;
  bool has_text = true;

  std::map<Key, std::string> put;        // Not committed.
  std::map<Key, std::string> committed;  // Seen by all.
  int finalize_count = 0;
  int get_count = 0;
  std::vector<std::pair<pmix::ValueFunction*, void*>> kept;  // Answers that are due.
};

}  // namespace forebay::fake_pmix

extern "C" {
// The state, as a new one after `reset`.
forebay::fake_pmix::FakePmix* fake_pmix(bool reset);
}
