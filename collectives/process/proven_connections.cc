#include "collectives/process/proven_connections.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "collectives/rendezvous/byte_text.h"

namespace forebay::internal {
namespace {

using std::chrono::milliseconds;

constexpr std::string_view kMagic = "fbpeers1";
constexpr std::size_t kHelloBytes = kMagic.size() + sizeof(Digest);
constexpr std::size_t kIdentityBytes = 2 * sizeof(std::uint32_t);
// An accepted connection that has not proved itself by then is closed. Smaller: a slow rank has to try again.
// Larger: strangers keep descriptors longer.
constexpr milliseconds kProofMax{2'000};
// How many connections of strangers are kept, beside one for each that is expected. The oldest is closed
// first. Smaller: a flood closes those of ranks before they have proved themselves. Larger: more descriptors.
constexpr std::size_t kStrangersMax = 16;
// Connections accepted before the present ones have their turn.
constexpr int kAcceptBurst = 16;
// Before this rank connects again after a broken connection, and accepts again without free descriptors.
constexpr milliseconds kPause{20};

Digest digest_at(std::string_view bytes, std::size_t offset) {
  Digest digest{};
  std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(offset), digest.size(), digest.begin());
  return digest;
}

std::string hello(const Digest& nonce) {
  return std::string(kMagic).append(bytes_of(nonce));
}

}  // namespace

ProvenConnections::ProvenConnections(ProvenConnectionsOptions options, Descriptor listener)
    : options_(std::move(options)),
      listener_(std::move(listener)),
      key_(hexadecimal(random_digest())),
      targets_(static_cast<std::size_t>(options_.rank)),
      proven_(static_cast<std::size_t>(options_.planes * options_.size)) {}

Result<ProvenConnections> ProvenConnections::listen(ProvenConnectionsOptions options) {
  const std::string what = "cannot listen for the other ranks at " + options.address;
  FOREBAY_ASSIGN_OR_RETURN(Descriptor listener, listen_at({options.address, 0, {}}, what));
  return ProvenConnections(std::move(options), std::move(listener));
}

std::string ProvenConnections::introduction() const {
  const SocketAddress here = local_end(listener_.number());
  return store_address_text({here.host(), here.port(), key_});
}

Status ProvenConnections::connect(int peer, const std::string& introduction) {
  const Status unreadable(StatusCode::kPeerLost, name(peer),
                          " gave an address that cannot be read; run one version of forebay");
  const Result<StoreAddress> parsed = parse_store_address(introduction);
  if (!parsed.ok() || parsed.value().job.size() != key_.size()) return unreadable;
  const Result<std::vector<SocketAddress>> found = resolve(parsed.value().host, parsed.value().port);
  if (!found.ok()) return unreadable;
  targets_[static_cast<std::size_t>(peer)] = {found.value().front(), parsed.value().job};
  for (int plane = 0; plane < options_.planes; ++plane) {
    attempts_.push_back({.is_ours = true, .plane = plane, .peer = peer});
    FOREBAY_RETURN_IF_ERROR(start(attempts_.back()));
  }
  return {};
}

Status ProvenConnections::start(Attempt& attempt) {
  const SocketAddress& address = targets_[static_cast<std::size_t>(attempt.peer)].address;
  attempt.socket =
      Descriptor(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  attempt.stage = Stage::kConnecting;
  attempt.in.clear();
  if (!attempt.socket.valid()) {
    return Status(StatusCode::kUnavailable, "cannot make a socket: ", std::strerror(errno),
                  "; raise ulimit -n, or start fewer ranks on this host");
  }
  if (::connect(attempt.socket.number(), address.get(), address.bytes) == 0 || errno == EINPROGRESS ||
      errno == EINTR) {
    return {};
  }
  return Status(StatusCode::kPeerLost, name(attempt.peer), " at ", address.host(), ": ",
                std::strerror(errno));
}

std::vector<int> ProvenConnections::missing() const {
  std::vector<int> ranks;
  for (int peer = 0; peer < options_.size; ++peer) {
    bool all = peer != options_.rank;
    for (int plane = 0; all && plane < options_.planes; ++plane) all = proven_[index(plane, peer)].valid();
    if (!all && peer != options_.rank) ranks.push_back(peer);
  }
  return ranks;
}

Status ProvenConnections::advance(milliseconds patience) {
  const Clock::time_point begin = Clock::now();
  std::vector<pollfd> waiting{
      {listener_.number(), static_cast<short>(accept_after_ > begin ? 0 : POLLIN), 0}};
  for (const Attempt& attempt : attempts_) {
    if (attempt.stage == Stage::kPaused || accept_after_ > begin) patience = std::min(patience, kPause);
    const short events = attempt.stage == Stage::kConnecting ? POLLOUT : POLLIN;
    waiting.push_back({attempt.socket.number(), events, 0});
  }
  if (poll(waiting.data(), waiting.size(), static_cast<int>(patience.count())) < 0) return {};
  const Clock::time_point now = Clock::now();
  Status failed;
  std::size_t i = 1;
  for (Attempt& attempt : attempts_) {
    const bool is_ready = waiting[i++].revents != 0;
    if (attempt.stage == Stage::kPaused) {
      if (now >= attempt.limit) failed = start(attempt);
    } else if (is_ready) {
      failed = step(attempt);
    } else if (!attempt.is_ours && now >= attempt.limit) {
      give_up(attempt);
    }
    if (!failed.ok()) return failed;
  }
  std::erase_if(attempts_, [](const Attempt& attempt) { return attempt.stage == Stage::kEnded; });
  if (waiting[0].revents != 0) accept_some();
  return {};
}

Status ProvenConnections::step(Attempt& attempt) {
  if (attempt.stage == Stage::kConnecting) {
    int error = 0;
    socklen_t bytes = sizeof(error);
    getsockopt(attempt.socket.number(), SOL_SOCKET, SO_ERROR, &error, &bytes);
    if (error != 0) {
      return Status(StatusCode::kPeerLost, name(attempt.peer), " at ",
                    targets_[static_cast<std::size_t>(attempt.peer)].address.host(), ": ",
                    std::strerror(error));
    }
    greet(attempt);
  } else if (attempt.stage == Stage::kHello) {
    if (read(attempt, kHelloBytes + (attempt.is_ours ? 0 : kIdentityBytes))) answer_hello(attempt);
  } else if (attempt.stage == Stage::kProof) {
    if (read(attempt, sizeof(Digest))) answer_proof(attempt);
  }
  return {};
}

bool ProvenConnections::read(Attempt& attempt, std::size_t bytes) {
  char buffer[kHelloBytes + kIdentityBytes];
  const ssize_t count = recv(attempt.socket.number(), buffer, bytes - attempt.in.size(), 0);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
  if (count <= 0) {
    give_up(attempt);
    return false;
  }
  attempt.in.append(buffer, static_cast<std::size_t>(count));
  const std::size_t known = std::min(attempt.in.size(), kMagic.size());
  if (attempt.stage == Stage::kHello && attempt.in.compare(0, known, kMagic, 0, known) != 0) {
    give_up(attempt);
    return false;
  }
  return attempt.in.size() == bytes;
}

void ProvenConnections::greet(Attempt& attempt) {
  if (is_connected_to_itself(attempt.socket.number())) return give_up(attempt);
  attempt.nonce = random_digest();
  std::string bytes = hello(attempt.nonce);
  append_number(bytes, static_cast<std::uint32_t>(attempt.plane));
  append_number(bytes, static_cast<std::uint32_t>(options_.rank));
  attempt.stage = Stage::kHello;
  send(attempt, bytes);
}

void ProvenConnections::answer_hello(Attempt& attempt) {
  const Digest theirs = digest_at(attempt.in, kMagic.size());
  attempt.stage = Stage::kProof;
  if (attempt.is_ours) {
    attempt.in.clear();
    attempt.proofs = prove(attempt, attempt.nonce, theirs);
    return send(attempt, bytes_of(attempt.proofs.higher));
  }
  std::string_view identity = std::string_view(attempt.in).substr(kHelloBytes);
  std::uint32_t plane = 0;
  std::uint32_t peer = 0;
  take_number(&identity, &plane);
  take_number(&identity, &peer);
  const bool is_expected = plane < static_cast<std::uint32_t>(options_.planes) &&
                           peer > static_cast<std::uint32_t>(options_.rank) &&
                           peer < static_cast<std::uint32_t>(options_.size);
  if (!is_expected) return give_up(attempt);
  attempt.plane = static_cast<int>(plane);
  attempt.peer = static_cast<int>(peer);
  attempt.in.clear();
  const Digest nonce = random_digest();
  attempt.proofs = prove(attempt, theirs, nonce);
  send(attempt, hello(nonce));
}

void ProvenConnections::answer_proof(Attempt& attempt) {
  const Digest& expected = attempt.is_ours ? attempt.proofs.lower : attempt.proofs.higher;
  if (!equal_digests(digest_at(attempt.in, 0), expected)) return give_up(attempt);
  if (!attempt.is_ours) send(attempt, bytes_of(attempt.proofs.lower));
  if (attempt.stage == Stage::kEnded) return;
  proven_[index(attempt.plane, attempt.peer)] = std::move(attempt.socket);
  attempt.stage = Stage::kEnded;
}

ProvenConnections::Proofs ProvenConnections::prove(const Attempt& attempt, const Digest& higher_nonce,
                                                   const Digest& lower_nonce) const {
  const std::string& key = attempt.is_ours ? targets_[static_cast<std::size_t>(attempt.peer)].key : key_;
  const int higher = attempt.is_ours ? options_.rank : attempt.peer;
  const int lower = attempt.is_ours ? attempt.peer : options_.rank;
  std::string bytes(kMagic);
  append_text(bytes, options_.group);
  for (const int number : {attempt.plane, higher, lower})
    append_number(bytes, static_cast<std::uint32_t>(number));
  bytes.append(bytes_of(higher_nonce)).append(bytes_of(lower_nonce));
  const std::string secret = options_.secret + key;
  return {hmac_sha256(secret, bytes + "higher"), hmac_sha256(secret, bytes + "lower")};
}

void ProvenConnections::send(Attempt& attempt, std::string_view bytes) {
  // So few bytes always fit.
  const ssize_t count = ::send(attempt.socket.number(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (count != static_cast<ssize_t>(bytes.size())) give_up(attempt);
}

void ProvenConnections::give_up(Attempt& attempt) {
  attempt.socket.reset();
  attempt.stage = attempt.is_ours ? Stage::kPaused : Stage::kEnded;
  attempt.limit = Clock::now() + kPause;
}

void ProvenConnections::accept_some() {
  const auto is_stranger = [](const Attempt& attempt) { return !attempt.is_ours; };
  const auto expected = static_cast<std::size_t>(options_.planes * (options_.size - 1 - options_.rank));
  for (int i = 0; i < kAcceptBurst; ++i) {
    Descriptor socket(accept4(listener_.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      const bool exhausted = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      if (exhausted) accept_after_ = Clock::now() + kPause;
      return;
    }
    const auto strangers = std::count_if(attempts_.begin(), attempts_.end(), is_stranger);
    if (static_cast<std::size_t>(strangers) >= expected + kStrangersMax)
      attempts_.erase(std::find_if(attempts_.begin(), attempts_.end(), is_stranger));
    attempts_.push_back({.socket = std::move(socket), .limit = Clock::now() + kProofMax});
  }
}

}  // namespace forebay::internal
