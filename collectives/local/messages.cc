#include "collectives/local/messages.h"

#include <cstring>
#include <utility>
#include <vector>

namespace forebay::internal {

std::string LocalMessages::describe(const LocalMessageEnd& end, Operation operation,
                                    std::size_t bytes) const {
  return internal::describe(issued_message(operation, bytes, ranks_.world_rank(end.peer), end.tag));
}

Status LocalMessages::send(const LocalMessageEnd& end, const std::byte* source, std::size_t bytes) {
  const LocalWorld::Nanoseconds limit = world_.deadline();
  Message message{.source = source, .bytes = bytes, .port = end.port};
  LocalWorld::Lock lock(world_.mutex());
  if (world_.has_failed()) return world_.failure();
  Queue& queue = queues_[{end.rank, end.peer, end.tag}];
  queue.push_back(&message);
  world_.notify();

  const auto what = [&] { return describe(end, Operation::kSend, bytes); };
  const auto missing = [&] { return std::vector<int>{end.peer}; };
  ranks_.await(lock, end.rank, {.what = what, .missing = missing, .limit = limit}, [&] {
    return message.done || world_.has_failed() ||
           (!message.taken && ranks_.is_gone(LocalPlane::kData, end.peer));
  });
  if (!message.done && !world_.has_failed()) ranks_.fail_locked(ranks_.lost(end.rank, what(), end.peer));
  world_.await(lock, [&] { return !message.copying; });
  if (!message.taken) std::erase(queue, &message);
  return message.done ? Status() : world_.failure();
}

Status LocalMessages::recv(const LocalMessageEnd& end, std::byte* target, std::size_t bytes) {
  const LocalWorld::Nanoseconds limit = world_.deadline();
  LocalWorld::Lock lock(world_.mutex());
  if (world_.has_failed()) return world_.failure();
  Message* const message = take(lock, end, bytes, limit);
  return message == nullptr ? world_.failure() : copy(lock, end, *message, target);
}

LocalMessages::Message* LocalMessages::take(LocalWorld::Lock& lock, const LocalMessageEnd& end,
                                            std::size_t bytes, LocalWorld::Nanoseconds limit) {
  Queue& queue = queues_[{end.peer, end.rank, end.tag}];
  const auto what = [&] { return describe(end, Operation::kRecv, bytes); };
  const auto missing = [&] { return std::vector<int>{end.peer}; };
  ranks_.await(lock, end.rank, {.what = what, .missing = missing, .limit = limit}, [&] {
    return !queue.empty() || world_.has_failed() || ranks_.is_gone(LocalPlane::kData, end.peer);
  });
  if (world_.has_failed()) return nullptr;
  if (queue.empty()) {
    ranks_.fail_locked(ranks_.lost(end.rank, what(), end.peer));
    return nullptr;
  }
  Message& message = *queue.front();
  if (message.bytes != bytes) {
    ranks_.fail_locked(invalid_argument(what(), " on ", ranks_.name_of(end.rank), ", but ",
                                        ranks_.name_of(end.peer), " sends ", message.bytes,
                                        " bytes; give both the same size"));
    return nullptr;
  }
  queue.pop_front();
  message.taken = true;
  message.copying = true;  // From here on the sender stays, so that `message` does too.
  return &message;
}

Status LocalMessages::copy(LocalWorld::Lock& lock, const LocalMessageEnd& end, Message& message,
                           std::byte* target) {
  world_.pass_link_time(lock, message.bytes);
  bool copies = !world_.has_failed();
  lock.unlock();
  Status queued;
  if (copies && message.bytes > 0) {
    if (end.port.used()) {
      queued = queue_message_copy({.sender = message.port,
                                   .receiver = end.port,
                                   .source = message.source,
                                   .target = target,
                                   .bytes = message.bytes});
    } else {
      std::memcpy(target, message.source, message.bytes);
    }
  }
  lock.lock();
  if (!queued.ok()) {
    ranks_.fail_locked(std::move(queued));
    copies = false;
  }
  message.done = message.done || copies;
  message.copying = false;
  world_.notify();
  return copies ? Status() : world_.failure();
}

}  // namespace forebay::internal
