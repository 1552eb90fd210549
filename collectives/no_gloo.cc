// What stands for gloo_communicator.cc in a build without Gloo.
#include "forebay/gloo_communicator.h"

namespace forebay {

bool gloo_available() noexcept {
  return false;
}

Result<std::unique_ptr<Communicator>> create_gloo_communicator(const GlooOptions& options, Backend&) {
  return Status(
      StatusCode::kUnsupported,
      "cannot connect " + std::to_string(options.size) +
          " processes: this forebay was built without Gloo; install libgloo-dev and build again, or run the "
          "ranks as threads with --communicator local");
}

}  // namespace forebay
