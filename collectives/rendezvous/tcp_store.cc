#include "collectives/rendezvous/tcp_store.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

#include "collectives/first_failure.h"
#include "collectives/rendezvous/store_book.h"
#include "collectives/rendezvous/store_messages.h"
#include "collectives/rendezvous/store_server.h"

namespace forebay::internal {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How long a rank waits for an answer, which the server has in memory. Smaller: a busy host looks like a dead
// one. Larger: a rank that asks for the first failure waits that long for a stopped server.
constexpr milliseconds kAnswerMax{5'000};
// One try to connect and to prove the secret; the server allows as much.
constexpr milliseconds kTryMax = kAdmissionMax;
constexpr milliseconds kRetryMin{5};
constexpr milliseconds kRetryMax{100};

std::string milliseconds_text(milliseconds length) {
  return std::to_string(length.count()) + " ms";
}

// Some networks learn the name of a host only after it has started; this waits for it.
Result<Descriptor> listen_once_named(const StoreAddress& address, SteadyClock::time_point limit) {
  while (!resolve(address.host, address.port).ok() && SteadyClock::now() + kRetryMax < limit)
    std::this_thread::sleep_for(kRetryMax);
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

// The connection to the server.
class TcpStore::Line {
 public:
  Line(std::string where, milliseconds deadline) : where_(std::move(where)), deadline_(deadline) {}
  ~Line();

  Status connect(const TcpStoreOptions& options, SteadyClock::time_point limit);

  const std::string& where() const noexcept { return where_; }
  const std::string& local_address() const noexcept { return local_address_; }
  // The answer; kRefused is an error.
  Result<Message> ask(const Message& message);
  // Sends a message without an answer, if the connection takes it.
  void tell(const Message& message);
  void abandon(const Status& cause);
  // A text that the server has sent unasked.
  std::optional<std::string> shared_text(const std::string& name);
  Status status();
  bool answers();

 private:
  // The outcome of one try to connect.
  struct Try {
    Status status;       // Ok: connected.
    bool final = false;  // Another try would end the same way.
  };

  Try try_connect(SteadyClock::time_point limit);
  Try prove(SteadyClock::time_point limit);
  void disconnect();
  // Connects again as the same rank, after the network has broken the connection.
  bool come_back();
  Try again(const std::string& reason) const { return {Status(StatusCode::kTimeout, reason)}; }
  // Sends all bytes, or receives exactly `bytes`. Returns "", or the reason why not.
  std::string send_all(std::string_view bytes, SteadyClock::time_point limit);
  std::string receive(std::size_t bytes, SteadyClock::time_point limit, std::string* received);

  Result<Message> ask_locked(const Message& message, SteadyClock::time_point limit);
  // The next message that is an answer; news before it are taken in. Nothing when `limit` passes.
  std::optional<Message> next_answer(SteadyClock::time_point limit);
  void take_in(const Message& news);
  void drain();
  Status lose(const std::string& reason);
  Status lose_server();

  const std::string where_;
  const milliseconds deadline_;
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

TcpStore::Line::~Line() {
  if (!socket_.valid() || !writer_) return;
  // The server waits for the goodbye; if it cannot be sent, the end of the connection tells the server.
  static_cast<void>(send_all(writer_->frame(encode(Message{MessageType::kGoodbye, {}, {}})),
                             SteadyClock::now() + kAnswerMax));
}

std::string TcpStore::Line::send_all(std::string_view bytes, SteadyClock::time_point limit) {
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

std::string TcpStore::Line::receive(std::size_t bytes, SteadyClock::time_point limit, std::string* received) {
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

Status TcpStore::Line::connect(const TcpStoreOptions& options, SteadyClock::time_point limit) {
  const std::lock_guard lock(mutex_);
  address_ = options.address;
  secret_ = options.secret;
  me_ = options.me;
  for (auto pause = kRetryMin;; pause = std::min(pause * 2, kRetryMax)) {
    const SteadyClock::time_point now = SteadyClock::now();
    Try result = try_connect(std::min(limit, now + kTryMax));
    if (result.status.ok()) return {};
    disconnect();
    if (result.final) return result.status;
    if (SteadyClock::now() + pause >= limit) {
      return Status(StatusCode::kTimeout,
                    "rank " + std::to_string(options.me.rank) + " could not reach the store at " + where_ +
                        " within " + milliseconds_text(deadline_) + ": " + result.status.message() +
                        "; see whether rank 0 runs and whether that is an address of its host, which other "
                        "hosts reach");
    }
    std::this_thread::sleep_for(pause);
  }
}

void TcpStore::Line::disconnect() {
  socket_.reset();
  reader_.reset();
  writer_.reset();
  broken_ = false;
}

bool TcpStore::Line::come_back() {
  if (token_.empty() || returning_) return false;
  returning_ = true;
  const Status known = status_;
  const SteadyClock::time_point limit = SteadyClock::now() + kStoreReturnMax;
  bool back = false;
  for (auto pause = kRetryMin; !back; pause = std::min(pause * 2, kRetryMax)) {
    disconnect();
    const Try result = try_connect(limit);
    back = result.status.ok();
    if (!back && (result.final || SteadyClock::now() + pause >= limit)) break;
    if (!back) std::this_thread::sleep_for(pause);
  }
  if (!back) disconnect();
  // The failures of single tries are not the first failure.
  if (!known.ok() || !back) status_ = known;
  returning_ = false;
  return back;
}

TcpStore::Line::Try TcpStore::Line::try_connect(SteadyClock::time_point limit) {
  Result<std::vector<SocketAddress>> candidates = resolve(address_.host, address_.port);
  if (!candidates.ok()) return again(candidates.status().message());
  Try last = again("there is no such address");
  for (const SocketAddress& candidate : candidates.value()) {
    socket_ = Descriptor(socket(candidate.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket_.valid()) {
      last = again(std::strerror(errno));
      continue;
    }
    int error = 0;
    if (::connect(socket_.number(), candidate.get(), candidate.bytes) != 0) {
      error = errno;
      if (error == EINPROGRESS) {
        socklen_t bytes = sizeof(error);
        if (!wait_for(socket_.number(), POLLOUT, limit)) {
          error = ETIMEDOUT;
        } else {
          getsockopt(socket_.number(), SOL_SOCKET, SO_ERROR, &error, &bytes);
        }
      }
    }
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

TcpStore::Line::Try TcpStore::Line::prove(SteadyClock::time_point limit) {
  const auto invalid = [this](const std::string& reason) {
    return Try{Status(StatusCode::kInvalidArgument, "the store at " + where_ + ": " + reason), true};
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
      ask_locked({MessageType::kGreeting, token_, encode(greeting)}, SteadyClock::now() + kAnswerMax);
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

Result<Message> TcpStore::Line::ask(const Message& message) {
  const std::lock_guard lock(mutex_);
  return ask_locked(message, SteadyClock::now() + kAnswerMax);
}

Result<Message> TcpStore::Line::ask_locked(const Message& message, SteadyClock::time_point limit) {
  if (!socket_.valid()) return status_;
  const std::string bytes = encode(message);
  if (bytes.size() > kMessageBytesMax || message.name.size() > kNameBytesMax) {
    return Status(StatusCode::kInvalidArgument, "a text of " + std::to_string(message.content.size()) +
                                                    " bytes named \"" + message.name.substr(0, 80) +
                                                    "\" does not go into the store at " + where_ +
                                                    "; it is for what ranks need to meet, not for data");
  }
  // News that the server sent before it ended count, even if it takes nothing any more.
  static_cast<void>(send_all(writer_->frame(bytes), limit));
  const std::optional<Message> answer = next_answer(limit);
  if (!answer) {
    // A request that is sent twice is answered as if it were sent once.
    if (broken_ && come_back()) return ask_locked(message, SteadyClock::now() + kAnswerMax);
    if (!status_.ok() && !socket_.valid()) return status_;
    if (SteadyClock::now() < limit) return lose_server();
    return lose("rank 0, which serves the store at " + where_ + ", did not answer within " +
                milliseconds_text(kAnswerMax) + "; look there for the reason");
  }
  if (answer->type == MessageType::kRefused) return decode_failure(answer->content);
  return *answer;
}

std::optional<Message> TcpStore::Line::next_answer(SteadyClock::time_point limit) {
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

void TcpStore::Line::take_in(const Message& news) {
  if (news.type != MessageType::kFirstFailure) {
    shared_[news.name] = news.content;
  } else if (status_.ok()) {
    status_ = decode_failure(news.content);
  }
}

void TcpStore::Line::drain() {
  // There is no request, so any message that is here is news.
  if (!socket_.valid()) return;
  static_cast<void>(next_answer(SteadyClock::time_point{}));
  if (broken_ && !come_back()) static_cast<void>(lose_server());
}

Status TcpStore::Line::lose_server() {
  return lose("rank 0, which serves the store at " + where_ +
              ", ended or cannot be reached any more; see its output");
}

Status TcpStore::Line::lose(const std::string& reason) {
  if (status_.ok()) status_ = Status(StatusCode::kPeerLost, reason);
  socket_.reset();
  return status_;
}

void TcpStore::Line::tell(const Message& message) {
  const std::lock_guard lock(mutex_);
  if (!socket_.valid() || !writer_) return;
  // Sending only a part of a frame would end the connection. Posted texts fit into the socket's buffers, so
  // this waits for a congested network, but not for a stopped rank.
  static_cast<void>(send_all(writer_->frame(encode(message)), SteadyClock::now() + kAnswerMax));
}

void TcpStore::Line::abandon(const Status& cause) {
  const std::lock_guard lock(mutex_);
  if (status_.ok()) status_ = cause;
  socket_.reset();
}

std::optional<std::string> TcpStore::Line::shared_text(const std::string& name) {
  const std::lock_guard lock(mutex_);
  drain();
  const auto found = shared_.find(name);
  if (found == shared_.end()) return std::nullopt;
  return found->second;
}

Status TcpStore::Line::status() {
  const std::lock_guard lock(mutex_);
  drain();
  return status_;
}

bool TcpStore::Line::answers() {
  const std::lock_guard lock(mutex_);
  drain();
  return socket_.valid();
}

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
  auto line = std::make_unique<Line>(options.where, options.deadline);
  FOREBAY_RETURN_IF_ERROR(line->connect(options, limit));
  return std::unique_ptr<TcpStore>(new TcpStore(std::move(server), std::move(line)));
}

TcpStore::TcpStore(std::unique_ptr<Server> server, std::unique_ptr<Line> line)
    : server_(std::move(server)), line_(std::move(line)) {}

TcpStore::~TcpStore() = default;

const std::string& TcpStore::where() const noexcept {
  return line_->where();
}

std::string TcpStore::local_address() const {
  return line_->local_address();
}

Status TcpStore::write(const std::string& name, std::string_view content) {
  FOREBAY_RETURN_IF_ERROR(line_->status());
  return line_->ask({MessageType::kWrite, name, std::string(content)}).status();
}

std::optional<std::string> TcpStore::read(const std::string& name) const {
  if (std::optional<std::string> known = line_->shared_text(name)) return known;
  Result<Message> answer = line_->ask({MessageType::kRead, name, {}});
  if (answer.ok() && answer.value().type == MessageType::kText) return std::move(answer).value().content;
  // The text may have come before the server ended.
  return answer.ok() ? std::nullopt : line_->shared_text(name);
}

std::optional<std::string> TcpStore::write_once(const std::string& name, std::string_view content) {
  Result<Message> answer = line_->ask({MessageType::kWriteOnce, name, std::string(content)});
  if (answer.ok() && answer.value().type == MessageType::kText) return std::move(answer).value().content;
  return line_->shared_text(name);
}

void TcpStore::remove(const std::string& name) noexcept {
  static_cast<void>(line_->ask({MessageType::kRemove, name, {}}));
}

void TcpStore::post(const std::string& name, std::string_view content) noexcept {
  try {
    line_->tell({MessageType::kPost, name, std::string(content)});
  } catch (const std::exception&) {
    // Out of memory: the text is lost, as a posted text may be.
  }
}

std::optional<std::string> TcpStore::posted(const std::string& name) {
  return line_->shared_text(name);
}

bool TcpStore::is_lost(int rank) {
  return line_->shared_text(lost_name(rank)).has_value();
}

bool TcpStore::answers() const {
  return line_->answers();
}

void TcpStore::stay_at_most(milliseconds linger) noexcept {
  if (server_ != nullptr) server_->stay_at_most(linger);
}

void TcpStore::abandon(const Status& cause) noexcept {
  line_->abandon(cause);
}

Status TcpStore::status() const {
  return line_->status();
}

std::optional<Attendance> TcpStore::attendance() {
  Attendance attendance;
  const Result<Message> answer = line_->ask({MessageType::kRoster, {}, {}});
  // When the ranks cannot be known, status() says why.
  if (!answer.ok() || !decode(answer.value().content, &attendance)) return Attendance{};
  return attendance;
}

Status TcpStore::fail(const Status& cause) noexcept {
  const Result<Message> answer = line_->ask({MessageType::kFail, {}, encode_failure(cause)});
  if (answer.ok() && answer.value().type == MessageType::kText) return decode_failure(answer.value().content);
  const Status known = line_->status();
  return known.ok() ? cause : known;
}

}  // namespace forebay::internal
