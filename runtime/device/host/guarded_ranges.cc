#include "runtime/device/host/guarded_ranges.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "runtime/device/address_text.h"

namespace forebay {
namespace {

struct GuardedRange {
  std::size_t bytes = 0;
  std::string name;
  int reader_count = 0;
  int writer_count = 0;
};

struct Registry {
  std::mutex mutex;
  std::map<std::uintptr_t, GuardedRange> ranges;  // By base.
  struct sigaction previous {};
};

Registry& registry() {
  static Registry& ranges = *new Registry;  // Lives on for a signal at the very end.
  return ranges;
}

// The range that `address` lies in, or ranges.end(). With the mutex held.
auto range_at(Registry& all, std::uintptr_t address) {
  auto after = all.ranges.upper_bound(address);
  if (after == all.ranges.begin()) return all.ranges.end();
  const auto found = std::prev(after);
  return address - found->first < found->second.bytes ? found : all.ranges.end();
}

const char* access_name([[maybe_unused]] const void* context) {
#ifdef __x86_64__
  constexpr greg_t kWriteFault = 2;
  const auto* machine = static_cast<const ucontext_t*>(context);
  return (machine->uc_mcontext.gregs[REG_ERR] & kWriteFault) != 0 ? "write" : "read";
#else
  return "use";
#endif
}

// Reports a use of a closed range. The faulting instruction then runs again under the handler before this
// one, which is usually the default: the process ends.
void report_fault(int, siginfo_t* info, void* context) {
  Registry& all = registry();
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  // Without waiting: the thread that faults may be the one that has the mutex.
  if (all.mutex.try_lock()) {
    if (const auto found = range_at(all, address); found != all.ranges.end()) {
      const GuardedRange& range = found->second;
      char text[512];
      const int length = std::snprintf(text, sizeof(text),
                                       "forebay: cannot %s 0x%zx: it is byte %zu of the %s, which nobody may "
                                       "%s now; use it between the begin "
                                       "and the end of a lease, in the order of the lease's stream\n",
                                       access_name(context), static_cast<std::size_t>(address),
                                       static_cast<std::size_t>(address - found->first), range.name.c_str(),
                                       range.reader_count > 0 ? "write" : "use");
      if (length > 0)
        static_cast<void>(!::write(STDERR_FILENO, text, std::min(std::size_t(length), sizeof(text) - 1)));
    }
    all.mutex.unlock();
  }
  ::sigaction(SIGSEGV, &all.previous, nullptr);
}

// With the mutex held.
Status protect(std::uintptr_t base, const GuardedRange& range) {
  const int protection = range.writer_count > 0   ? PROT_READ | PROT_WRITE
                         : range.reader_count > 0 ? PROT_READ
                                                  : PROT_NONE;
  if (::mprotect(to_pointer(base), range.bytes, protection) == 0) return {};
  return {StatusCode::kIoError, "cannot guard the " + range.name + ": mprotect: " + std::strerror(errno) +
                                    "; raise vm.max_map_count, or turn HostBackendOptions::guard off"};
}

}  // namespace

Status guard_range(std::byte* base, std::size_t bytes, const std::string& name) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  static const bool installed = [&all] {
    struct sigaction action {};
    action.sa_sigaction = report_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    return ::sigaction(SIGSEGV, &action, &all.previous) == 0;
  }();
  static_cast<void>(installed);
  const auto after = all.ranges.lower_bound(numeric(base));
  if (range_at(all, numeric(base)) != all.ranges.end() ||
      (after != all.ranges.end() && after->first - numeric(base) < bytes)) {
    return {StatusCode::kInvalidArgument, "cannot guard " + range_text(base, bytes) + " as the " + name +
                                              ": a part of it is guarded; release those addresses first"};
  }
  const auto added = all.ranges.emplace_hint(after, numeric(base), GuardedRange{bytes, name});
  Status status = protect(added->first, added->second);
  if (!status.ok()) all.ranges.erase(added);
  return status;
}

Status protect_guarded_ranges(const std::byte* base, std::size_t bytes) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto end = all.ranges.lower_bound(numeric(base) + bytes);
  for (auto range = all.ranges.lower_bound(numeric(base)); range != end; ++range) {
    FOREBAY_RETURN_IF_ERROR(protect(range->first, range->second));
  }
  return {};
}

void forget_guarded_ranges(const std::byte* base, std::size_t bytes) noexcept {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.ranges.erase(all.ranges.lower_bound(numeric(base)), all.ranges.lower_bound(numeric(base) + bytes));
}

Status count_access(std::byte* base, AccessGuard::Access access, int change) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.ranges.find(numeric(base));
  if (found == all.ranges.end()) return {};
  GuardedRange& range = found->second;
  (access == AccessGuard::Access::kWrite ? range.writer_count : range.reader_count) += change;
  return protect(found->first, range);
}

}  // namespace forebay
