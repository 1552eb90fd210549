// Fault: why PTX is refused, or why a kernel was stopped.
#pragma once

#include <stdexcept>
#include <string>

namespace forebay::ptx {

enum class FaultKind {
  kRefused,        // The image or its text: damaged, or more than this interpreter knows.
  kLaunch,         // The launch does not fit the kernel.
  kAddress,        // Memory that is not there, that the device may not use, or that lies in another space.
  kAlignment,      // An address that is no multiple of its access.
  kUninitialised,  // A register or shared memory is read before anything was written to it.
  kRace,           // Two threads use a word of shared memory without a barrier between them.
  kMeeting,        // Threads cannot meet at a barrier, shuffle or vote.
  kEndless,        // More instructions than the launch allows.
  kTrap,           // The kernel stopped itself, or divided an integer by zero.
};

class Fault : public std::runtime_error {
 public:
  Fault(FaultKind fault_kind, const std::string& message) : std::runtime_error(message), kind(fault_kind) {}

  FaultKind kind;
};

}  // namespace forebay::ptx
