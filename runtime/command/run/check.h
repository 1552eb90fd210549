// `forebay run --check`: what works with a program's PyTorch under each way the arena can serve it, found out
// by trying.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "runtime/command/run/environment.h"

namespace forebay {

struct RunCheck {
  std::vector<std::string> command;  // Its first word is a Python, or a script that names one.
  std::string memory;                // As --memory.
  std::string preload_library;       // From the root.
  std::chrono::seconds limit{120};   // For each probe; importing PyTorch from a slow disk takes most of it.
};

// The exit codes, beside 128 + n when a signal interrupted it.
enum : int {
  kCheckDone = 0,      // Some way serves; which is in the last line.
  kCheckNothing = 1,   // None does.
  kCheckUsage = 2,     // The command is no Python.
  kCheckNoTorch = 3,   // It has no PyTorch.
  kCheckNoDevice = 4,  // Its PyTorch sees no device.
};

// Tries each feature in a process of its own and prints what came of it: on standard output; what prevents
// it, on standard error.
int run_check(const RunCheck& check, const Environment& inherited);

}  // namespace forebay
