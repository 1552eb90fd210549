// `forebay run --check`: tries which features of a program's PyTorch work in each mode in which the arena can
// serve it.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "runtime/command/run/environment.h"

namespace forebay {

struct RunCheck {
  std::vector<std::string> command;  // Its first word is a Python, or a script that names one.
  std::string memory;                // As --memory.
  std::string preload_library;       // An absolute path.
  std::chrono::seconds limit{120};   // For each probe; importing PyTorch from a slow disk takes most of it.
};

// The exit codes, beside 128 + n when a signal interrupted it.
enum : int {
  kCheckDone = 0,      // Some mode works; the last line names it.
  kCheckNothing = 1,   // No mode works.
  kCheckUsage = 2,     // The command is no Python.
  kCheckNoTorch = 3,   // It has no PyTorch.
  kCheckNoDevice = 4,  // Its PyTorch sees no device.
};

// Tries each feature in a process of its own. Prints the results on standard output, and an obstacle to the
// whole check on standard error.
int run_check(const RunCheck& check, const Environment& inherited);

}  // namespace forebay
