#include "forebay/standard_streams.h"

#include <fcntl.h>

#include <cerrno>

namespace forebay {

void keep_standard_streams() noexcept {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    if (::fcntl(descriptor, F_GETFD) >= 0 || errno != EBADF) continue;
    // open() returns the lowest free number, which is this one. Child processes inherit it, as a standard
    // stream.
    if (::open("/dev/null", O_RDWR) < 0) return;
  }
}

}  // namespace forebay
