// TcpStore: the RendezvousStore that rank 0 serves at one address, for ranks that share no directory. Both
// ends of a connection prove that they know the run's secret before anything else is read, and every message
// after that carries a proof. Messages are not encrypted. It lets in the ranks of one run only, each once,
// and only until all are there. The first contradiction among them, or the first lost rank, becomes the
// status() of all.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "collectives/rendezvous/rendezvous_store.h"
#include "collectives/rendezvous/store_address.h"
#include "collectives/rendezvous/store_connection.h"

namespace forebay::internal {

struct TcpStoreOptions {
  std::string where;  // For messages.
  StoreAddress address;
  std::string secret;
  Participant me;
  std::chrono::milliseconds deadline{
      60'000};          // For opening it, and for rank 0 to wait for goodbyes at its end.
  Descriptor listener;  // A socket of rank 0 that listens already; else rank 0 listens at `address`.
};

class TcpStore final : public RendezvousStore {
 public:
  // Rank 0 begins to serve. Every rank connects, and may do so before rank 0 serves.
  // Errors: kUnsupported without OpenSSL; kTimeout when nobody serves within the deadline; those of
  // listen_at; kInvalidArgument when the other end knows another secret; the first failure when the server
  // does not let this rank in.
  static Result<std::unique_ptr<TcpStore>> open(TcpStoreOptions options);

  // Says goodbye. Rank 0 goes on serving until all ranks that are here have said goodbye, at most the
  // deadline, or two seconds after a failure.
  ~TcpStore() override;

  const std::string& where() const noexcept override;
  std::string local_address() const override;
  Status write(const std::string& name, std::string_view content) override;
  std::optional<std::string> read(const std::string& name) const override;
  std::optional<std::string> write_once(const std::string& name, std::string_view content) override;
  void remove(const std::string& name) noexcept override;
  void post(const std::string& name, std::string_view content) noexcept override;
  std::optional<std::string> posted(const std::string& name) override;
  int server_rank() const noexcept override { return 0; }
  void abandon(const Status& cause) noexcept override;
  bool answers() const override;
  bool is_lost(int rank) override;
  void stay_at_most(std::chrono::milliseconds linger) noexcept override;
  Status status() const override;
  std::optional<Attendance> attendance() override;
  Status fail(const Status& cause) noexcept override;

 private:
  class Server;
  TcpStore(std::unique_ptr<Server> server, std::unique_ptr<StoreConnection> connection);

  const std::unique_ptr<Server> server_;  // Null except on rank 0. Outlives connection_.
  const std::unique_ptr<StoreConnection> connection_;
};

}  // namespace forebay::internal
