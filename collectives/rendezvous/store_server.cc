#include "collectives/rendezvous/store_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>
#include <optional>
#include <system_error>
#include <vector>

#include "collectives/fingerprint.h"
#include "collectives/signal_mask.h"

namespace forebay::internal {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Bytes read from one connection before the others have their turn.
constexpr std::size_t kReadBytes = std::size_t{64} << 10;
// Bytes that wait to be read by one rank, at most. Smaller: no room for an answer and the news. Larger: more
// memory for each rank that does not read.
constexpr std::size_t kUnreadBytesMax = std::size_t{4} << 20;
// A rank that has so many bytes to read gets no posted texts. Smaller: a rank that reads a moment later
// misses some. Larger: a stopped rank takes memory.
constexpr std::size_t kPostedUnreadMax = std::size_t{64} << 10;
// How long the server accepts no connection after it had no descriptor for one.
constexpr milliseconds kAcceptPause{50};
// Connections accepted at once, before the present ones have their turn.
constexpr int kAcceptBurst = 64;

// How long the server of a failed run stays for ranks that have not come yet. Smaller: they wait until their
// deadline instead of being told. Larger: a launcher waits for rank 0.
constexpr milliseconds kLateMax{2'000};
// And for ranks that are here. They were sent the reason and may still ask for each other's votes. A stopped
// rank asks nothing and does not leave.
constexpr milliseconds kFarewellMax{2'500};

enum class Stage : std::uint8_t { kHello, kProof, kGreeting, kMember, kLeaving };

struct Connection {
  Descriptor socket;
  std::string from;
  Stage stage = Stage::kHello;
  SteadyClock::time_point limit;  // For every stage except kMember.
  Digest client_nonce{};
  StoreKeys keys{};
  std::string in;  // Bytes before the frames begin.
  std::optional<FrameReader> reader;
  std::optional<FrameWriter> writer;
  std::string out;
  int rank = -1;
  bool broken = false;
  bool reset = false;  // Broken by the network, not ended by the other end.

  bool is_stranger() const { return stage != Stage::kMember; }
  void send(const Message& message) { out += writer->frame(encode(message)); }
};

}  // namespace

class StoreServer::Loop {
 public:
  Loop(Descriptor listener, Descriptor bell, StoreServerOptions options)
      : listener_(std::move(listener)),
        bell_(std::move(bell)),
        secret_(std::move(options.secret)),
        size_(static_cast<std::size_t>(options.own.introduction.who.size)),
        book_(std::move(options.own), std::move(options.where)) {}

  void run();
  void finish(milliseconds linger) noexcept {
    linger_ = linger;
    finishing_.store(true, std::memory_order_release);
    const std::uint64_t one = 1;
    static_cast<void>(!write(bell_.number(), &one, sizeof(one)));
  }

 private:
  bool is_done(SteadyClock::time_point now);
  SteadyClock::time_point finish_limit() const;
  SteadyClock::time_point next_limit(SteadyClock::time_point now) const;
  void poll_once(SteadyClock::time_point until);
  void accept_some();
  void make_room();
  void read_from(Connection& connection);
  void read_admission(Connection& connection, std::string_view bytes);
  void read_frames(Connection& connection, std::string_view bytes);
  void greet(Connection& connection, const Message& message);
  void let_in(Connection& connection, int rank);
  void answer(Connection& connection, const Message& message);
  void write_to(Connection& connection);
  void spread_news();
  bool take_back(Connection& connection, const Greeting& greeting, const std::string& token);
  void sweep(SteadyClock::time_point now);
  // Sends the bytes that wait, then ends the connection.
  void send_away(Connection& connection) {
    connection.stage = Stage::kLeaving;
    connection.limit = SteadyClock::now() + kAdmissionMax;
  }

  const Descriptor listener_;
  const Descriptor bell_;  // Rung by finish().
  const std::string secret_;
  const std::size_t size_;
  std::atomic<bool> finishing_{false};
  milliseconds linger_{};  // Written before finishing_.
  // Used by the server's thread alone.
  StoreBook book_;
  std::list<Connection> connections_;  // In the order of their coming.
  std::map<int, SteadyClock::time_point>
      away_;  // Ranks that lost their connection, and until when they may come back.
  std::optional<SteadyClock::time_point> finish_began_;
  SteadyClock::time_point accept_after_{};
};

void StoreServer::Loop::run() {
  for (;;) {
    const SteadyClock::time_point now = SteadyClock::now();
    sweep(now);
    spread_news();
    if (is_done(now)) return;
    poll_once(next_limit(now));
  }
}

bool StoreServer::Loop::is_done(SteadyClock::time_point now) {
  if (!finishing_.load(std::memory_order_acquire)) return false;
  if (!finish_began_) finish_began_ = now;
  if (now >= finish_limit()) return true;
  // A rank that has not come yet learns why the run has failed, if it comes soon.
  if (book_.is_over() && !book_.has_answered_all()) return false;
  // Connections that are sent away have a moment to read the reason.
  return away_.empty() &&
         std::none_of(connections_.begin(), connections_.end(), [](const Connection& connection) {
           return connection.stage == Stage::kMember || !connection.out.empty();
         });
}

SteadyClock::time_point StoreServer::Loop::finish_limit() const {
  if (!book_.is_over()) return *finish_began_ + linger_;
  return *finish_began_ + std::min(linger_, book_.is_complete() ? kFarewellMax : kLateMax);
}

SteadyClock::time_point StoreServer::Loop::next_limit(SteadyClock::time_point now) const {
  SteadyClock::time_point next = now + std::chrono::seconds(60);
  if (accept_after_ > now) next = std::min(next, accept_after_);
  if (finish_began_) next = std::min(next, finish_limit());
  for (const Connection& connection : connections_) {
    if (connection.is_stranger()) next = std::min(next, connection.limit);
  }
  for (const auto& [rank, limit] : away_) next = std::min(next, limit);
  return next;
}

void StoreServer::Loop::poll_once(SteadyClock::time_point until) {
  const SteadyClock::time_point now = SteadyClock::now();
  std::vector<pollfd> waiting{{bell_.number(), POLLIN, 0}};
  waiting.push_back({listener_.number(), static_cast<short>(accept_after_ > now ? 0 : POLLIN), 0});
  std::vector<Connection*> connections;
  for (Connection& connection : connections_) {
    short events = 0;
    // Nothing is read from a rank that does not read its answers.
    if (connection.out.size() <= kMessageBytesMax) events |= POLLIN;
    if (!connection.out.empty()) events |= POLLOUT;
    waiting.push_back({connection.socket.number(), events, 0});
    connections.push_back(&connection);
  }
  const auto left = std::chrono::ceil<milliseconds>(until - now).count();
  if (poll(waiting.data(), waiting.size(), static_cast<int>(std::clamp<decltype(left)>(left, 0, 60'000))) <=
      0)
    return;
  if (waiting[0].revents != 0) {
    std::uint64_t rings = 0;
    static_cast<void>(!read(bell_.number(), &rings, sizeof(rings)));
  }
  for (std::size_t i = 0; i < connections.size(); ++i) {
    const short events = waiting[i + 2].revents;
    if ((events & (POLLIN | POLLHUP | POLLERR)) != 0) read_from(*connections[i]);
    if ((events & POLLOUT) != 0) write_to(*connections[i]);
  }
  if (waiting[1].revents != 0) accept_some();
}

void StoreServer::Loop::accept_some() {
  for (int i = 0; i < kAcceptBurst; ++i) {
    Descriptor socket(accept4(listener_.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      const bool exhausted = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      if (exhausted) accept_after_ = SteadyClock::now() + kAcceptPause;
      return;
    }
    make_room();
    configure_store_socket(socket.number());
    Connection& connection = connections_.emplace_back();
    connection.from = far_end(socket.number()).host();
    connection.socket = std::move(socket);
    connection.limit = SteadyClock::now() + kAdmissionMax;
  }
}

void StoreServer::Loop::make_room() {
  const auto is_stranger = [](const Connection& connection) { return connection.is_stranger(); };
  const auto count = std::count_if(connections_.begin(), connections_.end(), is_stranger);
  if (static_cast<std::size_t>(count) < size_ + kStrangersMax) return;
  connections_.erase(std::find_if(connections_.begin(), connections_.end(), is_stranger));
}

void StoreServer::Loop::read_from(Connection& connection) {
  char buffer[kReadBytes];
  const ssize_t count = recv(connection.socket.number(), buffer, sizeof(buffer), 0);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (count <= 0) {
    connection.broken = true;
    connection.reset = count < 0;
    return;
  }
  const std::string_view bytes(buffer, static_cast<std::size_t>(count));
  if (connection.stage == Stage::kLeaving) return;
  if (connection.reader) return read_frames(connection, bytes);
  read_admission(connection, bytes);
}

void StoreServer::Loop::read_admission(Connection& connection, std::string_view bytes) {
  // No more bytes than this are kept.
  const std::size_t wanted = connection.stage == Stage::kHello ? kHelloBytes : sizeof(Digest);
  const std::size_t taken = std::min(bytes.size(), wanted - connection.in.size());
  connection.in += bytes.substr(0, taken);
  bytes.remove_prefix(taken);
  if (connection.stage == Stage::kHello) {
    const std::size_t known = std::min(connection.in.size(), kStoreMagic.size());
    if (connection.in.compare(0, known, kStoreMagic, 0, known) != 0) {
      book_.note_refusal(connection.from, "its first bytes were no greeting of forebay");
      connection.broken = true;
      return;
    }
  }
  if (connection.in.size() < wanted) return;
  if (connection.stage == Stage::kHello) {
    connection.client_nonce = *decode_hello(connection.in);
    const Digest nonce = random_digest();
    connection.keys = derive_store_keys(secret_, connection.client_nonce, nonce);
    connection.out += encode_hello(nonce);
    connection.stage = Stage::kProof;
    connection.in.clear();
    if (!bytes.empty()) read_admission(connection, bytes);
    return;
  }
  Digest proof{};
  std::copy(connection.in.begin(), connection.in.end(), proof.begin());
  if (!equal_digests(proof, connection.keys.client_proof)) {
    book_.note_refusal(connection.from, "it knows another secret");
    connection.out += kSecretRefused;
    send_away(connection);
    return;
  }
  connection.out += kSecretAccepted;
  connection.out += bytes_of(connection.keys.server_proof);
  connection.reader.emplace(connection.keys.to_server);
  connection.writer.emplace(connection.keys.to_client);
  connection.stage = Stage::kGreeting;
  if (!bytes.empty()) read_frames(connection, bytes);
}

void StoreServer::Loop::read_frames(Connection& connection, std::string_view bytes) {
  connection.reader->add(bytes);
  std::string text;
  while (connection.stage == Stage::kGreeting || connection.stage == Stage::kMember) {
    const FrameReader::Next next = connection.reader->next(&text);
    if (next == FrameReader::Next::kMore) return;
    Message message;
    if (next == FrameReader::Next::kBroken || !decode(text, &message)) {
      connection.broken = true;
      return;
    }
    if (connection.stage == Stage::kGreeting) {
      greet(connection, message);
    } else {
      answer(connection, message);
    }
  }
}

void StoreServer::Loop::greet(Connection& connection, const Message& message) {
  Greeting greeting;
  if (message.type != MessageType::kGreeting || !decode(message.content, &greeting)) {
    connection.broken = true;
    return;
  }
  if (!message.name.empty() && take_back(connection, greeting, message.name)) return;
  if (const Status status = book_.greet(greeting, connection.from); !status.ok()) {
    connection.send({MessageType::kRefused, {}, encode_failure(status)});
    send_away(connection);
    return;
  }
  let_in(connection, greeting.introduction.who.rank);
}

void StoreServer::Loop::let_in(Connection& connection, int rank) {
  connection.rank = rank;
  connection.stage = Stage::kMember;
  connection.send({MessageType::kDone, {}, book_.token(rank)});
  for (const Message& news : book_.news_for_newcomer()) connection.send(news);
}

// A rank that came before, over a connection that is gone.
bool StoreServer::Loop::take_back(Connection& connection, const Greeting& greeting,
                                  const std::string& token) {
  if (!book_.may_return(greeting, token)) return false;
  const int rank = greeting.introduction.who.rank;
  away_.erase(rank);
  for (Connection& old : connections_) {
    if (old.rank != rank) continue;
    old.rank = -1;
    old.broken = true;
  }
  let_in(connection, rank);
  return true;
}

void StoreServer::Loop::answer(Connection& connection, const Message& message) {
  if (message.type == MessageType::kPost) return book_.post(message);
  if (message.type != MessageType::kGoodbye) return connection.send(book_.answer(connection.rank, message));
  book_.leave(connection.rank);
  connection.rank = -1;
  send_away(connection);
}

void StoreServer::Loop::write_to(Connection& connection) {
  const ssize_t count =
      send(connection.socket.number(), connection.out.data(), connection.out.size(), MSG_NOSIGNAL);
  if (count > 0) connection.out.erase(0, static_cast<std::size_t>(count));
  if (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
    connection.broken = true;
    connection.reset = true;
  }
  // The other end closes the connection once it has read everything.
  if (connection.out.empty() && connection.stage == Stage::kLeaving)
    shutdown(connection.socket.number(), SHUT_WR);
}

void StoreServer::Loop::spread_news() {
  for (const Message& message : book_.take_news()) {
    for (Connection& connection : connections_) {
      if (connection.stage != Stage::kMember) continue;
      if (message.type == MessageType::kPosted && connection.out.size() > kPostedUnreadMax) continue;
      connection.send(message);
      connection.broken = connection.broken || connection.out.size() > kUnreadBytesMax;
    }
  }
}

void StoreServer::Loop::sweep(SteadyClock::time_point now) {
  for (auto i = connections_.begin(); i != connections_.end();) {
    const bool expired = i->is_stranger() && now >= i->limit;
    if (!i->broken && !expired) {
      ++i;
      continue;
    }
    if (i->rank >= 0 && i->reset) {
      away_[i->rank] = now + kStoreReturnMax;
    } else if (i->rank >= 0) {
      book_.lose(i->rank);
    }
    i = connections_.erase(i);
  }
  for (auto i = away_.begin(); i != away_.end();) {
    if (now < i->second) {
      ++i;
      continue;
    }
    book_.lose(i->first);
    i = away_.erase(i);
  }
}

StoreServer::StoreServer(std::unique_ptr<Loop> loop) : loop_(std::move(loop)) {}

Result<std::unique_ptr<StoreServer>> StoreServer::start(Descriptor listener, StoreServerOptions options) {
  Descriptor bell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!bell.valid()) {
    return Status(StatusCode::kUnavailable, "cannot serve the rendezvous store at ", options.where, ": ",
                  std::strerror(errno), "; raise ulimit -n");
  }
  const std::string where = options.where;
  std::unique_ptr<StoreServer> server(
      new StoreServer(std::make_unique<Loop>(std::move(listener), std::move(bell), std::move(options))));
  const BlockedSignals blocked;
  try {
    server->thread_ = std::thread([loop = server->loop_.get()] { loop->run(); });
  } catch (const std::system_error& error) {
    return Status(StatusCode::kUnavailable, "cannot start a thread for the rendezvous store at ", where, ": ",
                  error.what(), "; raise ulimit -u or -v");
  }
  return server;
}

void StoreServer::finish(milliseconds linger) {
  if (!thread_.joinable()) return;
  loop_->finish(linger);
  thread_.join();
}

StoreServer::~StoreServer() {
  finish(milliseconds(0));
}

}  // namespace forebay::internal
