#include "collectives/rendezvous/tcp_store.h"

#include <atomic>
#include <optional>
#include <thread>

#include "collectives/first_failure.h"
#include "collectives/rendezvous/introduction.h"
#include "collectives/rendezvous/store_book.h"
#include "collectives/rendezvous/store_messages.h"
#include "collectives/rendezvous/store_server.h"

namespace forebay::internal {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kResolvePause{100};

// Some networks learn the name of a host only after it has started; this waits for it.
Result<Descriptor> listen_once_named(const StoreAddress& address, SteadyClock::time_point limit) {
  while (!resolve(address.host, address.port).ok() && SteadyClock::now() + kResolvePause < limit)
    std::this_thread::sleep_for(kResolvePause);
  return listen_at(address);
}

}  // namespace

// The server, which waits for goodbyes at its end.
class TcpStore::Server {
 public:
  Server(std::unique_ptr<StoreServer> server, milliseconds linger)
      : server_(std::move(server)), linger_(linger) {}
  ~Server() { server_->finish(linger_); }

  void stay_at_most(milliseconds linger) noexcept {
    milliseconds before = linger_;
    while (linger < before && !linger_.compare_exchange_weak(before, linger)) {
    }
  }

 private:
  const std::unique_ptr<StoreServer> server_;
  std::atomic<milliseconds> linger_;
};

Result<std::unique_ptr<TcpStore>> TcpStore::open(TcpStoreOptions options) {
  const SteadyClock::time_point limit = SteadyClock::now() + options.deadline;
  if (!authentication_available()) {
    return Status(StatusCode::kUnsupported,
                  "cannot use the rendezvous store at " + options.where +
                      ": this forebay was built without OpenSSL, which keeps others out of it; install "
                      "libssl-dev and build again, or meet in a directory that all ranks see");
  }
  if (options.me.size > kTcpStoreRanksMax) {
    return Status(StatusCode::kInvalidArgument,
                  std::to_string(options.me.size) + " ranks cannot meet at " + options.where + ", at most " +
                      std::to_string(kTcpStoreRanksMax) + " can; meet in a directory that all ranks see");
  }
  std::unique_ptr<Server> server;
  if (options.me.rank == 0) {
    if (!options.listener.valid()) {
      Result<Descriptor> listener = listen_once_named(options.address, limit);
      FOREBAY_RETURN_IF_ERROR(listener.status());
      options.listener = std::move(listener).value();
    }
    Result<std::unique_ptr<StoreServer>> started = StoreServer::start(
        std::move(options.listener), {.where = options.where,
                                      .secret = options.secret,
                                      .own = {options.address.job, introduce(options.me)}});
    FOREBAY_RETURN_IF_ERROR(started.status());
    server = std::make_unique<Server>(std::move(started).value(), options.deadline);
  }
  auto connection = std::make_unique<StoreConnection>(options.where, options.deadline);
  FOREBAY_RETURN_IF_ERROR(connection->connect(options.address, options.secret, options.me, limit));
  return std::unique_ptr<TcpStore>(new TcpStore(std::move(server), std::move(connection)));
}

TcpStore::TcpStore(std::unique_ptr<Server> server, std::unique_ptr<StoreConnection> connection)
    : server_(std::move(server)), connection_(std::move(connection)) {}

TcpStore::~TcpStore() = default;

const std::string& TcpStore::where() const noexcept {
  return connection_->where();
}

std::string TcpStore::local_address() const {
  return connection_->local_address();
}

Status TcpStore::write(const std::string& name, std::string_view content) {
  FOREBAY_RETURN_IF_ERROR(connection_->status());
  return connection_->ask({MessageType::kWrite, name, std::string(content)}).status();
}

std::optional<std::string> TcpStore::read(const std::string& name) const {
  if (std::optional<std::string> known = connection_->shared_text(name)) return known;
  Result<Message> answer = connection_->ask({MessageType::kRead, name, {}});
  if (answer.ok() && answer.value().type == MessageType::kText) return std::move(answer).value().content;
  // The text may have come before the server ended.
  return answer.ok() ? std::nullopt : connection_->shared_text(name);
}

std::optional<std::string> TcpStore::write_once(const std::string& name, std::string_view content) {
  Result<Message> answer = connection_->ask({MessageType::kWriteOnce, name, std::string(content)});
  if (answer.ok() && answer.value().type == MessageType::kText) return std::move(answer).value().content;
  return connection_->shared_text(name);
}

void TcpStore::remove(const std::string& name) noexcept {
  static_cast<void>(connection_->ask({MessageType::kRemove, name, {}}));
}

void TcpStore::post(const std::string& name, std::string_view content) noexcept {
  try {
    connection_->tell({MessageType::kPost, name, std::string(content)});
  } catch (const std::exception&) {
    // Out of memory: the text is lost, as a posted text may be.
  }
}

std::optional<std::string> TcpStore::posted(const std::string& name) {
  return connection_->shared_text(name);
}

bool TcpStore::is_lost(int rank) {
  return connection_->shared_text(lost_name(rank)).has_value();
}

bool TcpStore::answers() const {
  return connection_->answers();
}

void TcpStore::stay_at_most(milliseconds linger) noexcept {
  if (server_ != nullptr) server_->stay_at_most(linger);
}

void TcpStore::abandon(const Status& cause) noexcept {
  connection_->abandon(cause);
}

Status TcpStore::status() const {
  return connection_->status();
}

std::optional<Attendance> TcpStore::attendance() {
  Attendance attendance;
  const Result<Message> answer = connection_->ask({MessageType::kRoster, {}, {}});
  // When the ranks cannot be known, status() says why.
  if (!answer.ok() || !decode(answer.value().content, &attendance)) return Attendance{};
  return attendance;
}

Status TcpStore::fail(const Status& cause) noexcept {
  const Result<Message> answer = connection_->ask({MessageType::kFail, {}, encode_failure(cause)});
  if (answer.ok() && answer.value().type == MessageType::kText) return decode_failure(answer.value().content);
  const Status known = connection_->status();
  return known.ok() ? cause : known;
}

}  // namespace forebay::internal
