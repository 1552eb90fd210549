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

std::size_t write_all(int file, const void* data, std::size_t bytes) noexcept {
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t count = ::write(file, static_cast<const char*>(data) + done, bytes - done);
    if (count < 0 && errno == EINTR) continue;
    // Some file systems say 0 where others have an error. Asked again they would say it for ever.
    if (count == 0) errno = ENOSPC;
    if (count <= 0) break;
    done += static_cast<std::size_t>(count);
  }
  return done;
}

}  // namespace forebay
