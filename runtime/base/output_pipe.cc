#include "forebay/output_pipe.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

namespace forebay {
namespace {

using Clock = std::chrono::steady_clock;

// How long a pipe may be without a reader. Shorter: a reader that starts late is missed. Longer: an error is
// told late.
constexpr std::chrono::seconds kReaderWait{5};
constexpr useconds_t kPauseMicroseconds = 10'000;

}  // namespace

int open_output_pipe(const char* path, int flags) noexcept {
  const auto limit = Clock::now() + kReaderWait;
  int file = -1;
  while ((file = ::open(path, flags | O_WRONLY | O_CLOEXEC | O_NONBLOCK)) < 0 && errno == ENXIO &&
         Clock::now() < limit) {
    ::usleep(kPauseMicroseconds);
  }
  if (file >= 0) ::fcntl(file, F_SETFL, ::fcntl(file, F_GETFL) & ~O_NONBLOCK);
  return file;
}

}  // namespace forebay
