// LocalMessages: send and recv of a local group. A send waits until its recv has copied the bytes, or has
// queued the copy where the Backends copy (device_copies.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <tuple>

#include "collectives/local/device_copies.h"
#include "collectives/local/ranks.h"

namespace forebay::internal {

// One side of a message.
struct LocalMessageEnd {
  int rank;
  int peer;
  std::uint32_t tag;
  DevicePort port;
};

// Threads: any.
class LocalMessages {
 public:
  explicit LocalMessages(LocalRanks& ranks) : ranks_(ranks), world_(ranks.world()) {}

  // Both block, at most the deadline.
  Status send(const LocalMessageEnd& end, const std::byte* source, std::size_t bytes);
  Status recv(const LocalMessageEnd& end, std::byte* target, std::size_t bytes);

 private:
  // A send that waits for its recv.
  struct Message {
    const std::byte* source;
    std::size_t bytes;
    DevicePort port;
    bool taken = false;
    bool copying = false;
    bool done = false;
  };
  using Queue = std::deque<Message*>;

  std::string describe(const LocalMessageEnd& end, Operation operation, std::size_t bytes) const;
  // Waits for the message, and takes it from its queue. Null after a failure.
  Message* take(LocalWorld::Lock& lock, const LocalMessageEnd& end, std::size_t bytes,
                LocalWorld::Nanoseconds limit);
  // Copies the message that was taken. Releases the mutex meanwhile.
  Status copy(LocalWorld::Lock& lock, const LocalMessageEnd& end, Message& message, std::byte* target);

  LocalRanks& ranks_;
  LocalWorld& world_;
  // Guarded by the world's mutex. By sender, receiver and tag.
  std::map<std::tuple<int, int, std::uint32_t>, Queue> queues_;
};

}  // namespace forebay::internal
