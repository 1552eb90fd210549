#include "collectives/process/gloo_context.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <utility>

namespace forebay::internal {
namespace {

using namespace std::chrono_literals;

// The ends of a TCP connection over loopback.
std::pair<Descriptor, Descriptor> connected() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const place = reinterpret_cast<sockaddr*>(&address);
  const Descriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::bind(listener.number(), place, sizeof(address)), 0);
  EXPECT_EQ(::listen(listener.number(), 1), 0);
  socklen_t size = sizeof(address);
  EXPECT_EQ(::getsockname(listener.number(), place, &size), 0);
  Descriptor here(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(here.number(), place, sizeof(address)), 0);
  return {std::move(here), Descriptor(::accept4(listener.number(), nullptr, nullptr, SOCK_CLOEXEC))};
}

// A process that dies before it has read all that came resets its connections.
void reset(Descriptor there, const Descriptor& here) {
  const linger at_once{.l_onoff = 1, .l_linger = 0};
  EXPECT_EQ(::setsockopt(there.number(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once)), 0);
  there = Descriptor();
  pollfd ended{here.number(), POLLIN, 0};
  EXPECT_EQ(::poll(&ended, 1, 20'000), 1);
}

TEST(GlooContext, APeerThatResetsItsConnectionIsAnErrorAndEndsNoOther) {
  const auto device = create_gloo_device("127.0.0.1");
  for (int lost = 1; lost < 4; ++lost) {
    std::array<std::pair<Descriptor, Descriptor>, 4> sockets;
    for (int peer = 1; peer < 4; ++peer) sockets.at(peer) = connected();
    reset(std::move(sockets.at(lost).second), sockets.at(lost).first);
    const auto take = [&](int peer) { return std::move(sockets.at(peer).first); };
    EXPECT_THROW(GlooContext(0, 4, device, 1'000ms, take), std::exception) << lost;
  }
}

}  // namespace
}  // namespace forebay::internal
