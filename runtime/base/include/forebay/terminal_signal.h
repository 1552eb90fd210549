// Signals of the terminal, for programs that pass signals on to others.
#pragma once

#include <signal.h>
#include <unistd.h>

#include "forebay/language.h"

namespace forebay::internal {

// Whether the terminal sent this signal, of sigwaitinfo(), to all processes of the foreground group: they
// need it no second time. A hangup goes to the leader of the session alone.
inline bool all_were_sent(const siginfo_t& signal) noexcept {
  if (signal.si_code != SI_KERNEL) return false;
  return signal.si_signo != SIGHUP || ::getsid(0) != ::getpid();
}

}  // namespace forebay::internal
