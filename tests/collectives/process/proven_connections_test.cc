#include "collectives/process/proven_connections.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <random>

#include "collectives/rendezvous/byte_text.h"

namespace forebay::internal {
namespace {

using namespace std::chrono_literals;

ProvenConnections listen(int rank, const std::string& group = "run", const std::string& secret = {},
                         int size = 2, int planes = 2) {
  Result<ProvenConnections> made = ProvenConnections::listen({.address = "127.0.0.1",
                                                              .group = group,
                                                              .secret = secret,
                                                              .rank = rank,
                                                              .size = size,
                                                              .world_ranks = {0, 1, 2},
                                                              .planes = planes});
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

// It knows the secret, but is no rank or plane of the group.
TEST(ProvenConnections, NumbersBeyondTheGroupAreNotLetIn) {
  ProvenConnections lower = listen(0);
  ProvenConnections third = listen(2, "run", {}, 3);
  ASSERT_TRUE(third.connect(0, lower.introduction()).ok());
  EXPECT_FALSE(meet(lower, third, 200ms));
  EXPECT_EQ(lower.missing(), std::vector<int>{1});
  EXPECT_EQ(third.missing(), (std::vector<int>{0, 1}));

  ProvenConnections wider = listen(1, "run", {}, 2, 3);
  ASSERT_TRUE(wider.connect(0, lower.introduction()).ok());
  EXPECT_FALSE(meet(lower, wider, 200ms));
  EXPECT_EQ(wider.missing(), std::vector<int>{0}) << "there is no third plane";
}

// Passes the bytes of one connection on and keeps them, by the end that said them.
class Recorder {
 public:
  explicit Recorder(const ProvenConnections& lower) : introduction_(lower.introduction()), lower_(lower) {
    StoreAddress address = parse_store_address(introduction_).value();
    address.port = local_end(listener_.number()).port();
    introduction_ = store_address_text(address);
  }
  // For the higher rank, in place of that of the lower one.
  const std::string& introduction() const { return introduction_; }
  const Descriptor& listener() const { return listener_; }
  // Changes bits of the higher rank's byte at `offset`.
  void change(std::size_t offset, char bits) {
    changed_at_ = offset;
    changed_bits_ = bits;
  }
  // Ends the connections that come instead of passing them on.
  void break_off(int count) { to_break_ = count; }
  bool has_broken_off() const { return to_break_ == 0; }
  void pass() {
    Descriptor caller(accept4(listener_.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (caller.valid() && to_break_ > 0) {
      --to_break_;
      caller.reset();
    }
    if (caller.valid()) pairs_.push_back({std::move(caller), call(lower_), {}, {}});
    for (Pair& pair : pairs_) {
      carry(pair.higher, pair.lower, &pair.by_higher, changed_at_, changed_bits_);
      carry(pair.lower, pair.higher, &pair.by_lower, 0, 0);
    }
  }
  const std::string& by_higher() const { return pairs_[0].by_higher; }
  const std::string& by_lower() const { return pairs_[0].by_lower; }

 private:
  struct Pair {
    Descriptor higher;
    Descriptor lower;
    std::string by_higher;
    std::string by_lower;
  };
  static void carry(const Descriptor& from, const Descriptor& to, std::string* said, std::size_t at,
                    char bits) {
    char bytes[256];
    const ssize_t count = recv(from.number(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (count <= 0) return;
    const std::size_t begin = said->size();
    said->append(bytes, static_cast<std::size_t>(count));
    if (bits != 0 && at >= begin && at < said->size()) (*said)[at] = static_cast<char>((*said)[at] ^ bits);
    // The other end may have ended the connection.
    static_cast<void>(!send(to.number(), said->data() + begin, said->size() - begin, MSG_NOSIGNAL));
  }

  std::string introduction_;
  const ProvenConnections& lower_;
  const Descriptor listener_ = listen_at({"127.0.0.1", 0, {}}).value();
  std::vector<Pair> pairs_;
  std::size_t changed_at_ = 0;
  char changed_bits_ = 0;
  int to_break_ = 0;
};

// Passes bytes on until both have what they need, or `patience` has passed.
bool meet_over(Recorder& recorder, ProvenConnections& lower, ProvenConnections& higher,
               std::chrono::milliseconds patience) {
  const auto limit = std::chrono::steady_clock::now() + patience;
  while (!higher.missing().empty() && std::chrono::steady_clock::now() < limit) {
    EXPECT_TRUE(lower.advance(1ms).ok());
    EXPECT_TRUE(higher.advance(1ms).ok());
    recorder.pass();
  }
  return higher.missing().empty();
}

TEST(ProvenConnections, ABrokenConnectionIsTriedAgain) {
  ProvenConnections lower = listen(0);
  ProvenConnections higher = listen(1);
  Recorder recorder(lower);
  recorder.break_off(3);
  ASSERT_TRUE(higher.connect(0, recorder.introduction()).ok());

  EXPECT_TRUE(meet_over(recorder, lower, higher, 20s));
  EXPECT_TRUE(recorder.has_broken_off());
}

// The proof is that of one rank and one plane.
TEST(ProvenConnections, APlaneOrRankThatWasChangedOnTheWayIsNotLetIn) {
  for (const auto& [offset, bits] : {std::pair(40, 1), std::pair(44, 3)}) {
    SCOPED_TRACE(offset);
    ProvenConnections lower = listen(0, "run", {}, 3);
    ProvenConnections higher = listen(1, "run", {}, 2);
    Recorder recorder(lower);
    recorder.change(static_cast<std::size_t>(offset), static_cast<char>(bits));
    ASSERT_TRUE(higher.connect(0, recorder.introduction()).ok());

    EXPECT_FALSE(meet_over(recorder, lower, higher, 200ms));
    EXPECT_EQ(lower.missing(), (std::vector<int>{1, 2}));
    for (int plane = 0; plane < 2; ++plane) {
      for (const int peer : {1, 2}) EXPECT_FALSE(lower.take(plane, peer).valid()) << plane << peer;
    }
  }
}

// All bytes of a connection that both ends believed, said once more to either.
TEST(ProvenConnections, WhatWasSaidOnceProvesNothingLater) {
  constexpr std::size_t kHello = 40;  // With the nonce.
  constexpr std::size_t kProof = sizeof(Digest);
  ProvenConnections lower = listen(0, "run", {}, 2, 1);
  ProvenConnections higher = listen(1, "run", {}, 2, 1);
  Recorder recorder(lower);
  ASSERT_TRUE(higher.connect(0, recorder.introduction()).ok());
  ASSERT_TRUE(meet_over(recorder, lower, higher, 20s));
  const auto limit = std::chrono::steady_clock::now() + 20s;
  ASSERT_EQ(recorder.by_lower().size(), kHello + kProof);
  ASSERT_EQ(recorder.by_higher().size(), kHello + 8 + kProof);

  // To the lower rank: it answers with a nonce of its own, and not to the old proof.
  const Descriptor again = call(lower);
  ASSERT_EQ(send(again.number(), recorder.by_higher().data(), kHello + 8, MSG_NOSIGNAL), ssize_t{kHello + 8});
  std::string answer(kHello + kProof, ' ');
  std::size_t answered = 0;
  bool has_proved = false;
  for (ssize_t count = -1; count != 0 && std::chrono::steady_clock::now() < limit;) {
    ASSERT_TRUE(lower.advance(1ms).ok());
    count = recv(again.number(), answer.data() + answered, answer.size() - answered, MSG_DONTWAIT);
    if (count > 0) answered += static_cast<std::size_t>(count);
    ASSERT_LE(answered, kHello) << "it believed the old proof";
    if (answered == kHello && !std::exchange(has_proved, true))
      send(again.number(), recorder.by_higher().data() + kHello + 8, kProof, MSG_NOSIGNAL);
  }
  EXPECT_TRUE(has_proved);

  // To a higher rank, in place of the lower one.
  ProvenConnections next = listen(1, "run", {}, 2, 1);
  ASSERT_TRUE(next.connect(0, recorder.introduction()).ok());
  Descriptor caller;
  std::size_t heard = 0;
  while (heard < kHello + 8 + kProof && std::chrono::steady_clock::now() < limit) {
    ASSERT_TRUE(next.advance(1ms).ok());
    if (!caller.valid()) {
      caller = Descriptor(accept4(recorder.listener().number(), nullptr, nullptr, SOCK_CLOEXEC));
      continue;
    }
    char bytes[256];
    const ssize_t count = recv(caller.number(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (count > 0) heard += static_cast<std::size_t>(count);
    if (count > 0 && heard == kHello + 8)
      send(caller.number(), recorder.by_lower().data(), kHello, MSG_NOSIGNAL);
    if (count > 0 && heard == kHello + 8 + kProof)
      send(caller.number(), recorder.by_lower().data() + kHello, kProof, MSG_NOSIGNAL);
  }
  ASSERT_EQ(heard, kHello + 8 + kProof);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(next.advance(5ms).ok());
  EXPECT_EQ(next.missing(), std::vector<int>{0});
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

TEST(ProvenConnections, StrangersAreKeptForAWhileAndTheOldestMakesRoom) {
  ProvenConnections lower = listen(0);
  const auto is_closed = [](const Descriptor& socket) {
    char byte = 0;
    return recv(socket.number(), &byte, 1, MSG_DONTWAIT) == 0;
  };
  // 16, and one for each plane of rank 1.
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 19; ++i) strangers.push_back(call(lower));
  const auto begin = std::chrono::steady_clock::now();
  while (!is_closed(strangers[0]) && std::chrono::steady_clock::now() - begin < 1s)
    ASSERT_TRUE(lower.advance(1ms).ok());
  const bool is_kept = !is_closed(strangers[1]) && !is_closed(strangers.back());
  if (std::chrono::steady_clock::now() - begin < 1s) {
    EXPECT_TRUE(is_kept);
  }
  EXPECT_TRUE(is_closed(strangers[0]));

  while (!is_closed(strangers.back()) && std::chrono::steady_clock::now() - begin < 20s)
    ASSERT_TRUE(lower.advance(20ms).ok());
  EXPECT_TRUE(is_closed(strangers.back()));
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
  introduction.pop_back();
  EXPECT_EQ(listen(1).connect(0, introduction).message(),
            "rank 0 gave an address that cannot be read; run one version of forebay");
}

}  // namespace
}  // namespace forebay::internal
