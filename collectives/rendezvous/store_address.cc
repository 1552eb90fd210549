#include "collectives/rendezvous/store_address.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "collectives/rendezvous/store_messages.h"
#include "forebay/text.h"

namespace forebay::internal {
namespace {

constexpr std::string_view kScheme = "tcp://";
constexpr char kMakeSecret[] =
    "make one with (umask 077; openssl rand -hex 32 > FILE), copy it to every host, and set "
    "FOREBAY_SECRET_FILE=FILE for all ranks";
// Shorter ones can be guessed from a recorded connection.
constexpr std::size_t kSecretBytesMin = 32;
constexpr std::size_t kSecretBytesMax = 4096;
// Connections that wait to be accepted, at most; the kernel may allow fewer.
constexpr int kBacklog = 1024;

Result<std::string> check_secret(const std::string& given, const std::string& source) {
  const std::string secret = given.substr(0, given.find_last_not_of("\n\r ") + 1);
  if (secret.size() >= kSecretBytesMin && secret.size() <= kSecretBytesMax) return secret;
  return invalid_argument("the secret in ", source, " has ", secret.size(), " characters; it must have ",
                          kSecretBytesMin, " to ", kSecretBytesMax, "; ", kMakeSecret);
}

Result<std::string> read_secret_file(const std::string& path) {
  const std::string shown = shown_path(path);
  // Non-blocking, because a pipe of that name would wait for a writer.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat facts {};
  if (!file.valid() || fstat(file.number(), &facts) != 0) {
    return invalid_argument("cannot read the secret in ", shown, ": ", std::strerror(errno), "; ",
                            kMakeSecret);
  }
  if (!S_ISREG(facts.st_mode))
    return invalid_argument("the secret ", shown, " is no regular file; ", kMakeSecret);
  if (facts.st_uid != geteuid()) {
    return invalid_argument("the secret ", shown, " belongs to user ", facts.st_uid, ", not to ", geteuid(),
                            "; ", kMakeSecret);
  }
  if ((facts.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    return invalid_argument("other users can get at the secret in ", shown, "; run chmod 600 on it, and ",
                            kMakeSecret, " if they may have read it");
  }
  std::string content(kSecretBytesMax + 2, '\0');
  const ssize_t count = read(file.number(), content.data(), content.size());
  if (count < 0)
    return invalid_argument("cannot read the secret in ", shown, ": ", std::strerror(errno), "; ",
                            kMakeSecret);
  content.resize(static_cast<std::size_t>(count));
  return check_secret(content, shown);
}

bool is_wildcard(const SocketAddress& address) {
  if (address.storage.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr.s_addr == INADDR_ANY;
  }
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr);
}

bool can_listen(const SocketAddress& address) {
  const Descriptor socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return socket.valid() && bind(socket.number(), address.get(), address.bytes) == 0;
}

// The first usable address of an interface of this host, IPv4 before IPv6, or nothing.
std::string address_of_interface(const std::string& name) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return {};
  std::string found;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* i = all; i != nullptr && found.empty(); i = i->ifa_next) {
      if (name != i->ifa_name || i->ifa_addr == nullptr || i->ifa_addr->sa_family != family) continue;
      SocketAddress address;
      address.bytes = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      std::memcpy(&address.storage, i->ifa_addr, address.bytes);
      if (can_listen(address)) found = address.host();
    }
  }
  freeifaddrs(all);
  return found;
}

}  // namespace

bool is_store_address(std::string_view text) {
  return text.starts_with(kScheme);
}

Result<StoreAddress> parse_store_address(const std::string& text) {
  const Status wrong =
      invalid_argument("the rendezvous store \"", shown_text(text.substr(0, 200)),
                       "\" is not tcp://HOST:PORT or tcp://HOST:PORT/JOB with a port from 1 to 65535; "
                       "give such an address, or a directory");
  if (!is_store_address(text)) return wrong;
  std::string_view rest = std::string_view(text).substr(kScheme.size());
  StoreAddress address;
  if (const std::size_t slash = rest.find('/'); slash != std::string_view::npos) {
    address.job = rest.substr(slash + 1);
    rest = rest.substr(0, slash);
  }
  const bool bracketed = rest.starts_with('[');
  const std::size_t end = bracketed ? rest.find(']') : rest.rfind(':');
  if (end == std::string_view::npos) return wrong;
  address.host = bracketed ? rest.substr(1, end - 1) : rest.substr(0, end);
  const std::string_view after = rest.substr(bracketed ? end + 1 : end);
  if (address.host.empty() || !after.starts_with(':') || address.job.size() > kJobBytesMax) return wrong;
  if (!bracketed && address.host.find(':') != std::string::npos) return wrong;
  const std::string_view port = after.substr(1);
  const auto [last, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  if (error != std::errc() || last != port.data() + port.size() || address.port == 0) return wrong;
  return address;
}

std::string store_address_text(const StoreAddress& address) {
  const bool bracketed = address.host.find(':') != std::string::npos;
  const std::string host = bracketed ? "[" + address.host + "]" : address.host;
  return std::string(kScheme) + host + ":" + std::to_string(address.port) + "/" + address.job;
}

Result<std::string> read_store_secret() {
  const char* path = std::getenv("FOREBAY_SECRET_FILE");
  if (path != nullptr && *path != '\0') return read_secret_file(path);
  const char* secret = std::getenv("FOREBAY_SECRET");
  if (secret != nullptr && *secret != '\0') return check_secret(secret, "FOREBAY_SECRET");
  return invalid_argument("a rendezvous store over TCP needs a secret that only the ranks know; ",
                          kMakeSecret);
}

std::uint16_t SocketAddress::port() const noexcept {
  if (storage.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
  if (storage.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
  return 0;
}

std::string SocketAddress::host() const {
  char text[NI_MAXHOST] = {};
  return getnameinfo(get(), bytes, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0 ? text : "";
}

Result<std::vector<SocketAddress>> resolve(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* all = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &all);
  if (error != 0) {
    return Status(StatusCode::kUnavailable, "cannot find the address of \"", host,
                  "\": ", gai_strerror(error), "; give a numeric address or a name that every host knows");
  }
  std::vector<SocketAddress> found;
  for (const addrinfo* i = all; i != nullptr; i = i->ai_next) {
    if (i->ai_addrlen > sizeof(sockaddr_storage)) continue;
    std::memcpy(&found.emplace_back().storage, i->ai_addr, i->ai_addrlen);
    found.back().bytes = i->ai_addrlen;
  }
  freeaddrinfo(all);
  return found;
}

std::string listening_address(const std::string& name) {
  if (std::string found = address_of_interface(name); !found.empty()) return found;
  const Result<std::vector<SocketAddress>> candidates = resolve(name, 0);
  if (!candidates.ok()) return {};
  for (const SocketAddress& candidate : candidates.value()) {
    if (can_listen(candidate)) return candidate.host();
  }
  return {};
}

Result<std::string> reachable_address(const std::string& interface) {
  if (!interface.empty()) {
    std::string found = address_of_interface(interface);
    if (!found.empty()) return found;
    FOREBAY_ASSIGN_OR_RETURN(Descriptor socket, listen_at({interface, 0, {}}));
    return local_end(socket.number()).host();
  }
  // Connecting a datagram socket sends nothing; it chooses a route. These addresses are kept for
  // documentation.
  for (const char* elsewhere : {"198.51.100.1", "2001:db8::1"}) {
    const Result<std::vector<SocketAddress>> target = resolve(elsewhere, 9);
    if (!target.ok()) continue;
    const SocketAddress& address = target.value().front();
    const Descriptor socket(::socket(address.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (socket.valid() && connect(socket.number(), address.get(), address.bytes) == 0)
      return local_end(socket.number()).host();
  }
  return Status(
      StatusCode::kUnavailable,
      "cannot tell at which address of this host the other hosts reach it: it has no default route; "
      "set FOREBAY_INTERFACE to an interface or address of the network that the hosts share");
}

SocketAddress local_end(int socket) {
  SocketAddress address;
  address.bytes = sizeof(address.storage);
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&address.storage), &address.bytes) != 0) return {};
  return address;
}

SocketAddress far_end(int socket) {
  SocketAddress address;
  address.bytes = sizeof(address.storage);
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&address.storage), &address.bytes) != 0) return {};
  return address;
}

bool is_connected_to_itself(int socket) {
  const SocketAddress here = local_end(socket);
  const SocketAddress there = far_end(socket);
  return here.port() == there.port() && here.host() == there.host();
}

Result<Descriptor> listen_at(const StoreAddress& address) {
  return listen_at(
      address, "cannot serve the rendezvous store at " + address.host + ":" + std::to_string(address.port));
}

Result<Descriptor> listen_at(const StoreAddress& address, const std::string& what) {
  FOREBAY_ASSIGN_OR_RETURN(std::vector<SocketAddress> candidates, resolve(address.host, address.port));
  int reason = EADDRNOTAVAIL;
  for (const SocketAddress& candidate : candidates) {
    if (is_wildcard(candidate)) {
      return invalid_argument(what,
                              ": that stands for all addresses of this host; give the one at which the other "
                              "ranks reach it");
    }
    Descriptor socket(::socket(candidate.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int on = 1;
    if (socket.valid() && setsockopt(socket.number(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
        bind(socket.number(), candidate.get(), candidate.bytes) == 0 &&
        listen(socket.number(), kBacklog) == 0) {
      return socket;
    }
    reason = errno;
  }
  if (reason == EADDRNOTAVAIL) {
    return invalid_argument(
        what,
        ": no interface of this host has that address; rank 0 serves the store, so give an "
        "address of rank 0's host");
  }
  return Status(StatusCode::kUnavailable, what, ": ", std::strerror(reason),
                "; give another port, or see which program listens there (ss -ltnp)");
}

void configure_store_socket(int socket) noexcept {
  const auto set = [socket](int level, int option, int value) {
    static_cast<void>(setsockopt(socket, level, option, &value, sizeof(value)));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 4);
}

bool wait_for(int socket, short events, std::chrono::steady_clock::time_point limit) {
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(limit - std::chrono::steady_clock::now()).count();
    pollfd waiting{socket, events, 0};
    const int count = poll(&waiting, 1, static_cast<int>(std::clamp<decltype(left)>(left, 0, 60'000)));
    if (count > 0) return true;
    if (count < 0 && errno != EINTR) return false;
    if (left <= 0) return false;
  }
}

}  // namespace forebay::internal
