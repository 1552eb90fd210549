#include "forebay/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "forebay/descriptor.h"
#include "forebay/units.h"

namespace forebay::internal {

Result<std::string> read_regular_file(const std::string& path, std::uint64_t most_bytes) {
  const auto refusal = [](int error) { return Status(StatusCode::kIoError, std::strerror(error)); };
  // Without O_NONBLOCK, a named pipe would wait for its other end.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat facts {};
  if (!file.valid() || ::fstat(file.number(), &facts) != 0) return refusal(errno);
  if (!S_ISREG(facts.st_mode)) return Status(StatusCode::kIoError, "it is not a regular file");
  const auto too_large = [&] {
    return Status(StatusCode::kInvalidArgument, "it has more than ", format_bytes(most_bytes));
  };
  const auto size = static_cast<std::uint64_t>(facts.st_size);
  if (size > most_bytes) return too_large();
  std::string text;
  text.reserve(size);
  // The file may grow meanwhile, and those of /proc have no size.
  char part[1 << 16];
  while (true) {
    const ssize_t count = ::read(file.number(), part, sizeof part);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return refusal(errno);
    if (count == 0) return text;
    if (text.size() + static_cast<std::uint64_t>(count) > most_bytes) return too_large();
    text.append(part, static_cast<std::size_t>(count));
  }
}

}  // namespace forebay::internal
