#include "collectives/process/proven_connections.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <random>

#include "collectives/rendezvous/byte_text.h"

namespace forebay::internal {
namespace {

using namespace std::chrono_literals;

ProvenConnections listen(int rank, const std::string& group = "run", const std::string& secret = {}) {
  Result<ProvenConnections> made = ProvenConnections::listen({.address = "127.0.0.1",
                                                              .group = group,
                                                              .secret = secret,
                                                              .rank = rank,
                                                              .size = 2,
                                                              .world_ranks = {0, 1},
                                                              .planes = 2});
  EXPECT_TRUE(made.ok()) << made.status().to_string();
  return std::move(made).value();
}

// Until both have what they need, or `patience` has passed.
bool meet(ProvenConnections& lower, ProvenConnections& higher, std::chrono::milliseconds patience) {
  const auto limit = std::chrono::steady_clock::now() + patience;
  while (std::chrono::steady_clock::now() < limit) {
    EXPECT_TRUE(lower.advance(1ms).ok());
    EXPECT_TRUE(higher.advance(1ms).ok());
    if (lower.missing().empty() && higher.missing().empty()) return true;
  }
  return false;
}

Descriptor call(const ProvenConnections& listener) {
  const StoreAddress address = parse_store_address(listener.introduction()).value();
  const SocketAddress target = resolve(address.host, address.port).value().front();
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(socket.number(), target.get(), target.bytes), 0);
  return socket;
}

TEST(ProvenConnections, EachPlaneOfBothRanksIsOneConnection) {
  ProvenConnections lower = listen(0);
  ProvenConnections higher = listen(1);
  EXPECT_EQ(lower.missing(), std::vector<int>{1});

  ASSERT_TRUE(higher.connect(0, lower.introduction()).ok());
  ASSERT_TRUE(meet(lower, higher, 20s));

  for (int plane = 0; plane < 2; ++plane) {
    const Descriptor here = lower.take(plane, 1);
    const Descriptor there = higher.take(plane, 0);
    const char sent = static_cast<char>('a' + plane);
    char came = 0;
    ASSERT_EQ(send(here.number(), &sent, 1, MSG_NOSIGNAL), 1);
    ASSERT_TRUE(wait_for(there.number(), POLLIN, std::chrono::steady_clock::now() + 20s));
    ASSERT_EQ(recv(there.number(), &came, 1, 0), 1);
    EXPECT_EQ(came, sent);
  }
}

TEST(ProvenConnections, AnotherGroupKeyOrSecretIsNotLetIn) {
  ProvenConnections lower = listen(0, "run", "secret");
  const std::string truth = lower.introduction();
  std::string wrong_key = truth;
  wrong_key.back() = truth.back() == '0' ? '1' : '0';
  const std::tuple<std::string, std::string, std::string> cases[] = {
      {"another", "secret", truth}, {"run", "another", truth}, {"run", "secret", wrong_key}};
  for (const auto& [group, secret, introduction] : cases) {
    ProvenConnections higher = listen(1, group, secret);
    ASSERT_TRUE(higher.connect(0, introduction).ok());
    EXPECT_FALSE(meet(lower, higher, 200ms)) << group << secret;
    EXPECT_EQ(lower.missing(), std::vector<int>{1});
    EXPECT_EQ(higher.missing(), std::vector<int>{0});
  }
}

// It has read the key's place in a message of the true rank, and repeats that message.
TEST(ProvenConnections, AListenerThatOnlyRepeatsIsNotBelieved) {
  ProvenConnections higher = listen(1);
  ProvenConnections lower = listen(0);
  const Descriptor impostor = listen_at({"127.0.0.1", 0, {}}).value();
  StoreAddress address = parse_store_address(lower.introduction()).value();
  address.port = local_end(impostor.number()).port();

  ASSERT_TRUE(higher.connect(0, store_address_text(address)).ok());
  std::vector<Descriptor> taken;
  const auto limit = std::chrono::steady_clock::now() + 200ms;
  while (std::chrono::steady_clock::now() < limit) {
    ASSERT_TRUE(higher.advance(1ms).ok());
    Descriptor socket(accept4(impostor.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.valid()) taken.push_back(std::move(socket));
    for (const Descriptor& caller : taken) {
      char buffer[256];
      const ssize_t count = recv(caller.number(), buffer, sizeof(buffer), 0);
      if (count > 0)
        static_cast<void>(!send(caller.number(), buffer,
                                std::min<std::size_t>(40, static_cast<std::size_t>(count)), MSG_NOSIGNAL));
    }
  }

  EXPECT_FALSE(taken.empty());
  EXPECT_EQ(higher.missing(), std::vector<int>{0});
}

TEST(ProvenConnections, StrangersAreClosedAndRanksStillCome) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  ProvenConnections lower = listen(0);
  ProvenConnections higher = listen(1);
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 100; ++i) {
    strangers.push_back(call(lower));
    std::string bytes = i % 3 == 0 ? "fbpeers1" : "";
    while (bytes.size() < random() % 120) bytes += static_cast<char>(random());
    static_cast<void>(!send(strangers.back().number(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
    ASSERT_TRUE(lower.advance(0ms).ok());
  }

  ASSERT_TRUE(higher.connect(0, lower.introduction()).ok());
  EXPECT_TRUE(meet(lower, higher, 20s));
}

TEST(ProvenConnections, ARankThatDoesNotListenIsNamed) {
  std::string introduction;
  introduction = listen(0).introduction();
  ProvenConnections higher = listen(1);

  Status status = higher.connect(0, introduction);
  for (int i = 0; status.ok() && i < 1000; ++i) status = higher.advance(20ms);

  EXPECT_EQ(status.code(), StatusCode::kPeerLost);
  EXPECT_NE(status.message().find("rank 0 at 127.0.0.1"), std::string::npos) << status.message();
  EXPECT_EQ(listen(1).connect(0, "nonsense").code(), StatusCode::kPeerLost);
}

}  // namespace
}  // namespace forebay::internal
