// A build without liburing.
#include "offload/io_engine.h"

namespace forebay {

bool has_io_uring() noexcept {
  return false;
}

namespace internal {

Result<std::unique_ptr<IoEngine>> make_io_uring_engine(std::vector<int>, unsigned, bool) {
  return Status(
      StatusCode::kUnavailable,
      "this build has no io_uring: liburing was not there (Debian: liburing-dev); use the thread engine");
}

}  // namespace internal
}  // namespace forebay
