#include "forebay/standard_streams.h"

#include <fcntl.h>

#include <cerrno>

namespace forebay {

void keep_standard_streams() noexcept {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    if (::fcntl(descriptor, F_GETFD) >= 0 || errno != EBADF) continue;
    // The lowest that is free, and so this one. Inherited by what is started, as a standard stream is.
    if (::open("/dev/null", O_RDWR) < 0) return;
  }
}

}  // namespace forebay
