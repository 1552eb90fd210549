#include "forebay/standard_streams.h"

#include <fcntl.h>

#include <cerrno>

namespace forebay {

void keep_standard_streams() noexcept {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    if (::fcntl(descriptor, F_GETFD) >= 0 || errno != EBADF) continue;
    // open() returns the lowest free descriptor, so this one. Child processes inherit it, as they do a
    // standard stream.
    if (::open("/dev/null", O_RDWR) < 0) return;
  }
}

}  // namespace forebay
