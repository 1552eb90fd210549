// TcpStore: the RendezvousStore that rank 0 serves at one address, for ranks that share no directory. Both
// ends of a connection prove that they know the run's secret before anything else is read, and every message
// after that carries a proof. Messages are not encrypted. It lets in the ranks of one run only, each once,
// and only until all are there. The first contradiction among them, or the first lost rank, becomes the
// status() of all. A connection that the network
// breaks is made again.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "collectives/rendezvous/rendezvous_store.h"
#include "collectives/rendezvous/store_address.h"
#include "collectives/rendezvous/store_messages.h"

namespace forebay::internal {

struct TcpStoreOptions {
  std::string where;  // For messages.
  StoreAddress address{};
  std::string secret{};
  Participant me{};
  // For opening it, and for rank 0 to wait for goodbyes at its end.
  std::chrono::milliseconds deadline{60'000};
  Descriptor listener{};  // A socket of rank 0 that listens already; else rank 0 listens at `address`.
};

class TcpStore final : public RendezvousStore {
 public:
  // Rank 0 begins to serve. Every rank connects, and may do so before rank 0 serves.
  // Errors: kTimeout when nobody serves within the deadline; those of
  // listen_at; kInvalidArgument when the other end knows another secret; the first failure when the server
  // does not let this rank in.
  static Result<std::unique_ptr<TcpStore>> open(TcpStoreOptions options);

  // Says goodbye. Rank 0 goes on serving until all ranks that are here have said goodbye, at most the
  // deadline, or two seconds after a failure.
  ~TcpStore() override;

  const std::string& where() const noexcept override { return where_; }
  std::string local_address() const override { return local_address_; }
  std::string secret() const override { return secret_; }
  Status write(const std::string& name, std::string_view content) override;
  std::optional<std::string> read(const std::string& name) override;
  std::optional<std::string> write_once(const std::string& name, std::string_view content) override;
  void remove(const std::string& name) noexcept override;
  void post(const std::string& name, std::string_view content) noexcept override;
  std::optional<std::string> posted(const std::string& name) override;
  int server_rank() const noexcept override { return 0; }
  void abandon(const Status& cause) noexcept override;
  bool answers() override;
  bool is_lost(int rank) override;
  void stay_at_most(std::chrono::milliseconds linger) noexcept override;
  Status status() override;
  std::optional<Attendance> attendance() override;
  Status fail(const Status& cause) noexcept override;

 private:
  using Clock = std::chrono::steady_clock;
  class Server;

  explicit TcpStore(const TcpStoreOptions& options);

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

  // Tries until the server lets this rank in.
  Status connect(Clock::time_point limit);
  // Sends a request and waits for its answer; kRefused is an error.
  Result<Message> ask(const Message& message);
  Result<Message> ask_locked(const Message& message, Clock::time_point limit);
  // The next message that is an answer; news before it are taken in. Nothing when `limit` passes.
  std::optional<Message> next_answer(Clock::time_point limit);
  void take_in(const Message& news);
  void drain();
  Status lose(const std::string& reason);
  Status lose_server();

  const std::string where_;
  const StoreAddress address_;
  const std::string secret_;
  const Participant me_;
  const std::chrono::milliseconds deadline_;
  std::unique_ptr<Server> server_;  // Null except on rank 0.
  std::string local_address_;       // Fixed once connected.
  std::mutex mutex_;
  // Guarded by mutex_.
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
