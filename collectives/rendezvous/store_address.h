// The address of a TCP store, the secret that keeps others out of it, and the sockets to reach it.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "forebay/descriptor.h"
#include "forebay/status.h"

namespace forebay::internal {

// "tcp://HOST:PORT" or "tcp://HOST:PORT/JOB"; an IPv6 address in brackets. JOB names the run, so that ranks
// of an earlier run are recognised.
struct StoreAddress {
  std::string host;
  std::uint16_t port = 0;
  std::string job;
};

bool is_store_address(std::string_view text);
// Errors: kInvalidArgument. Port 0 is refused too: the other ranks could not know the port that is chosen.
Result<StoreAddress> parse_store_address(const std::string& text);
std::string store_address_text(const StoreAddress& address);

// The secret in the file that FOREBAY_SECRET_FILE names, or FOREBAY_SECRET itself.
// Errors: kInvalidArgument without a secret, or when others can read it or guess it.
Result<std::string> read_store_secret();

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t bytes = 0;

  const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&storage); }
  std::uint16_t port() const noexcept;
  // "10.0.0.1" or "fd00::1"; empty without an address.
  std::string host() const;
};

// Errors: kUnavailable when the name is not known, which may change: some networks learn names late.
Result<std::vector<SocketAddress>> resolve(const std::string& host, std::uint16_t port);

// The numeric form of the first address of an interface or host name that this host can listen on, IPv4
// before IPv6 for an interface; empty when there is none.
std::string listening_address(const std::string& name);

// The numeric address at which other hosts reach this one: that of the given interface or address, else that
// of the default route. Errors: kInvalidArgument when this host has no such interface; kUnavailable without a
// default route.
Result<std::string> reachable_address(const std::string& interface);

SocketAddress local_end(int socket);
SocketAddress far_end(int socket);
// Whether the connection is to itself. This happens when nobody listens at a port of this host and the kernel
// picks that very port for the connecting end.
bool is_connected_to_itself(int socket);

// A socket that listens at that one address. Messages begin with `what`.
// Errors: kInvalidArgument for an address that this host does not have, or that stands for all its addresses;
// kUnavailable when the port is taken.
Result<Descriptor> listen_at(const StoreAddress& address, const std::string& what);
// The same for the rendezvous store.
Result<Descriptor> listen_at(const StoreAddress& address);

// Sets the socket to send small messages at once, and to end an idle connection about half a minute after the
// other end vanished.
void configure_store_socket(int socket) noexcept;

// False when `limit` passes first.
bool wait_for(int socket, short events, std::chrono::steady_clock::time_point limit);

}  // namespace forebay::internal
