#include "collectives/rendezvous/store_connection.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "collectives/first_failure.h"
#include "collectives/rendezvous/store_server.h"

namespace forebay::internal {
namespace {

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

// Connects a non-blocking socket. Returns 0, or the error number.
int connect_socket(int socket, const SocketAddress& address, StoreConnection::Clock::time_point limit) {
  if (::connect(socket, address.get(), address.bytes) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  if (!wait_for(socket, POLLOUT, limit)) return ETIMEDOUT;
  int error = 0;
  socklen_t bytes = sizeof(error);
  getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &bytes);
  return error;
}

}  // namespace

StoreConnection::~StoreConnection() {
  if (!socket_.valid() || !writer_) return;
  // The server waits for the goodbye; if it cannot be sent, the end of the connection tells the server.
  static_cast<void>(
      send_all(writer_->frame(encode(Message{MessageType::kGoodbye, {}, {}})), Clock::now() + kAnswerMax));
}

std::string StoreConnection::send_all(std::string_view bytes, Clock::time_point limit) {
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

std::string StoreConnection::receive(std::size_t bytes, Clock::time_point limit, std::string* received) {
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

Status StoreConnection::connect(const StoreAddress& address, const std::string& secret, const Participant& me,
                                Clock::time_point limit) {
  const std::lock_guard lock(mutex_);
  address_ = address;
  secret_ = secret;
  me_ = me;
  for (auto pause = kRetryMin;; pause = std::min(pause * 2, kRetryMax)) {
    const Clock::time_point now = Clock::now();
    Try result = try_connect(std::min(limit, now + kTryMax));
    if (result.status.ok()) return {};
    disconnect();
    if (result.final) return result.status;
    if (Clock::now() + pause >= limit) {
      return Status(StatusCode::kTimeout,
                    "rank " + std::to_string(me.rank) + " could not reach the rendezvous store at " + where_ +
                        " within " + milliseconds_text(deadline_) + ": " + result.status.message() +
                        "; see whether rank 0 runs and whether that is an address of its host, which other "
                        "hosts reach");
    }
    std::this_thread::sleep_for(pause);
  }
}

void StoreConnection::disconnect() {
  socket_.reset();
  reader_.reset();
  writer_.reset();
  broken_ = false;
}

bool StoreConnection::come_back() {
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

StoreConnection::Try StoreConnection::try_connect(Clock::time_point limit) {
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

StoreConnection::Try StoreConnection::prove(Clock::time_point limit) {
  const auto invalid = [this](const std::string& reason) {
    return Try{Status(StatusCode::kInvalidArgument, "the rendezvous store at " + where_ + ": " + reason),
               true};
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

Result<Message> StoreConnection::ask(const Message& message) {
  const std::lock_guard lock(mutex_);
  return ask_locked(message, Clock::now() + kAnswerMax);
}

Result<Message> StoreConnection::ask_locked(const Message& message, Clock::time_point limit) {
  if (!socket_.valid()) return status_;
  const std::string bytes = encode(message);
  if (bytes.size() > kMessageBytesMax || message.name.size() > kNameBytesMax) {
    return Status(StatusCode::kInvalidArgument,
                  "a text of " + std::to_string(message.content.size()) + " bytes named \"" +
                      message.name.substr(0, 80) + "\" does not go into the store at " + where_ +
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
                milliseconds_text(kAnswerMax) + "; look there for the reason");
  }
  if (answer->type == MessageType::kRefused) return decode_failure(answer->content);
  return *answer;
}

std::optional<Message> StoreConnection::next_answer(Clock::time_point limit) {
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

void StoreConnection::take_in(const Message& news) {
  if (news.type != MessageType::kFirstFailure) {
    shared_[news.name] = news.content;
  } else if (status_.ok()) {
    status_ = decode_failure(news.content);
  }
}

void StoreConnection::drain() {
  // There is no request, so any message that is here is news.
  if (!socket_.valid()) return;
  static_cast<void>(next_answer(Clock::time_point{}));
  if (broken_ && !come_back()) static_cast<void>(lose_server());
}

Status StoreConnection::lose_server() {
  return lose("rank 0, which serves the store at " + where_ +
              ", ended or cannot be reached any more; see its output");
}

Status StoreConnection::lose(const std::string& reason) {
  if (status_.ok()) status_ = Status(StatusCode::kPeerLost, reason);
  socket_.reset();
  return status_;
}

void StoreConnection::tell(const Message& message) {
  const std::lock_guard lock(mutex_);
  if (!socket_.valid() || !writer_) return;
  // Sending only a part of a frame would end the connection. Posted texts fit into the socket's buffers, so
  // this waits for a congested network, but not for a stopped rank.
  static_cast<void>(send_all(writer_->frame(encode(message)), Clock::now() + kAnswerMax));
}

void StoreConnection::abandon(const Status& cause) {
  const std::lock_guard lock(mutex_);
  if (status_.ok()) status_ = cause;
  socket_.reset();
}

std::optional<std::string> StoreConnection::shared_text(const std::string& name) {
  const std::lock_guard lock(mutex_);
  drain();
  const auto found = shared_.find(name);
  if (found == shared_.end()) return std::nullopt;
  return found->second;
}

Status StoreConnection::status() {
  const std::lock_guard lock(mutex_);
  drain();
  return status_;
}

bool StoreConnection::answers() {
  const std::lock_guard lock(mutex_);
  drain();
  return socket_.valid();
}

}  // namespace forebay::internal
