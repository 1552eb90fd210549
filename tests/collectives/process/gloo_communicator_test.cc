#include "forebay/gloo_communicator.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <span>

#include "collectives/rendezvous/meeting.h"
#include "collectives/rendezvous/store_directory.h"
#include "forebay/descriptor.h"
#include "tests/collectives/communicator_conformance.h"
#include "tests/support/let_others_run.h"
#include "tests/support/temporary_directory.h"

namespace forebay::testing {
namespace {

using namespace std::chrono_literals;

// Processes would do the same; threads let the sanitizers see all ranks.
class GlooWorld final : public CommunicatorWorld {
 public:
  GlooWorld(int size, std::chrono::milliseconds deadline) : size_(size), deadline_(deadline) {}
  Result<std::unique_ptr<Communicator>> join(int rank, Backend& backend, Kernels&) override {
    return create_gloo_communicator(
        {.rank = rank, .size = size_, .store = store_.path(), .deadline = deadline_}, backend);
  }

 private:
  const int size_;
  const std::chrono::milliseconds deadline_;
  TemporaryDirectory store_;
};

const CommunicatorFactory kGloo{
    "gloo", gloo_available() ? "" : "this forebay was built without Gloo (libgloo-dev)",
    [](int size, std::chrono::milliseconds deadline) { return std::make_unique<GlooWorld>(size, deadline); }};

class GlooCommunicator : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!gloo_available()) GTEST_SKIP() << "this forebay was built without Gloo (libgloo-dev)";
  }

  // Lets `size` ranks join through `store`, runs body(member, rank) on those that could, and gives all
  // results of joining.
  std::vector<Status> join_all(const std::string& store, int size,
                               const std::function<void(Member&, int)>& body,
                               std::chrono::milliseconds deadline = 30s,
                               const std::function<void(GlooOptions&)>& change = {}) {
    std::vector<Status> results(static_cast<std::size_t>(size));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        Member member(create_host_backend(rank));
        GlooOptions options{.rank = rank, .size = size, .store = store, .deadline = deadline};
        if (change) change(options);
        Result<std::unique_ptr<Communicator>> joined = create_gloo_communicator(options, member.backend());
        results[static_cast<std::size_t>(rank)] = joined.status();
        if (!joined.ok()) return;
        member.set_communicator(std::move(joined).value());
        body(member, rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return results;
  }
};

TEST_F(GlooCommunicator, LeavesNothingInTheStore) {
  const TemporaryDirectory store;

  const std::vector<Status> results = join_all(store.path(), 3, [&](Member& member, int) {
    EXPECT_TRUE(member.communicator().split(0, 0).ok());
    EXPECT_TRUE(member.communicator().barrier().ok());
  });

  for (const Status& result : results) EXPECT_TRUE(result.ok()) << result.to_string();
  EXPECT_TRUE(store.empty());
}

TEST_F(GlooCommunicator, ARankThatLeavesFailsOnlyRanksThatNeedIt) {
  const TemporaryDirectory store;
  std::atomic<bool> left{false};

  const std::vector<Status> results = join_all(store.path(), 3, [&](Member& member, int rank) {
    // The ranks that stay keep a communicator of their own to pass time with.
    Result<std::unique_ptr<Communicator>> own = member.communicator().split(rank == 0 ? 0 : 1, rank);
    ASSERT_TRUE(own.ok()) << own.status().to_string();
    if (rank == 0) {
      member.set_communicator(nullptr);
      left = true;
      left.notify_all();
      return;
    }
    left.wait(false);
    for (int i = 0; i < 200; ++i) ASSERT_TRUE(own.value()->barrier().ok());
    EXPECT_TRUE(member.communicator().status().ok()) << member.communicator().status().to_string();
  });

  for (const Status& result : results) EXPECT_TRUE(result.ok()) << result.to_string();
  EXPECT_TRUE(store.empty());
}

TEST_F(GlooCommunicator, AFailureReachesARankThatWaitsForNothing) {
  const TemporaryDirectory store;

  join_all(store.path(), 3, [&](Member& member, int rank) {
    if (rank == 1) member.communicator().abort(Status(StatusCode::kIoError, "the disk of rank 1 is full"));
    const auto limit = std::chrono::steady_clock::now() + 20s;
    while (member.communicator().status().ok() && std::chrono::steady_clock::now() < limit)
      testing::let_others_run();
    EXPECT_EQ(member.communicator().status().code(), StatusCode::kIoError);
    EXPECT_EQ(member.communicator().status().message(), "the disk of rank 1 is full");
  });
}

// More bytes than the connections hold: a rank that has received all may not have sent all.
TEST_F(GlooCommunicator, ALargeSourceMayBeWrittenAgainByTheNextQueuedWork) {
  constexpr std::size_t kBytes = std::size_t{32} << 20;
  const TemporaryDirectory store;
  const std::vector<Status> results = join_all(store.path(), 2, [&](Member& member, int rank) {
    std::byte* const source = member.allocate(kBytes);
    std::byte* const target = member.allocate(2 * kBytes);
    for (int round = 0; round < 4; ++round) {
      const auto value = static_cast<std::uint8_t>(16 * round + rank);
      ASSERT_TRUE(member.backend().fill_async(source, value, kBytes, member.stream()).ok());
      ASSERT_TRUE(
          member.communicator()
              .all_gather(
                  {.source = source, .target = target, .target_stride_bytes = kBytes, .bytes = kBytes},
                  member.stream())
              .ok());
      ASSERT_TRUE(member.backend().fill_async(source, 0xEE, kBytes, member.stream()).ok());
      const Status finished = member.finish();
      ASSERT_TRUE(finished.ok()) << finished.to_string();
      const std::vector<std::byte> all = member.read(target, 2 * kBytes);
      for (std::size_t i = 0; i < all.size(); i += 1000)
        ASSERT_EQ(all[i], std::byte(16 * round + i / kBytes)) << "round " << round << " byte " << i;
    }
  });
  for (const Status& result : results) EXPECT_TRUE(result.ok()) << result.to_string();
}

TEST_F(GlooCommunicator, RemovesTheStoreDirectoryItMade) {
  const TemporaryDirectory parent;
  const std::string store = parent.path() + "/jobs/one";

  const std::vector<Status> results = join_all(store, 2, [&](Member&, int) {
    struct stat facts {};
    EXPECT_EQ(stat(store.c_str(), &facts), 0);
    EXPECT_EQ(facts.st_mode & 0777, 0700u);
  });

  for (const Status& result : results) EXPECT_TRUE(result.ok()) << result.to_string();
  EXPECT_TRUE(parent.empty());
}

TEST_F(GlooCommunicator, FilesOfAnEarlierRunAreNotBelieved) {
  // A run that was killed while it connected leaves the files of ranks that have met.
  const TemporaryDirectory store;
  Result<std::unique_ptr<internal::StoreDirectory>> directory = internal::StoreDirectory::open(store.path());
  ASSERT_TRUE(directory.ok());
  std::vector<std::thread> earlier;
  for (int rank = 0; rank < 3; ++rank) {
    earlier.emplace_back([&, rank] {
      const auto met =
          internal::meet(*directory.value(), {rank, 3, {}}, std::chrono::steady_clock::now() + 30s, 30s);
      EXPECT_TRUE(met.ok()) << met.status().to_string();
    });
  }
  for (std::thread& thread : earlier) thread.join();
  ASSERT_TRUE(std::filesystem::exists(store.path() + "/rank.2"));
  std::ofstream(store.path() + "/rank.1", std::ios::trunc) << "half a file";

  const std::vector<Status> results = join_all(store.path(), 3, [](Member& member, int rank) {
    std::vector<int> all(3);
    ASSERT_TRUE(member.communicator()
                    .exchange(std::as_bytes(std::span(&rank, 1)), std::as_writable_bytes(std::span(all)))
                    .ok());
    EXPECT_EQ(all, (std::vector<int>{0, 1, 2}));
  });

  for (const Status& result : results) EXPECT_TRUE(result.ok()) << result.to_string();
  EXPECT_TRUE(store.empty());
}

TEST_F(GlooCommunicator, NamesTheRanksThatNeverCame) {
  const TemporaryDirectory store;

  const std::vector<Status> results = join_all(
      store.path(), 2, [](Member&, int) { FAIL() << "joined without ranks 2 and 3"; }, 2s,
      [](GlooOptions& options) { options.size = 4; });

  EXPECT_EQ(results[0].code(), StatusCode::kTimeout) << results[0].to_string();
  EXPECT_NE(results[0].message().find("ranks 2 and 3 did not join"), std::string::npos)
      << results[0].message();
  EXPECT_TRUE(store.empty());
}

TEST_F(GlooCommunicator, NamesBothRanksOfDifferentSizesAtOnce) {
  const TemporaryDirectory store;
  const auto start = std::chrono::steady_clock::now();

  const std::vector<Status> results = join_all(
      store.path(), 2, [](Member&, int) { FAIL() << "joined ranks of different sizes"; }, 60s,
      [](GlooOptions& options) { options.size = 2 + options.rank; });

  for (const Status& result : results) {
    EXPECT_EQ(result.code(), StatusCode::kInvalidArgument) << result.to_string();
    EXPECT_NE(result.message().find("rank 0"), std::string::npos) << result.message();
    EXPECT_NE(result.message().find("rank 1"), std::string::npos) << result.message();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);
}

TEST_F(GlooCommunicator, TwoProcessesOfOneRankAreAnError) {
  const TemporaryDirectory store;

  const std::vector<Status> results = join_all(
      store.path(), 2, [](Member&, int) {}, 30s, [](GlooOptions& options) { options.rank = 0; });

  EXPECT_EQ(results[0].code(), StatusCode::kInvalidArgument) << results[0].to_string();
  EXPECT_NE(results[0].message().find("two processes came to " + store.path() + " as rank 0: process "),
            std::string::npos)
      << results[0].to_string();
  EXPECT_EQ(results[0].to_string(), results[1].to_string());
}

TEST_F(GlooCommunicator, RefusesAStoreThatOthersCanWrite) {
  const TemporaryDirectory store;
  ASSERT_EQ(chmod(store.path().c_str(), 0777), 0);
  Member member(create_host_backend(0));

  const Status status =
      create_gloo_communicator({.rank = 0, .size = 2, .store = store.path()}, member.backend()).status();

  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
  EXPECT_NE(status.message().find("a new directory"), std::string::npos) << status.message();

  // As /tmp is: nobody should close it to the others.
  ASSERT_EQ(chmod(store.path().c_str(), 01777), 0);
  const Status shared =
      create_gloo_communicator({.rank = 0, .size = 2, .store = store.path()}, member.backend()).status();

  EXPECT_EQ(shared.code(), StatusCode::kInvalidArgument) << shared.to_string();
  EXPECT_NE(shared.message().find("such as " + store.path() + "/"), std::string::npos) << shared.message();
  EXPECT_EQ(shared.message().find("chmod"), std::string::npos) << shared.message();
}

TEST_F(GlooCommunicator, ListensWhereItIsTold) {
  const TemporaryDirectory store;
  for (const std::string interface : {"lo", "127.0.0.1"}) {
    const std::vector<Status> results = join_all(
        store.path(), 2, [](Member& member, int) { EXPECT_TRUE(member.communicator().barrier().ok()); }, 30s,
        [&](GlooOptions& options) { options.interface = interface; });
    for (const Status& result : results) EXPECT_TRUE(result.ok()) << result.to_string();
  }
  Member member(create_host_backend(0));
  const Status status =
      create_gloo_communicator({.rank = 0, .size = 2, .store = store.path(), .interface = "no-such-0"},
                               member.backend())
          .status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("no-such-0"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("set FOREBAY_INTERFACE"), std::string::npos) << status.message();
}

int listening_sockets() {
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    int listens = 0;
    socklen_t size = sizeof(listens);
    const int descriptor = std::atoi(entry.path().filename().c_str());
    if (getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0) found += listens;
  }
  return found;
}

TEST_F(GlooCommunicator, ConnectedRanksListenNowhere) {
  const int before = listening_sockets();
  const TemporaryDirectory store;
  const std::vector<Status> results = join_all(store.path(), 3, [&](Member& member, int) {
    EXPECT_TRUE(member.communicator().barrier().ok());
    EXPECT_EQ(listening_sockets(), before);
    EXPECT_TRUE(member.communicator().barrier().ok());
  });
  for (const Status& result : results) EXPECT_TRUE(result.ok()) << result.to_string();
}

TEST_F(GlooCommunicator, RefusesToListenAtAllAddresses) {
  const TemporaryDirectory store;
  for (const std::string everywhere : {"0.0.0.0", "::"}) {
    Member member(create_host_backend(0));
    const Status status =
        create_gloo_communicator({.rank = 0, .size = 2, .store = store.path(), .interface = everywhere},
                                 member.backend())
            .status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << everywhere << ": " << status.to_string();
    EXPECT_NE(status.message().find("all addresses"), std::string::npos) << status.message();
  }
}

// Connects to each port of this host that listens, until destroyed. Some connections send bytes.
class Scanner {
 public:
  ~Scanner() {
    done_ = true;
    thread_.join();
  }
  int made() const { return made_; }

 private:
  void scan() {
    for (std::deque<internal::Descriptor> kept; !done_; testing::let_others_run()) {
      std::ifstream table("/proc/self/net/tcp");
      std::string line;
      while (std::getline(table, line)) {
        unsigned number = 0;
        unsigned host = 0;
        unsigned port = 0;
        unsigned state = 0;
        if (std::sscanf(line.c_str(), "%u: %x:%x %*x:%*x %x", &number, &host, &port, &state) != 4) continue;
        // Listens at 127.0.0.1.
        if (state == 0x0a && host == htonl(INADDR_LOOPBACK))
          kept.push_back(hit(static_cast<std::uint16_t>(port)));
        if (kept.size() > 200) kept.pop_front();
      }
    }
  }
  internal::Descriptor hit(std::uint16_t port) {
    internal::Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    static_cast<void>(
        !connect(socket.number(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)));
    const std::string greeting = "fbpeers1" + std::string(72, 'x');
    if (++made_ % 2 == 0)
      static_cast<void>(!send(socket.number(), greeting.data(), greeting.size(), MSG_NOSIGNAL));
    return socket;
  }

  std::atomic<bool> done_{false};
  std::atomic<int> made_{0};
  std::thread thread_{[this] { scan(); }};
};

TEST_F(GlooCommunicator, StrangersAtItsPortsDisturbNoRank) {
  const Scanner scanner;
  for (int round = 0; round < 10; ++round) {
    const TemporaryDirectory store;
    const std::vector<Status> results = join_all(
        store.path(), 4, [](Member& member, int) { EXPECT_TRUE(member.communicator().barrier().ok()); });
    for (const Status& result : results) EXPECT_TRUE(result.ok()) << result.to_string();
    EXPECT_TRUE(store.empty());
  }
  EXPECT_GT(scanner.made(), 0) << "no port was found";
}

TEST_F(GlooCommunicator, RefusesARankThatDoesNotExist) {
  Member member(create_host_backend(0));
  EXPECT_EQ(create_gloo_communicator({.rank = 2, .size = 2}, member.backend()).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(create_gloo_communicator({.rank = 0, .size = 0}, member.backend()).status().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(Gloo, CommunicatorConformance,
                         ::testing::Combine(::testing::Values(kGloo), ::testing::Values(1, 2, 3, 4)),
                         conformance_name);

}  // namespace forebay::testing
