#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "allocator/preload/events.h"
#include "forebay/check.h"

// The events that a process under the preload left behind: any file may lie there.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const int file = ::memfd_create("fuzz", MFD_CLOEXEC);
  FOREBAY_CHECK(
      file >= 0 && ::ftruncate(file, 0) == 0 && ::pwrite(file, data, size, 0) == static_cast<ssize_t>(size),
      "a file of %zu bytes cannot be made", size);
  const auto log = forebay::read_preload_events("/proc/self/fd/" + std::to_string(file));
  if (log.ok()) FOREBAY_CHECK(log.value().events.size() <= size, "more events than bytes");
  return 0;
}
