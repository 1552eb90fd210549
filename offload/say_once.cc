#include "offload/say_once.h"

#include <mutex>
#include <set>

#include "forebay/log.h"

namespace forebay::internal {
namespace {

// Messages that are remembered. Smaller: repetition. Larger: memory, where every message is another.
constexpr std::size_t kRememberedMax = 256;

struct Said {
  std::mutex mutex;
  std::set<std::string> messages;
};

}  // namespace

void say_once(const std::string& message) {
  static Said* const said = new Said;  // Never destroyed: nothing runs after main.
  {
    const std::lock_guard lock(said->mutex);
    if (said->messages.contains(message)) return;
    if (said->messages.size() < kRememberedMax) said->messages.insert(message);
  }
  log(LogLevel::kWarning, "%s", message.c_str());
}

}  // namespace forebay::internal
