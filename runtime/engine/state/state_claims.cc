#include "runtime/engine/state/state_claims.h"

#include <pthread.h>

#include <map>
#include <mutex>

#include "forebay/error.h"
#include "forebay/text.h"
#include "runtime/engine/state/state_files.h"

namespace forebay::internal {
namespace {

// The claims of this process. A child of fork() has copies of the engines, and of their claims.
struct ClaimsOfProcess {
  std::mutex mutex;
  std::map<std::pair<dev_t, ino_t>, std::set<const StateClaims*>> by_directory;
};

ClaimsOfProcess& claims_of_process() {
  static ClaimsOfProcess& claims =
      *new ClaimsOfProcess;  // Until the end of the process, as the engines may live.
  static const int has_handlers = ::pthread_atfork([] { claims.mutex.lock(); }, [] { claims.mutex.unlock(); },
                                                   [] { claims.mutex.unlock(); });
  static_cast<void>(has_handlers);
  return claims;
}

}  // namespace

StateClaims::~StateClaims() {
  if (directories_.empty()) return;
  ClaimsOfProcess& claims = claims_of_process();
  const std::lock_guard guard(claims.mutex);
  for (const auto& directory : directories_) {
    const auto found = claims.by_directory.find(directory);
    if (found == claims.by_directory.end()) continue;
    found->second.erase(this);
    if (found->second.empty()) claims.by_directory.erase(found);
  }
}

void StateClaims::check(const StateDirectory& directory) const {
  ClaimsOfProcess& claims = claims_of_process();
  const std::lock_guard guard(claims.mutex);
  const auto found = claims.by_directory.find(directory.identity());
  if (found == claims.by_directory.end() || found->second.contains(this)) return;
  if (state_names(directory).empty()) {
    claims.by_directory.erase(found);
    return;
  }
  throw Error(
      StatusCode::kInvalidArgument,
      "cannot save in " + shown_path(directory.path()) +
          ": it holds the state of another engine of this process, which this save would replace; give "
          "each model a directory of its own, or destroy the other engine first");
}

void StateClaims::add(const StateDirectory& directory) {
  ClaimsOfProcess& claims = claims_of_process();
  const std::lock_guard guard(claims.mutex);
  const auto identity = directory.identity();
  directories_.insert(identity);
  claims.by_directory[identity].insert(this);
}

}  // namespace forebay::internal
