// StoreConnection: the connection of one rank to the server of a TCP store. Both ends prove that they know
// the secret before anything else is read. When the network breaks the connection it is made again.
#pragma once

#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "collectives/rendezvous/rendezvous_store.h"
#include "collectives/rendezvous/store_address.h"
#include "collectives/rendezvous/store_messages.h"
#include "forebay/status.h"

namespace forebay::internal {

// Threads: any.
class StoreConnection {
 public:
  using Clock = std::chrono::steady_clock;

  // `where` and `deadline` are for messages.
  StoreConnection(std::string where, std::chrono::milliseconds deadline)
      : where_(std::move(where)), deadline_(deadline) {}
  // Says goodbye.
  ~StoreConnection();
  StoreConnection(const StoreConnection&) = delete;
  StoreConnection& operator=(const StoreConnection&) = delete;

  // Tries until the server lets `me` in. Once, before anything else.
  // Errors: kTimeout at `limit`; kInvalidArgument when the other end is not this store or knows another
  //         secret; the first failure when the server does not let this rank in.
  Status connect(const StoreAddress& address, const std::string& secret, const Participant& me,
                 Clock::time_point limit);

  const std::string& where() const noexcept { return where_; }
  const std::string& local_address() const noexcept { return local_address_; }
  // Sends a request and waits for its answer; kRefused is an error.
  Result<Message> ask(const Message& message);
  // Sends a message without an answer, if the connection takes it.
  void tell(const Message& message);
  // Asks nothing more: `cause` becomes status(), unless there is an error already.
  void abandon(const Status& cause);
  // A text that the server has sent unasked.
  std::optional<std::string> shared_text(const std::string& name);
  // Ok, or the first failure of the run as far as the server has told it, or the loss of the server.
  Status status();
  // Whether the server can still be asked.
  bool answers();

 private:
  // The outcome of one try to connect.
  struct Try {
    Status status;       // Ok: connected.
    bool final = false;  // Another try would end the same way.
  };

  Try try_connect(Clock::time_point limit);
  Try prove(Clock::time_point limit);
  void disconnect();
  // Connects again as the same rank, after the network has broken the connection.
  bool come_back();
  Try again(const std::string& reason) const { return {Status(StatusCode::kTimeout, reason)}; }
  // Sends all bytes, or receives exactly `bytes`. Returns "", or the reason why not.
  std::string send_all(std::string_view bytes, Clock::time_point limit);
  std::string receive(std::size_t bytes, Clock::time_point limit, std::string* received);

  Result<Message> ask_locked(const Message& message, Clock::time_point limit);
  // The next message that is an answer; news before it are taken in. Nothing when `limit` passes.
  std::optional<Message> next_answer(Clock::time_point limit);
  void take_in(const Message& news);
  void drain();
  Status lose(const std::string& reason);
  Status lose_server();

  const std::string where_;
  const std::chrono::milliseconds deadline_;
  std::string local_address_;  // Fixed once connected.
  std::mutex mutex_;
  // Guarded by mutex_.
  StoreAddress address_;
  std::string secret_;
  Participant me_;
  std::string token_;    // The server knows this rank by it, once it was let in.
  bool broken_ = false;  // The network broke the connection.
  bool returning_ = false;
  Descriptor socket_;
  std::optional<FrameReader> reader_;
  std::optional<FrameWriter> writer_;
  std::unordered_map<std::string, std::string> shared_;
  Status status_;  // The first failure.
};

}  // namespace forebay::internal
