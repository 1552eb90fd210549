// Stands in for the gloo_*.cc files in a build without Gloo.
#include "collectives/process/joining.h"
#include "forebay/gloo_communicator.h"

namespace forebay {
namespace {

Status without_gloo(int size) {
  return Status(
      StatusCode::kUnsupported, "cannot connect ", size,
      " processes that do not share memory: this forebay was built without Gloo; install libgloo-dev and "
      "build again, or start all ranks on one host");
}

}  // namespace

Result<std::shared_ptr<internal::Transport>> internal::connect_gloo(const Joining& joining) {
  return without_gloo(joining.membership.size);
}

bool gloo_available() noexcept {
  return false;
}

Result<std::unique_ptr<Communicator>> create_gloo_communicator(const GlooOptions& options, Backend&) {
  return without_gloo(options.size);
}

}  // namespace forebay
