#include "collectives/rendezvous/tcp_store.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "collectives/fingerprint.h"
#include "collectives/rendezvous/introduction.h"
#include "collectives/rendezvous/store_book.h"
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

// How long a rank waits for an answer, which the server has in memory. Smaller: a busy host looks like a dead
// one. Larger: a rank that asks for the first failure waits that long for a stopped server.
constexpr milliseconds kAnswerMax{5'000};
// One try to connect and to prove the secret; the server allows as much.
constexpr milliseconds kTryMax = kAdmissionMax;
constexpr milliseconds kRetryMin{5};
constexpr milliseconds kRetryMax{100};

// Connects a non-blocking socket. Returns 0, or the error number.
int connect_socket(int socket, const SocketAddress& address, SteadyClock::time_point limit) {
  if (::connect(socket, address.get(), address.bytes) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  if (!wait_for(socket, POLLOUT, limit)) return ETIMEDOUT;
  int error = 0;
  socklen_t bytes = sizeof(error);
  getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &bytes);
  return error;
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
  if (options.me.size > kTcpStoreRanksMax) {
    return invalid_argument(options.me.size, " ranks cannot meet at ", options.where, ", at most ",
                            kTcpStoreRanksMax, " can; meet in a directory that all ranks see");
  }
  std::unique_ptr<TcpStore> store(new TcpStore(options));
  if (options.me.rank == 0) {
    if (!options.listener.valid()) {
      FOREBAY_ASSIGN_OR_RETURN(options.listener, listen_once_named(options.address, limit));
    }
    FOREBAY_ASSIGN_OR_RETURN(std::unique_ptr<StoreServer> started,
                             StoreServer::start(std::move(options.listener),
                                                {.where = options.where,
                                                 .secret = options.secret,
                                                 .own = {options.address.job, introduce(options.me)}}));
    store->server_ = std::make_unique<Server>(std::move(started), options.deadline);
  }
  FOREBAY_RETURN_IF_ERROR(store->connect(limit));
  return store;
}

TcpStore::TcpStore(const TcpStoreOptions& options)
    : where_(options.where),
      address_(options.address),
      secret_(options.secret),
      me_(options.me),
      deadline_(options.deadline) {}

TcpStore::~TcpStore() {
  if (!socket_.valid() || !writer_) return;
  // The server waits for the goodbye; if it cannot be sent, the end of the connection tells the server.
  static_cast<void>(
      send_all(writer_->frame(encode(Message{MessageType::kGoodbye, {}, {}})), Clock::now() + kAnswerMax));
}

std::string TcpStore::send_all(std::string_view bytes, Clock::time_point limit) {
  while (!bytes.empty()) {
    const ssize_t count = send(socket_.number(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(count));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(socket_.number(), POLLOUT, limit)) return "it takes nothing";
    } else if (errno != EINTR) {
      broken_ = true;
      return std::strerror(errno);
    }
  }
  return {};
}

std::string TcpStore::receive(std::size_t bytes, Clock::time_point limit, std::string* received) {
  received->clear();
  while (received->size() < bytes) {
    char buffer[256];
    const ssize_t count =
        recv(socket_.number(), buffer, std::min(sizeof(buffer), bytes - received->size()), 0);
    if (count > 0) {
      received->append(buffer, static_cast<std::size_t>(count));
    } else if (count == 0) {
      return "it closed the connection";
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(socket_.number(), POLLIN, limit)) return "it says nothing";
    } else if (errno != EINTR) {
      return std::strerror(errno);
    }
  }
  return {};
}

Status TcpStore::connect(Clock::time_point limit) {
  const std::lock_guard lock(mutex_);
  for (auto pause = kRetryMin;; pause = std::min(pause * 2, kRetryMax)) {
    const Clock::time_point now = Clock::now();
    Try result = try_connect(std::min(limit, now + kTryMax));
    if (result.status.ok()) return {};
    disconnect();
    if (result.final) return result.status;
    if (Clock::now() + pause >= limit) {
      return Status(StatusCode::kTimeout, "rank ", me_.rank, " could not reach the rendezvous store at ",
                    where_, " within ", deadline_.count(), " ms: ", result.status.message(),
                    "; see whether rank 0 runs and whether that is an address of its host, which other "
                    "hosts reach");
    }
    std::this_thread::sleep_for(pause);
  }
}

void TcpStore::disconnect() {
  socket_.reset();
  reader_.reset();
  writer_.reset();
  broken_ = false;
}

bool TcpStore::come_back() {
  if (token_.empty() || returning_) return false;
  returning_ = true;
  const Status known = status_;
  const Clock::time_point limit = Clock::now() + kStoreReturnMax;
  bool back = false;
  for (auto pause = kRetryMin; !back; pause = std::min(pause * 2, kRetryMax)) {
    disconnect();
    const Try result = try_connect(limit);
    back = result.status.ok();
    if (!back && (result.final || Clock::now() + pause >= limit)) break;
    if (!back) std::this_thread::sleep_for(pause);
  }
  if (!back) disconnect();
  // The failures of single tries are not the first failure.
  if (!known.ok() || !back) status_ = known;
  returning_ = false;
  return back;
}

TcpStore::Try TcpStore::try_connect(Clock::time_point limit) {
  Result<std::vector<SocketAddress>> candidates = resolve(address_.host, address_.port);
  if (!candidates.ok()) return again(candidates.status().message());
  Try last = again("there is no such address");
  for (const SocketAddress& candidate : candidates.value()) {
    socket_ = Descriptor(socket(candidate.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket_.valid()) {
      last = again(std::strerror(errno));
      continue;
    }
    const int error = connect_socket(socket_.number(), candidate, limit);
    if (error != 0) {
      last = again(std::strerror(error));
      continue;
    }
    if (is_connected_to_itself(socket_.number())) {
      // The port was free and the kernel chose it for this end. Closed at once, so that rank 0 can listen
      // there.
      const linger reset{1, 0};
      setsockopt(socket_.number(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
      last = again("no process listens there");
      continue;
    }
    configure_store_socket(socket_.number());
    return prove(limit);
  }
  return last;
}

TcpStore::Try TcpStore::prove(Clock::time_point limit) {
  const auto invalid = [this](const std::string& reason) {
    return Try{invalid_argument("the rendezvous store at ", where_, ": ", reason), true};
  };
  const Digest nonce = random_digest();
  std::string received;
  std::string wrong = send_all(encode_hello(nonce), limit);
  if (wrong.empty()) wrong = receive(kHelloBytes, limit, &received);
  const bool foreign = received.compare(0, std::min(received.size(), kStoreMagic.size()), kStoreMagic, 0,
                                        std::min(received.size(), kStoreMagic.size())) != 0;
  if (foreign) {
    return invalid(
        "another program listens there, or another version of forebay; give a port that is free on rank 0's "
        "host");
  }
  if (!wrong.empty()) return again(wrong);
  const StoreKeys keys = derive_store_keys(secret_, nonce, *decode_hello(received));
  wrong = send_all(bytes_of(keys.client_proof), limit);
  if (wrong.empty()) wrong = receive(1, limit, &received);
  if (!wrong.empty()) return again(wrong);
  const std::string advice = "; give all ranks the same FOREBAY_SECRET_FILE or FOREBAY_SECRET";
  if (received[0] != kSecretAccepted) return invalid("rank 0 knows another secret than this rank" + advice);
  wrong = receive(sizeof(Digest), limit, &received);
  if (!wrong.empty()) return again(wrong);
  Digest proof{};
  std::copy(received.begin(), received.end(), proof.begin());
  if (!equal_digests(proof, keys.server_proof))
    return invalid("the process that listens there does not know the secret" + advice);
  writer_.emplace(keys.to_server);
  reader_.emplace(keys.to_client);
  const Greeting greeting{address_.job, introduce(me_)};
  const Result<Message> answer =
      ask_locked({MessageType::kGreeting, token_, encode(greeting)}, Clock::now() + kAnswerMax);
  if (!socket_.valid()) {
    // The server ended, or had to make room for others.
    const std::string reason = status_.message();
    status_ = {};
    return again(reason);
  }
  if (answer.ok() && !returning_) {
    local_address_ = local_end(socket_.number()).host();
    token_ = answer.value().content;
  }
  return {answer.status(), true};
}

Result<Message> TcpStore::ask(const Message& message) {
  const std::lock_guard lock(mutex_);
  return ask_locked(message, Clock::now() + kAnswerMax);
}

Result<Message> TcpStore::ask_locked(const Message& message, Clock::time_point limit) {
  if (!socket_.valid()) return status_;
  const std::string bytes = encode(message);
  if (bytes.size() > kMessageBytesMax || message.name.size() > kNameBytesMax) {
    return invalid_argument("a text of ", message.content.size(), " bytes named \"",
                            message.name.substr(0, 80), "\" does not go into the store at ", where_,
                            "; it is for the texts with which ranks meet, not for data");
  }
  // News that the server sent before it ended count, even if it takes nothing any more.
  static_cast<void>(send_all(writer_->frame(bytes), limit));
  const std::optional<Message> answer = next_answer(limit);
  if (!answer) {
    // A request that is sent twice is answered as if it were sent once.
    if (broken_ && come_back()) return ask_locked(message, Clock::now() + kAnswerMax);
    if (!status_.ok() && !socket_.valid()) return status_;
    if (Clock::now() < limit) return lose_server();
    return lose("rank 0, which serves the store at " + where_ + ", did not answer within " +
                std::to_string(kAnswerMax.count()) + " ms; look there for the reason");
  }
  if (answer->type == MessageType::kRefused) return decode_failure(answer->content);
  return *answer;
}

std::optional<Message> TcpStore::next_answer(Clock::time_point limit) {
  for (;;) {
    std::string text;
    const FrameReader::Next next = reader_->next(&text);
    if (next == FrameReader::Next::kMessage) {
      Message message;
      if (!decode(text, &message)) {
        static_cast<void>(lose("the rendezvous store at " + where_ +
                               " sent a message that cannot be read; run one version of forebay"));
        return std::nullopt;
      }
      if (message.type < MessageType::kShared) return message;
      take_in(message);
      continue;
    }
    if (next == FrameReader::Next::kBroken) {
      static_cast<void>(lose("messages of the rendezvous store at " + where_ +
                             " were changed on the way; see who can reach the network between the hosts"));
      return std::nullopt;
    }
    char buffer[16 << 10];
    const ssize_t count = recv(socket_.number(), buffer, sizeof(buffer), 0);
    if (count > 0) {
      reader_->add({buffer, static_cast<std::size_t>(count)});
    } else if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      if (!wait_for(socket_.number(), POLLIN, limit)) return std::nullopt;
    } else if (count == 0 || errno != EINTR) {
      // The system reports a connection that the network broke only once, perhaps to an earlier send.
      broken_ = broken_ || count < 0;
      if (broken_ && !token_.empty() && !returning_) return std::nullopt;
      static_cast<void>(lose_server());
      return std::nullopt;
    }
  }
}

void TcpStore::take_in(const Message& news) {
  if (news.type != MessageType::kFirstFailure) {
    shared_[news.name] = news.content;
  } else if (status_.ok()) {
    status_ = decode_failure(news.content);
  }
}

void TcpStore::drain() {
  // There is no request, so any message that is here is news.
  if (!socket_.valid()) return;
  static_cast<void>(next_answer(Clock::time_point{}));
  if (broken_ && !come_back()) static_cast<void>(lose_server());
}

Status TcpStore::lose_server() {
  return lose("rank 0, which serves the store at " + where_ +
              ", ended or cannot be reached any more; see its output");
}

Status TcpStore::lose(const std::string& reason) {
  if (status_.ok()) status_ = Status(StatusCode::kPeerLost, reason);
  socket_.reset();
  return status_;
}

void TcpStore::abandon(const Status& cause) noexcept {
  const std::lock_guard lock(mutex_);
  if (status_.ok()) status_ = cause;
  socket_.reset();
}

std::optional<std::string> TcpStore::posted(const std::string& name) {
  const std::lock_guard lock(mutex_);
  drain();
  const auto found = shared_.find(name);
  if (found == shared_.end()) return std::nullopt;
  return found->second;
}

Status TcpStore::status() {
  const std::lock_guard lock(mutex_);
  drain();
  return status_;
}

bool TcpStore::answers() {
  const std::lock_guard lock(mutex_);
  drain();
  return socket_.valid();
}

Status TcpStore::write(const std::string& name, std::string_view content) {
  FOREBAY_RETURN_IF_ERROR(status());
  return ask({MessageType::kWrite, name, std::string(content)}).status();
}

std::optional<std::string> TcpStore::read(const std::string& name) {
  if (std::optional<std::string> known = posted(name)) return known;
  Result<Message> answer = ask({MessageType::kRead, name, {}});
  if (answer.ok() && answer.value().type == MessageType::kText) return std::move(answer).value().content;
  // The text may have come before the server ended.
  return answer.ok() ? std::nullopt : posted(name);
}

std::optional<std::string> TcpStore::write_once(const std::string& name, std::string_view content) {
  Result<Message> answer = ask({MessageType::kWriteOnce, name, std::string(content)});
  if (answer.ok() && answer.value().type == MessageType::kText) return std::move(answer).value().content;
  return posted(name);
}

void TcpStore::remove(const std::string& name) noexcept {
  static_cast<void>(ask({MessageType::kRemove, name, {}}));
}

void TcpStore::post(const std::string& name, std::string_view content) noexcept {
  try {
    const Message message{MessageType::kPost, name, std::string(content)};
    const std::lock_guard lock(mutex_);
    if (!socket_.valid() || !writer_) return;
    // Sending only a part of a frame would end the connection. Posted texts fit into the socket's buffers, so
    // this waits for a congested network, but not for a stopped rank.
    static_cast<void>(send_all(writer_->frame(encode(message)), Clock::now() + kAnswerMax));
  } catch (const std::exception&) {
    // Out of memory: the text is lost, as a posted text may be.
  }
}

bool TcpStore::is_lost(int rank) {
  return posted(lost_name(rank)).has_value();
}

void TcpStore::stay_at_most(milliseconds linger) noexcept {
  if (server_ != nullptr) server_->stay_at_most(linger);
}

std::optional<Attendance> TcpStore::attendance() {
  Attendance attendance;
  const Result<Message> answer = ask({MessageType::kRoster, {}, {}});
  // When the ranks cannot be known, status() says why.
  if (!answer.ok() || !decode(answer.value().content, &attendance)) return Attendance{};
  return attendance;
}

Status TcpStore::fail(const Status& cause) noexcept {
  const Result<Message> answer = ask({MessageType::kFail, {}, encode_failure(cause)});
  if (answer.ok() && answer.value().type == MessageType::kText) return decode_failure(answer.value().content);
  const Status known = status();
  return known.ok() ? cause : known;
}

}  // namespace forebay::internal
