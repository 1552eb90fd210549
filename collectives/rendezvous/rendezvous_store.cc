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
  Result<std::unique_ptr<TcpStore>> store = TcpStore::open(std::move(tcp));
  FOREBAY_RETURN_IF_ERROR(store.status());
  return std::unique_ptr<RendezvousStore>(std::move(store).value());
}

// At the user's address, with the user's secret.
Result<std::unique_ptr<RendezvousStore>> open_tcp(const RendezvousOptions& options) {
  Result<StoreAddress> address = parse_store_address(options.where);
  FOREBAY_RETURN_IF_ERROR(address.status());
  Result<std::string> secret = read_store_secret();
  FOREBAY_RETURN_IF_ERROR(secret.status());
  return open_at({.where = options.where,
                  .address = std::move(address).value(),
                  .secret = std::move(secret).value(),
                  .me = {},
                  .deadline = {},
                  .listener = {}},
                 options);
}

// At an address and with a secret that rank 0 chooses and the launcher tells the others.
Result<std::unique_ptr<RendezvousStore>> open_pmix(const RendezvousOptions& options) {
  const std::string job = options.where.substr(kPmixScheme.size());
  // The ranks of a program may meet several times, in the same order.
  static std::atomic<int> meeting_count{0};
  const std::string key = "forebay.store." + std::to_string(meeting_count.fetch_add(1));
  Result<std::unique_ptr<PmixSession>> session = PmixSession::open();
  FOREBAY_RETURN_IF_ERROR(session.status());
  if (session.value()->rank() != options.me.rank) {
    return Status(
        StatusCode::kInvalidArgument,
        "this process is rank " + std::to_string(options.me.rank) + ", but the launcher calls it rank " +
            std::to_string(session.value()->rank()) +
            "; let the launcher give the ranks, or set FOREBAY_STORE to tcp://HOST:PORT or a directory");
  }
  TcpStoreOptions tcp;
  std::string card;
  if (options.me.rank == 0) {
    Result<std::string> host = reachable_address(options.interface);
    FOREBAY_RETURN_IF_ERROR(host.status());
    Result<Descriptor> listener = listen_at({host.value(), 0, job});
    FOREBAY_RETURN_IF_ERROR(listener.status());
    tcp.listener = std::move(listener).value();
    const std::string secret = hexadecimal(random_digest());
    card = secret + " " + std::to_string(local_end(tcp.listener.number()).port()) + " " + host.value();
    FOREBAY_RETURN_IF_ERROR(session.value()->publish(key, card));
  } else {
    Result<std::string> fetched = session.value()->fetch(0, key, options.limit);
    FOREBAY_RETURN_IF_ERROR(fetched.status());
    card = std::move(fetched).value();
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
  std::optional<std::string> read(const std::string& name) const override {
    return texts_->get(prefix_ + name);
  }
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
  if (options.texts != nullptr)
    return std::unique_ptr<RendezvousStore>(std::make_unique<CallersStore>(options.texts, options.where));
  if (is_store_address(options.where)) return open_tcp(options);
  if (options.where.starts_with(kPmixScheme)) return open_pmix(options);
  Result<std::unique_ptr<StoreDirectory>> directory = StoreDirectory::open(options.where);
  FOREBAY_RETURN_IF_ERROR(directory.status());
  FOREBAY_RETURN_IF_ERROR(directory.value()->come(options.me));
  return std::unique_ptr<RendezvousStore>(std::move(directory).value());
}

}  // namespace forebay::internal
