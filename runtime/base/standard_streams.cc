#include "forebay/standard_streams.h"

#include <fcntl.h>

#include <cerrno>
#include <cstdio>

namespace forebay {

void keep_standard_streams() noexcept {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    if (::fcntl(descriptor, F_GETFD) >= 0 || errno != EBADF) continue;
    // open() returns the lowest free number, which is this one. Child processes inherit it, as a standard
    // stream.
    if (::open("/dev/null", O_RDWR) < 0) return;
  }
}

Status flush_standard_output() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return {};
  return {StatusCode::kIoError, "cannot write to standard output; is it closed, or the disk full?"};
}

}  // namespace forebay
