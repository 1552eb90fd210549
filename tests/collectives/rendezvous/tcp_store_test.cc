// The store over TCP, with ranks as threads: its texts, which ranks it lets in, and the result of each fault
// of a beginning looks like from every rank. Every wait has a limit, and each case says how long it may take.
#include "collectives/rendezvous/tcp_store.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <random>
#include <thread>

#include "collectives/rendezvous/meeting.h"
#include "collectives/rendezvous/store_server.h"
#include "tests/support/let_others_run.h"

namespace forebay::internal {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

const std::string kSecret(64, 's');

int open_descriptors() {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

class TcpStoreWorld : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    descriptors_ = open_descriptors();
    Result<Descriptor> listener = listen_at({"127.0.0.1", 0, ""});
    ASSERT_TRUE(listener.ok()) << listener.status().to_string();
    listener_ = std::move(listener).value();
    port_ = local_end(listener_.number()).port();
  }
  void TearDown() override {
    if (IsSkipped()) return;
    listener_.reset();
    EXPECT_EQ(open_descriptors(), descriptors_) << "left behind";
  }

  int size() const { return GetParam(); }

  TcpStoreOptions options(int rank, std::chrono::milliseconds deadline = 30s) {
    return {.where = "tcp://127.0.0.1:" + std::to_string(port_),
            .address = {"127.0.0.1", port_, "run"},
            .secret = kSecret,
            .me = {rank, size(), "same"},
            .deadline = deadline,
            .listener = rank == 0 ? std::move(listener_) : Descriptor()};
  }

  // Opens and meets as those options say, and does `then` in the meeting.
  static Status run(TcpStoreOptions options, const std::function<Status(TcpStore&, const Meeting&)>& then) {
    const Participant me = options.me;
    const std::chrono::milliseconds deadline = options.deadline;
    const Clock::time_point limit = Clock::now() + deadline;
    Result<std::unique_ptr<TcpStore>> store = TcpStore::open(std::move(options));
    FOREBAY_RETURN_IF_ERROR(store.status());
    Result<Meeting> meeting = meet(*store.value(), me, limit, deadline);
    FOREBAY_RETURN_IF_ERROR(meeting.status());
    return then(*store.value(), meeting.value());
  }

  // All ranks at the same time, each with the options that `change` makes of the usual ones.
  std::vector<Status> run_all(const std::function<void(TcpStoreOptions&)>& change,
                              const std::function<Status(TcpStore&, const Meeting&)>& then = nullptr) {
    std::vector<Status> statuses(static_cast<std::size_t>(size()));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) {
      TcpStoreOptions mine = options(rank);
      change(mine);
      threads.emplace_back([&, rank, mine = std::move(mine)]() mutable {
        statuses[static_cast<std::size_t>(rank)] = run(
            std::move(mine),
            [&](TcpStore& store, const Meeting& meeting) { return then ? then(store, meeting) : Status(); });
      });
    }
    for (std::thread& thread : threads) thread.join();
    return statuses;
  }

  // Every rank of `statuses` failed with the first one's words.
  static void expect_one_cause(const std::vector<Status>& statuses, StatusCode code,
                               const std::string& word) {
    for (std::size_t rank = 0; rank < statuses.size(); ++rank) {
      EXPECT_EQ(statuses[rank].code(), code) << "rank " << rank << ": " << statuses[rank].to_string();
      EXPECT_EQ(statuses[rank].message(), statuses[0].message()) << "rank " << rank;
      EXPECT_NE(statuses[rank].message().find(word), std::string::npos) << statuses[rank].message();
    }
  }

  // A connection that may send any bytes; refused once the server has ended.
  Descriptor stranger() {
    const std::vector<SocketAddress> addresses = resolve("127.0.0.1", port_).value();
    Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    // So that bytes that it does not read stay at the server.
    constexpr int kSmall = 8 << 10;
    setsockopt(socket.number(), SOL_SOCKET, SO_RCVBUF, &kSmall, sizeof(kSmall));
    static_cast<void>(connect(socket.number(), addresses[0].get(), addresses[0].bytes));
    return socket;
  }

  // The bytes of a rank that was let in: it proves and greets, in one piece, and does nothing more.
  Descriptor pretend(int rank, const std::string& token = {}) {
    Descriptor socket = stranger();
    const Digest nonce = random_digest();
    std::string bytes = encode_hello(nonce);
    send(socket.number(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    recv(socket.number(), bytes.data(), bytes.size(), MSG_WAITALL);
    const StoreKeys keys = derive_store_keys(kSecret, nonce, *decode_hello(bytes));
    FrameWriter writer(keys.to_server);
    const Greeting greeting{"run", introduce({rank, size(), "same"})};
    bytes = std::string(bytes_of(keys.client_proof)) +
            writer.frame(encode(Message{MessageType::kGreeting, token, encode(greeting)}));
    send(socket.number(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    bytes.resize(1 + sizeof(Digest) + 1);
    EXPECT_EQ(recv(socket.number(), bytes.data(), bytes.size(), MSG_WAITALL),
              static_cast<ssize_t>(bytes.size()));
    return socket;
  }
  // Whether the other end has ended this connection.
  static bool is_closed(const Descriptor& socket) {
    char byte = 0;
    return recv(socket.number(), &byte, 1, MSG_DONTWAIT | MSG_PEEK) == 0 || errno == ECONNRESET;
  }

  Descriptor listener_;
  std::uint16_t port_ = 0;
  int descriptors_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Ranks, TcpStoreWorld, ::testing::Values(3, 4),
                         [](const auto& info) { return std::to_string(info.param); });

TEST_P(TcpStoreWorld, APostedTextReachesAllRanksAndReplacesNoTextWrittenOnce) {
  const auto eventually = [](TcpStore& store, const std::string& name, const std::string& wanted) {
    const Clock::time_point limit = Clock::now() + 60s;
    while (store.posted(name) != wanted && Clock::now() < limit) testing::let_others_run();
    EXPECT_EQ(store.posted(name), wanted);
  };
  std::atomic<int> rank_count{0};
  const auto statuses = run_all([](TcpStoreOptions&) {},
                                [&](TcpStore& store, const Meeting&) -> Status {
                                  const int me = rank_count.fetch_add(1);
                                  if (me == 0) {
                                    static_cast<void>(store.write_once("word", "last"));
                                    store.post("word", "another");
                                    store.post("news", "old");
                                    store.post("news", "new");
                                  }
                                  eventually(store, "news", "new");
                                  eventually(store, "word", "last");
                                  return store.write("done." + std::to_string(me), "");
                                });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST_P(TcpStoreWorld, RanksMeetAndSeeEachOthersTexts) {
  std::vector<std::string> generations(static_cast<std::size_t>(size()));
  std::atomic<int> rank_count{0};
  std::atomic<int> seen_count{0};
  const auto statuses =
      run_all([](TcpStoreOptions&) {},
              [&](TcpStore& store, const Meeting& meeting) -> Status {
                const int me = rank_count.fetch_add(1);
                generations[static_cast<std::size_t>(me)] = meeting.generation;
                EXPECT_TRUE(meeting.one_host);
                EXPECT_EQ(store.local_address(), "127.0.0.1");
                FOREBAY_RETURN_IF_ERROR(store.write("rank " + std::to_string(me), "1"));
                FOREBAY_RETURN_IF_ERROR(store.write("rank " + std::to_string(me), std::string(500'000, 'x')));
                EXPECT_EQ(store.read("nothing"), std::nullopt);
                for (int peer = 0; peer < size(); ++peer) {
                  while (store.read("rank " + std::to_string(peer)).value_or("").size() < 2)
                    testing::let_others_run();
                }
                const std::optional<std::string> once = store.write_once("first", "by " + std::to_string(me));
                EXPECT_TRUE(once.has_value());
                EXPECT_EQ(store.read("first"), once);
                EXPECT_EQ(store.write_once("first", "another"), once);
                // Nobody looks for this rank's text any more.
                seen_count.fetch_add(1);
                while (seen_count < size()) testing::let_others_run();
                store.remove("rank " + std::to_string(me));
                EXPECT_EQ(store.read("rank " + std::to_string(me)), std::nullopt);
                return store.status();
              });

  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  for (const std::string& generation : generations) EXPECT_EQ(generation, generations[0]);
  EXPECT_FALSE(generations[0].empty());
}

TEST_P(TcpStoreWorld, ATextThatIsTooLargeIsRefusedAndTheStoreGoesOn) {
  const auto statuses = run_all(
      [](TcpStoreOptions&) {},
      [](TcpStore& store, const Meeting&) -> Status {
        EXPECT_EQ(store.write("large", std::string(1 << 20, 'x')).code(), StatusCode::kInvalidArgument);
        EXPECT_EQ(store.write(std::string(5000, 'n'), "").code(), StatusCode::kInvalidArgument);
        return store.write("small", "x");
      });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST_P(TcpStoreWorld, HasRoomForSoManyRanksAndNoMore) {
  TcpStoreOptions many = options(1);
  many.me.size = kTcpStoreRanksMax + 1;
  many.deadline = 100ms;

  const Status status = TcpStore::open(std::move(many)).status();

  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
  EXPECT_NE(status.message().find("4097 ranks cannot meet at"), std::string::npos) << status.message();
}

TEST_P(TcpStoreWorld, ARankWithAnotherSecretIsToldAtOnceAndTheOthersNameTheMissingRank) {
  const int bad = size() - 1;
  std::vector<Status> statuses = run_all([&](TcpStoreOptions& mine) {
    mine.deadline = 1s;
    if (mine.me.rank == bad) mine.secret = std::string(64, 'x');
  });
  EXPECT_EQ(statuses.back().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(statuses.back().message().find("another secret"), std::string::npos) << statuses.back().message();
  EXPECT_EQ(statuses.back().message().find(std::string(64, 'x')), std::string::npos);
  statuses.pop_back();
  expect_one_cause(statuses, StatusCode::kTimeout, "rank " + std::to_string(bad) + " did not join");
  EXPECT_NE(statuses[0].message().find("it knows another secret"), std::string::npos)
      << statuses[0].message();
}

TEST_P(TcpStoreWorld, AServerThatDoesNotKnowTheSecretIsNotBelieved) {
  // It answers as the protocol wants but cannot know the proof.
  std::thread impostor([&] {
    pollfd waiting{listener_.number(), POLLIN, 0};
    poll(&waiting, 1, 30'000);
    const Descriptor peer(accept(listener_.number(), nullptr, nullptr));
    std::string bytes(kHelloBytes, '\0');
    EXPECT_EQ(recv(peer.number(), bytes.data(), bytes.size(), MSG_WAITALL), ssize_t{kHelloBytes});
    const std::string hello = encode_hello(random_digest());
    EXPECT_EQ(send(peer.number(), hello.data(), hello.size(), MSG_NOSIGNAL), ssize_t{kHelloBytes});
    bytes.resize(sizeof(Digest));
    EXPECT_EQ(recv(peer.number(), bytes.data(), bytes.size(), MSG_WAITALL), ssize_t{sizeof(Digest)});
    const std::string proof = kSecretAccepted + std::string(bytes_of(random_digest()));
    EXPECT_EQ(send(peer.number(), proof.data(), proof.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(proof.size()));
    EXPECT_EQ(recv(peer.number(), bytes.data(), 1, MSG_WAITALL), 0) << "it heard something";
  });
  const Status status = TcpStore::open(options(1)).status();
  impostor.join();

  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("does not know the secret"), std::string::npos) << status.message();
}

TEST_P(TcpStoreWorld, AnotherProgramAtThePortIsNamed) {
  std::thread program([&] {
    pollfd waiting{listener_.number(), POLLIN, 0};
    poll(&waiting, 1, 30'000);
    const Descriptor peer(accept(listener_.number(), nullptr, nullptr));
    const std::string text = "SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n" + std::string(100, 'x');
    EXPECT_EQ(send(peer.number(), text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
    char byte;
    while (recv(peer.number(), &byte, 1, 0) > 0) {
    }
  });
  const Status status = TcpStore::open(options(1)).status();
  program.join();
  EXPECT_NE(status.message().find("another program listens there"), std::string::npos) << status.message();
}

TEST_P(TcpStoreWorld, AWrongWorldSizeFailsAllWithOneCause) {
  const auto statuses = run_all([&](TcpStoreOptions& mine) {
    if (mine.me.rank == 1) mine.me.size = size() + 1;
  });
  expect_one_cause(statuses, StatusCode::kInvalidArgument,
                   "rank 0 was started as one of " + std::to_string(size()) + " ranks, rank 1 as one of " +
                       std::to_string(size() + 1));
}

TEST_P(TcpStoreWorld, DifferingOptionsFailAllWithOneCause) {
  const auto statuses = run_all([&](TcpStoreOptions& mine) {
    if (mine.me.rank == 2) mine.me.configuration = "other";
  });
  expect_one_cause(statuses, StatusCode::kInvalidArgument,
                   "rank 0 was configured as \"same\", rank 2 as \"other\"");
}

TEST_P(TcpStoreWorld, TwoProcessesOfOneRankFailAllWithOneCause) {
  const auto statuses = run_all([&](TcpStoreOptions& mine) {
    if (mine.me.rank == 2) mine.me.rank = 1;
  });
  expect_one_cause(statuses, StatusCode::kInvalidArgument, "as rank 1, from 127.0.0.1 and from 127.0.0.1");
}

TEST_P(TcpStoreWorld, ARankThatNeverComesIsNamedByAllAtTheFirstDeadline) {
  const Clock::time_point begin = Clock::now();
  std::vector<Status> statuses;
  std::vector<std::thread> threads;
  statuses.resize(static_cast<std::size_t>(size() - 1));
  for (int rank = 0; rank < size() - 1; ++rank) {
    // The first to give up takes the others with it.
    threads.emplace_back([&, rank, mine = options(rank, rank == 0 ? 2s : 60s)]() mutable {
      statuses[static_cast<std::size_t>(rank)] =
          run(std::move(mine), [](TcpStore&, const Meeting&) { return Status(); });
    });
  }
  for (std::thread& thread : threads) thread.join();

  expect_one_cause(statuses, StatusCode::kTimeout, "rank " + std::to_string(size() - 1) + " did not join");
  EXPECT_LT(Clock::now() - begin, 20s);
}

TEST_P(TcpStoreWorld, ARankThatLeavesBeforeAllAreThereIsNamedByAll) {
  const int leaver = size() - 1;
  std::vector<Status> statuses(static_cast<std::size_t>(size() - 1));
  std::vector<std::thread> threads;
  const auto start = [&](int rank) {
    threads.emplace_back([&, rank, mine = options(rank)]() mutable {
      statuses[static_cast<std::size_t>(rank)] =
          run(std::move(mine), [](TcpStore&, const Meeting&) { return Status(); });
    });
  };
  // Rank 1 does not come, so that the meeting stays open.
  for (int rank = 0; rank < size() - 1; ++rank) {
    if (rank != 1) start(rank);
  }
  {
    const auto store = TcpStore::open(options(leaver));
    EXPECT_TRUE(store.ok()) << store.status().to_string();
  }
  for (std::thread& thread : threads) thread.join();

  statuses.erase(statuses.begin() + 1);
  expect_one_cause(statuses, StatusCode::kPeerLost, "rank " + std::to_string(leaver) + " left before all");
}

TEST_P(TcpStoreWorld, NoRankReachesAServerThatIsNotThere) {
  listener_.reset();
  const Status status = TcpStore::open(options(1, 200ms)).status();
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_NE(status.message().find("could not reach the rendezvous store"), std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find("Connection refused"), std::string::npos) << status.message();
}

// The kernel takes the connection, and no process ever answers. A try alone may last as long as an admission.
TEST_P(TcpStoreWorld, ATryEndsAtAShorterDeadline) {
  Status status;
  Clock::duration shortest = Clock::duration::max();
  // A busy machine may delay one of the calls, but not each of them.
  for (int i = 0; i < 5 && shortest >= kAdmissionMax / 2; ++i) {
    const Clock::time_point begin = Clock::now();
    status = TcpStore::open(options(1, 10ms)).status();
    shortest = std::min(shortest, Clock::now() - begin);
  }

  EXPECT_LT(shortest, kAdmissionMax / 2);
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_NE(status.message().find("within 10 ms: it says nothing"), std::string::npos) << status.message();
}

TEST_P(TcpStoreWorld, ALateRankAndOneOfAnEarlierRunAreSentAwayAndTheRunGoesOn) {
  const int late = size() - 1;
  const auto statuses =
      run_all([](TcpStoreOptions&) {},
              [&](TcpStore& store, const Meeting&) -> Status {
                // Each rank is one more stranger's witness.
                const Status again = TcpStore::open(options(late)).status();
                EXPECT_EQ(again.code(), StatusCode::kUnavailable);
                EXPECT_NE(again.message().find("were there already"), std::string::npos) << again.message();
                TcpStoreOptions stale = options(1);
                stale.address.job = "run before";
                const Status refused = TcpStore::open(std::move(stale)).status();
                EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
                EXPECT_NE(refused.message().find("of the run \"run before\""), std::string::npos)
                    << refused.message();
                FOREBAY_RETURN_IF_ERROR(store.status());
                return store.write("still", "there");
              });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST_P(TcpStoreWorld, AStaleRankBeforeTheMeetingDoesNotTakeAPlace) {
  TcpStoreOptions first = options(0);
  Status zero;
  std::thread rank_zero(
      [&] { zero = run(std::move(first), [](TcpStore&, const Meeting&) { return Status(); }); });
  TcpStoreOptions stale = options(1);
  stale.address.job = "run before";
  EXPECT_EQ(TcpStore::open(std::move(stale)).status().code(), StatusCode::kInvalidArgument);
  std::vector<std::thread> others;
  for (int rank = 1; rank < size(); ++rank) {
    others.emplace_back([&, mine = options(rank)]() mutable {
      EXPECT_TRUE(run(std::move(mine), [](TcpStore&, const Meeting&) { return Status(); }).ok());
    });
  }
  for (std::thread& thread : others) thread.join();
  rank_zero.join();
  EXPECT_TRUE(zero.ok()) << zero.to_string();
}

TEST_P(TcpStoreWorld, GarbageAndSilenceKeepNobodyOut) {
  constexpr std::uint64_t kSeed = 7;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937_64 random(kSeed);
  std::vector<Descriptor> strangers;
  // More than the server keeps at a time, each of another kind, before and while the ranks come.
  const auto come = [&](int i) {
    Descriptor& socket = strangers.emplace_back(stranger());
    std::string bytes;
    if (i % 4 == 1) bytes = encode_hello(random_digest()).substr(0, 20);  // And then nothing more.
    if (i % 4 == 2) bytes = encode_hello(random_digest()) + std::string(random() % 100'000, 'x');
    if (i % 4 == 3) {
      for (int k = 0; k < 3000; ++k) bytes += static_cast<char>(random());
    }
    static_cast<void>(send(socket.number(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
  };
  const Clock::time_point begin = Clock::now();
  for (int i = 0; i < 60; ++i) come(i);
  std::atomic<bool> over{false};
  std::thread flood([&] {
    for (int i = 0; i < 200 && !over; ++i) come(i);
  });
  const auto statuses =
      run_all([](TcpStoreOptions&) {}, [](TcpStore& store, const Meeting&) { return store.write("a", "b"); });
  over = true;
  flood.join();

  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_LT(Clock::now() - begin, 20s);
}

// Carries bytes between ranks and the server, until it is cut.
class Link {
 public:
  explicit Link(std::uint16_t server_port) : server_port_(server_port), thread_([this] { carry(); }) {}
  ~Link() {
    over_ = true;
    thread_.join();
  }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  std::uint16_t port() const { return local_end(listener_.number()).port(); }
  // Resets the connections of ranks, and their other ends at the server if it hears of that. Until mend()
  // nobody gets through.
  void cut(bool server_hears) {
    const std::lock_guard lock(mutex_);
    is_cut_ = true;
    for (Pair& pair : pairs_) {
      reset(pair.rank);
      if (server_hears) reset(pair.server);
    }
  }
  void mend() {
    const std::lock_guard lock(mutex_);
    is_cut_ = false;
  }
  // Carries nothing to the ranks any more. Their next bytes are taken for a request, which nobody answers:
  // they get what the server sent before, and then the connection ends as with the server's process.
  void end_at_the_next_request() {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  std::size_t connection_count() {
    const std::lock_guard lock(mutex_);
    return pairs_.size();
  }

 private:
  struct Pair {
    Descriptor rank;
    Descriptor server;
  };

  static void reset(Descriptor& socket) {
    if (!socket.valid()) return;
    const linger now{1, 0};
    setsockopt(socket.number(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    socket.reset();
  }
  // Carries what is there. False when that end has ended.
  static bool pass(const Descriptor& from, const Descriptor& to) {
    char bytes[4096];
    const ssize_t count = recv(from.number(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (count < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    if (count > 0 && to.valid())
      static_cast<void>(send(to.number(), bytes, static_cast<std::size_t>(count), MSG_NOSIGNAL));
    return count > 0;
  }
  static void end(Pair& pair) {
    pollfd news{pair.server.number(), POLLIN, 0};
    poll(&news, 1, 10'000);
    static_cast<void>(pass(pair.server, pair.rank));
    char request[4096];  // Unread bytes would make the end a reset.
    static_cast<void>(recv(pair.rank.number(), request, sizeof(request), MSG_DONTWAIT));
    pair.rank.reset();
    pair.server.reset();
  }
  void carry() {
    while (!over_) {
      std::vector<pollfd> waiting{{listener_.number(), POLLIN, 0}};
      {
        const std::lock_guard lock(mutex_);
        for (const Pair& pair : pairs_) {
          waiting.push_back({pair.rank.number(), POLLIN, 0});
          waiting.push_back({pair.server.number(), POLLIN, 0});
        }
      }
      poll(waiting.data(), waiting.size(), 5);
      const std::lock_guard lock(mutex_);
      for (Pair& pair : pairs_) {
        if (is_ending_) {
          pollfd request{pair.rank.number(), POLLIN, 0};
          if (poll(&request, 1, 0) > 0) end(pair);
          continue;
        }
        if (pair.rank.valid() && !pass(pair.rank, pair.server)) pair.rank.reset(), pair.server.reset();
        if (pair.server.valid() && !pass(pair.server, pair.rank)) pair.rank.reset(), pair.server.reset();
      }
      std::erase_if(pairs_, [](const Pair& pair) { return !pair.rank.valid() && !pair.server.valid(); });
      if ((waiting[0].revents & POLLIN) == 0) continue;
      Pair pair{Descriptor(accept4(listener_.number(), nullptr, nullptr, SOCK_CLOEXEC)), Descriptor()};
      if (is_cut_) {
        reset(pair.rank);
        continue;
      }
      const SocketAddress server = resolve("127.0.0.1", server_port_).value()[0];
      pair.server = Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (connect(pair.server.number(), server.get(), server.bytes) == 0) pairs_.push_back(std::move(pair));
    }
  }

  const std::uint16_t server_port_;
  const Descriptor listener_ = listen_at({"127.0.0.1", 0, ""}).value();
  std::atomic<bool> over_{false};
  std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<Pair> pairs_;
  bool is_cut_ = false;
  bool is_ending_ = false;
  std::thread thread_;
};

TEST_P(TcpStoreWorld, ARankComesBackAfterTheNetworkBrokeItsConnection) {
  Link one(port_);
  Link two(port_);
  std::atomic<int> asked{0};
  std::atomic<int> written{0};
  std::atomic<bool> is_back{false};
  const auto body = [&](TcpStore& store, int rank) -> Status {
    // The network breaks the end of the rank alone, then both ends.
    for (const int round : {1, 2}) {
      const std::string name = "news." + std::to_string(round);
      if (rank == 0) {
        while (asked < round) testing::let_others_run();
        EXPECT_EQ(store.write_once(name, "while it was away"), "while it was away");
        written = round;
      }
      if (rank != 1) continue;
      one.cut(round == 2);
      asked = round;
      while (written < round) testing::let_others_run();
      one.mend();
      const Clock::time_point limit = Clock::now() + 20s;
      while (!store.posted(name) && store.status().ok() && Clock::now() < limit) testing::let_others_run();
      EXPECT_EQ(store.posted(name), "while it was away") << "round " << round;
      EXPECT_TRUE(store.write("back", name).ok()) << store.status().to_string();
      EXPECT_EQ(store.read("back"), name);
      while (one.connection_count() > 1 && Clock::now() < limit) testing::let_others_run();
      EXPECT_EQ(one.connection_count(), 1u) << "the server keeps the old connection";
    }
    if (rank == 1) {
      // A request finds it broken.
      one.cut(true);
      one.mend();
      EXPECT_TRUE(store.write("back", "once more").ok()) << store.status().to_string();
      is_back = true;
    }
    while (!is_back) testing::let_others_run();
    if (rank == 2) two.cut(true);
    const Clock::time_point cut = Clock::now();
    while (store.status().ok()) testing::let_others_run();
    EXPECT_LT(Clock::now() - cut, 30s) << "the server waits for something else to happen";
    const Status first = store.status();
    EXPECT_FALSE(store.write("late", "text").ok());
    if (rank == 2) return first;
    EXPECT_TRUE(store.is_lost(2));
    EXPECT_FALSE(store.is_lost(1)) << "it was back in time";
    // The end of the server is not the first failure.
    while (rank == 1 && store.answers()) testing::let_others_run();
    EXPECT_EQ(store.status().message(), first.message());
    return store.status();
  };
  std::vector<Status> statuses(static_cast<std::size_t>(size()));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size(); ++rank) {
    threads.emplace_back([&, rank, mine = options(rank)]() mutable {
      if (rank == 1) mine.address.port = one.port();
      if (rank == 2) mine.address.port = two.port();
      statuses[static_cast<std::size_t>(rank)] =
          run(std::move(mine), [&](TcpStore& store, const Meeting&) { return body(store, rank); });
    });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(statuses[2].code(), StatusCode::kPeerLost) << statuses[2].to_string();
  EXPECT_NE(statuses[2].message().find("rank 0, which serves the store"), std::string::npos)
      << statuses[2].message();
  statuses.erase(statuses.begin() + 2);
  expect_one_cause(statuses, StatusCode::kPeerLost, "rank 2 at 127.0.0.1 ended");
}

// The server writes the news and ends before the rank looks: the rank finds both in its connection.
TEST_P(TcpStoreWorld, ATextThatCameBeforeTheServerEndedIsRead) {
  Link link(port_);
  std::atomic<int> met_count{0};
  std::atomic<bool> holds{false};
  std::atomic<bool> written{false};
  std::atomic<bool> is_read{false};
  const auto body = [&](TcpStore& store, int rank) -> Status {
    // A rank that is still meeting would fail with the news of rank 1.
    met_count.fetch_add(1);
    while (met_count < size()) testing::let_others_run();
    if (rank == 1) {
      link.end_at_the_next_request();
      holds = true;
      while (!written) testing::let_others_run();
      EXPECT_EQ(store.read("vote"), "the last text");
      EXPECT_FALSE(store.status().ok());
      is_read = true;
    }
    if (rank == 0) {
      while (!holds) testing::let_others_run();
      EXPECT_EQ(store.write_once("vote", "the last text"), "the last text");
      written = true;
    }
    while (!is_read) testing::let_others_run();
    return {};
  };

  std::vector<std::thread> threads;
  for (int rank = 0; rank < size(); ++rank) {
    threads.emplace_back([&, rank, mine = options(rank)]() mutable {
      if (rank == 1) mine.address.port = link.port();
      const Status met =
          run(std::move(mine), [&](TcpStore& store, const Meeting&) { return body(store, rank); });
      EXPECT_TRUE(met.ok()) << met.to_string();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The last rank reads nothing. Posted texts pass it by, and the server keeps a bounded part of the others.
TEST_P(TcpStoreWorld, ARankThatReadsNothingIsLostAndNotWaitedFor) {
  const int deaf = size() - 1;
  std::vector<Status> statuses(static_cast<std::size_t>(deaf));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < deaf; ++rank) {
    threads.emplace_back([&, rank, mine = options(rank)]() mutable {
      statuses[static_cast<std::size_t>(rank)] = run(std::move(mine), [&](TcpStore& store, const Meeting&) {
        if (rank != 0) {
          while (store.status().ok()) testing::let_others_run();
          return store.status();
        }
        for (int i = 0; i < 180; ++i) {
          store.post("posted", std::string(60'000, 'x'));
          EXPECT_TRUE(store.status().ok()) << store.status().to_string();
        }
        // An answer comes after all of that, and after news of a lost rank.
        EXPECT_TRUE(store.write("a", "b").ok());
        EXPECT_TRUE(store.status().ok()) << store.status().to_string();
        for (int i = 0; i < 60 && store.status().ok(); ++i)
          static_cast<void>(store.write_once("text " + std::to_string(i), std::string(1'000'000, 'x')));
        return store.status();
      });
    });
  }
  const Descriptor socket = pretend(deaf);
  for (std::thread& thread : threads) thread.join();

  expect_one_cause(statuses, StatusCode::kPeerLost, "rank " + std::to_string(deaf) + " at 127.0.0.1 ended");
}

TEST_P(TcpStoreWorld, ARankWithAForeignTokenTakesNoPlace) {
  const auto statuses = run_all([](TcpStoreOptions&) {},
                                [&](TcpStore& store, const Meeting&) -> Status {
                                  pretend(1, "a word").reset();
                                  FOREBAY_RETURN_IF_ERROR(store.write("still", "there"));
                                  return store.status();
                                });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST_P(TcpStoreWorld, StrangersAreKeptForAWhileAndTheOldestMakesRoom) {
  TcpStoreOptions first = options(0);
  std::thread server(
      [&] { static_cast<void>(run(std::move(first), [](TcpStore&, const Meeting&) { return Status(); })); });
  Descriptor member = pretend(1);
  std::vector<Descriptor> strangers;
  const auto come = [&] {
    const std::string bytes = encode_hello(random_digest());
    std::string answer = bytes;
    const Descriptor& socket = strangers.emplace_back(stranger());
    EXPECT_EQ(send(socket.number(), bytes.data(), bytes.size(), MSG_NOSIGNAL), ssize_t{kHelloBytes});
    EXPECT_EQ(recv(socket.number(), answer.data(), answer.size(), MSG_WAITALL), ssize_t{kHelloBytes});
  };
  const Clock::time_point begin = Clock::now();
  const std::size_t limit = kStrangersMax + static_cast<std::size_t>(size());
  while (strangers.size() < limit) come();
  // Rank 0, which may come among them, is a stranger for a moment and then needs the room of one.
  const bool were_kept = std::none_of(strangers.begin() + 1, strangers.end(), is_closed);
  come();
  while (!is_closed(strangers[0])) testing::let_others_run();
  const bool is_kept = !is_closed(strangers[2]) && !is_closed(strangers.back());
  // Later than that the time of all is over.
  if (Clock::now() - begin < kAdmissionMax) {
    EXPECT_TRUE(were_kept);
    EXPECT_TRUE(is_kept);
  }
  // Nothing else happens at the server.
  while (!is_closed(strangers.back()) && Clock::now() - begin < 20s) testing::let_others_run();
  EXPECT_TRUE(is_closed(strangers.back()));
  // A rank that was let in keeps its place, though it is older than all of them.
  for (char byte = 0; recv(member.number(), &byte, 1, MSG_DONTWAIT) == 1;) continue;
  EXPECT_FALSE(is_closed(member));
  member.reset();
  for (int rank = 2; rank < size(); ++rank) pretend(rank).reset();
  server.join();
}

// It proves itself to a server that ends then, and to the next one.
TEST_P(TcpStoreWorld, ARankThatIsSentAwayUnheardComesAgain) {
  std::vector<TcpStoreOptions> all;
  for (int rank = 0; rank < size(); ++rank) all.push_back(options(rank));
  std::vector<Status> statuses(all.size());
  std::vector<std::thread> threads;
  const auto begin = [&](int rank) {
    threads.emplace_back([&, rank] {
      const auto r = static_cast<std::size_t>(rank);
      statuses[r] = run(std::move(all[r]), [](TcpStore& store, const Meeting&) { return store.status(); });
    });
  };
  begin(1);
  {
    const int listener = all[0].listener.number();
    pollfd waiting{listener, POLLIN, 0};
    poll(&waiting, 1, 30'000);
    const Descriptor peer(accept(listener, nullptr, nullptr));
    std::string bytes(kHelloBytes, ' ');
    ASSERT_EQ(recv(peer.number(), bytes.data(), bytes.size(), MSG_WAITALL), ssize_t{kHelloBytes});
    const Digest nonce = random_digest();
    const StoreKeys keys = derive_store_keys(kSecret, *decode_hello(bytes), nonce);
    const std::string said = encode_hello(nonce) + kSecretAccepted + std::string(bytes_of(keys.server_proof));
    ASSERT_EQ(send(peer.number(), said.data(), said.size(), MSG_NOSIGNAL), static_cast<ssize_t>(said.size()));
    // Its proof and one byte of its greeting.
    bytes.resize(sizeof(Digest) + 1);
    EXPECT_EQ(recv(peer.number(), bytes.data(), bytes.size(), MSG_WAITALL),
              static_cast<ssize_t>(bytes.size()));
  }
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != 1) begin(rank);
  }
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST_P(TcpStoreWorld, AServerStaysNoLongerThanItIsTold) {
  std::atomic<int> met{0};
  std::atomic<bool> has_left{false};
  const Clock::time_point begin = Clock::now();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size(); ++rank) {
    threads.emplace_back([&, rank, mine = options(rank)]() mutable {
      const Participant me = mine.me;
      const std::unique_ptr<TcpStore> store = TcpStore::open(std::move(mine)).value();
      EXPECT_TRUE(meet(*store, me, Clock::now() + 30s, 30s).ok());
      // The others stay until the server has ended.
      ++met;
      while (rank == 0 ? met < size() : !has_left) testing::let_others_run();
      for (const auto linger : {25s, 0s, 20s}) store->stay_at_most(linger);
    });
  }
  threads[0].join();
  EXPECT_LT(Clock::now() - begin, 15s);
  has_left = true;
  for (std::size_t rank = 1; rank < threads.size(); ++rank) threads[rank].join();
}

TEST_P(TcpStoreWorld, AStoreThatIsGivenUpAnswersNoMore) {
  run_all([](TcpStoreOptions&) {},
          [](TcpStore& store, const Meeting&) {
            store.post("known", "to all");
            while (store.status().ok() && !store.posted("known")) testing::let_others_run();
            const Status before = store.status();
            store.abandon(Status(StatusCode::kTimeout, "first"));
            store.abandon(Status(StatusCode::kTimeout, "second"));
            EXPECT_FALSE(store.answers());
            EXPECT_EQ(store.status().message(), before.ok() ? "first" : before.message());
            // Another rank may have given up before it posted.
            EXPECT_EQ(store.write_once("known", "again"), store.posted("known"));
            return Status();
          });
}

TEST_P(TcpStoreWorld, ALostRankIsTheStatusOfAllAndTextsWrittenOnceAreStillShared) {
  const int lost = size() - 1;
  std::vector<Status> statuses(static_cast<std::size_t>(size() - 1));
  std::vector<std::string> causes(statuses.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size() - 1; ++rank) {
    threads.emplace_back([&, rank, mine = options(rank)]() mutable {
      statuses[static_cast<std::size_t>(rank)] = run(std::move(mine), [&](TcpStore& store, const Meeting&) {
        while (store.status().ok()) testing::let_others_run();
        // Rank 0, which serves the store, may be the first to leave.
        causes[static_cast<std::size_t>(rank)] =
            store.write_once("failed", "as rank " + std::to_string(rank) + " saw it").value_or("nothing");
        EXPECT_TRUE(store.is_lost(lost));
        EXPECT_EQ(store.write_once("vote." + std::to_string(rank), "yes"), "yes");
        for (int other = 0; other < lost; ++other) {
          const std::string vote = "vote." + std::to_string(other);
          while (!store.read(vote) && store.answers()) testing::let_others_run();
          EXPECT_EQ(store.read(vote), "yes") << "rank " << rank << " of rank " << other;
          EXPECT_FALSE(store.is_lost(other));
        }
        return store.status();
      });
    });
  }
  pretend(lost).reset();  // It is gone without a goodbye.
  for (std::thread& thread : threads) thread.join();

  expect_one_cause(statuses, StatusCode::kPeerLost, "rank " + std::to_string(lost) + " at 127.0.0.1 ended");
  for (const std::string& cause : causes) EXPECT_EQ(cause, causes[0]);
  EXPECT_NE(causes[0], "nothing");
}

}  // namespace
}  // namespace forebay::internal
