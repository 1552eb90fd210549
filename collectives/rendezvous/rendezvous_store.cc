#include "collectives/rendezvous/rendezvous_store.h"

#include <algorithm>
#include <atomic>
#include <sstream>

#include "collectives/rendezvous/authentication.h"
#include "collectives/rendezvous/pmix_session.h"
#include "collectives/rendezvous/store_directory.h"
#include "collectives/rendezvous/tcp_store.h"

namespace forebay::internal {
namespace {

constexpr std::string_view kPmixScheme = "pmix://";

Result<std::unique_ptr<RendezvousStore>> open_at(TcpStoreOptions tcp, const RendezvousOptions& options) {
  tcp.me = options.me;
  const auto left = options.limit - std::chrono::steady_clock::now();
  tcp.deadline = std::max(std::chrono::ceil<std::chrono::milliseconds>(left), std::chrono::milliseconds(1));
  return TcpStore::open(std::move(tcp));
}

// At the user's address, with the user's secret.
Result<std::unique_ptr<RendezvousStore>> open_tcp(const RendezvousOptions& options) {
  TcpStoreOptions tcp{.where = options.where};
  FOREBAY_ASSIGN_OR_RETURN(tcp.address, parse_store_address(options.where));
  FOREBAY_ASSIGN_OR_RETURN(tcp.secret, read_store_secret());
  return open_at(std::move(tcp), options);
}

// At an address and with a secret that rank 0 chooses and the launcher tells the others.
Result<std::unique_ptr<RendezvousStore>> open_pmix(const RendezvousOptions& options) {
  const std::string job = options.where.substr(kPmixScheme.size());
  // The ranks of a program may meet several times, in the same order.
  static std::atomic<int> meeting_count{0};
  const std::string key = "forebay.store." + std::to_string(meeting_count.fetch_add(1));
  FOREBAY_ASSIGN_OR_RETURN(std::unique_ptr<PmixSession> session, PmixSession::open());
  if (session->rank() != options.me.rank) {
    return invalid_argument(
        "this process is rank ", options.me.rank, ", but the launcher calls it rank ", session->rank(),
        "; let the launcher give the ranks, or set FOREBAY_STORE to tcp://HOST:PORT or a directory");
  }
  TcpStoreOptions tcp;
  std::string card;
  if (options.me.rank == 0) {
    FOREBAY_ASSIGN_OR_RETURN(std::string host, reachable_address(options.interface));
    FOREBAY_ASSIGN_OR_RETURN(tcp.listener, listen_at({host, 0, job}));
    const std::string secret = hexadecimal(random_digest());
    card = secret + " " + std::to_string(local_end(tcp.listener.number()).port()) + " " + host;
    FOREBAY_RETURN_IF_ERROR(session->publish(key, card));
  } else {
    FOREBAY_ASSIGN_OR_RETURN(card, session->fetch(0, key, options.limit));
  }
  std::istringstream text(card);
  text >> tcp.secret >> tcp.address.port >> tcp.address.host;
  if (!text) {
    return Status(
        StatusCode::kCorruption,
        "the address that rank 0 gave the launcher is damaged; run the same version of forebay on all ranks");
  }
  tcp.address.job = job;
  tcp.where = "tcp://" + tcp.address.host + ":" + std::to_string(tcp.address.port) + "/" + job;
  return open_at(std::move(tcp), options);
}

// The caller's texts as a store.
class CallersStore final : public RendezvousStore {
 public:
  CallersStore(std::shared_ptr<RendezvousTexts> texts, const std::string& prefix)
      : texts_(std::move(texts)), prefix_(prefix.empty() ? prefix : prefix + "/") {}

  const std::string& where() const noexcept override { return where_; }
  Status write(const std::string& name, std::string_view content) override {
    return texts_->set(prefix_ + name, content);
  }
  std::optional<std::string> read(const std::string& name) override { return texts_->get(prefix_ + name); }
  std::optional<std::string> write_once(const std::string& name, std::string_view content) override {
    if (!texts_->set_if_absent(prefix_ + name, content).ok()) return std::nullopt;
    return read(name);
  }
  void remove(const std::string& name) noexcept override { texts_->remove(prefix_ + name); }

 private:
  const std::shared_ptr<RendezvousTexts> texts_;
  const std::string prefix_;
  const std::string where_ = "the rendezvous store of the program";
};

}  // namespace

Result<std::unique_ptr<RendezvousStore>> open_rendezvous(const RendezvousOptions& options) {
  FOREBAY_RETURN_IF_ERROR(check_randomness());
  if (options.texts != nullptr) return std::make_unique<CallersStore>(options.texts, options.where);
  if (is_store_address(options.where)) return open_tcp(options);
  if (options.where.starts_with(kPmixScheme)) return open_pmix(options);
  FOREBAY_ASSIGN_OR_RETURN(std::unique_ptr<StoreDirectory> directory, StoreDirectory::open(options.where));
  FOREBAY_RETURN_IF_ERROR(directory->come(options.me));
  return directory;
}

}  // namespace forebay::internal
