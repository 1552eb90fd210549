// The simulated communicator: the durations of its operations on a topology, and the cases of the conformance
// suite that need neither bytes nor other ranks.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "forebay/error.h"
#include "forebay/grouped_communicator.h"
#include "forebay/rank_grid.h"
#include "forebay/simulated_communicator.h"

namespace forebay {
namespace {

constexpr int kCompute = 0;
constexpr int kNode = 1;
constexpr int kNetwork = 2;

// A kernel takes no time.
class NoTime : public ModelTiming {
 public:
  ModelWork copy(ModelCopy, std::uint64_t) const override { return {.name = "copy"}; }
  ModelWork fill(std::uint64_t) const override { return {.name = "fill"}; }
  ModelWork fp32_products(const char* name, double, double, double, double) const override {
    return {.name = name};
  }
  ModelWork kernel(const char* name, std::uint64_t) const override { return {.name = name}; }
};

// Nodes of 4 ranks at 100 GB/s; 2 links of 10 GB/s leave a node, so a rank has 5 GB/s.
std::vector<SimulatedLevel> levels(int ranks) {
  return {{.name = "node", .ranks = 4, .bytes_per_second = 100e9, .latency_seconds = 1e-6, .resource = kNode},
          {.name = "network",
           .ranks = ranks,
           .bytes_per_second = 10e9,
           .ranks_per_link = 2,
           .latency_seconds = 5e-6,
           .message_seconds = 1e-6,
           .resource = kNetwork}};
}

class SimulatedRanks {
 public:
  explicit SimulatedRanks(int size, GatherAlgorithm gather = GatherAlgorithm::kRing)
      : SimulatedRanks(size, gather, levels((size + 3) / 4 * 4)) {}
  SimulatedRanks(int size, GatherAlgorithm gather, std::vector<SimulatedLevel> links)
      : backend(value_or_throw(ModelBackend::create({.timing = &timing, .clock = &clock}))),
        kernels(value_or_throw(Kernels::create(*backend))),
        communicator(value_or_throw(SimulatedCommunicator::create({.size = size,
                                                                   .levels = std::move(links),
                                                                   .gather = gather,
                                                                   .processor_resource = kCompute,
                                                                   .control_seconds = 10e-6},
                                                                  *backend, *kernels))),
        stream(value_or_throw(backend->stream_create())),
        memory(value_or_throw(backend->alloc(std::size_t{1} << 36))) {}

  ReduceScatterArguments reduction(std::size_t count) const {
    return {.source = memory,
            .source_stride_bytes = count * 2,
            .count = count,
            .type = DataType::kBfloat16,
            .receive = memory + (std::size_t{1} << 34),
            .target = reinterpret_cast<float*>(memory + (std::size_t{3} << 34)),
            .first = true};
  }
  AllGatherArguments gathering(std::size_t bytes) const {
    return {.source = memory, .target = memory, .target_stride_bytes = bytes, .bytes = bytes};
  }
  // Microseconds that pass until the stream has run.
  double finish() {
    const auto begin = backend->now();
    throw_if_error(backend->stream_synchronize(stream));
    return std::chrono::duration<double, std::micro>(backend->now() - begin).count();
  }

  NoTime timing;
  HostClock clock{HostClock::Mode::kVirtual};
  std::unique_ptr<ModelBackend> backend;
  std::unique_ptr<Kernels> kernels;
  std::unique_ptr<SimulatedCommunicator> communicator;
  Stream stream;
  DevicePtr memory;
};

// 1 MB slices: 3 to neighbours at 100 GB/s beside 4 to the other node at 5 GB/s, with 1 us for each message.
TEST(SimulatedCommunicator, AReductionTakesTheSlowestLevel) {
  SimulatedRanks one_node(4);
  throw_if_error(one_node.communicator->reduce_scatter(one_node.reduction(500'000), one_node.stream));
  EXPECT_NEAR(one_node.finish(), 1 + 30, 1e-3);

  SimulatedRanks two_nodes(8);
  throw_if_error(two_nodes.communicator->reduce_scatter(two_nodes.reduction(500'000), two_nodes.stream));
  EXPECT_NEAR(two_nodes.finish(), 5 + 4 * (200 + 1), 1e-3);
}

// A ring brings the 4 MB of the other node in over the links of all 4 ranks: a quarter of a direct gather.
TEST(SimulatedCommunicator, ARingEntersEachNodeOnce) {
  SimulatedRanks ring(8);
  throw_if_error(ring.communicator->all_gather(ring.gathering(1'000'000), ring.stream));
  EXPECT_NEAR(ring.finish(), 6 * 1 + 1 * 5 + 4e6 / (4 * 5e9) * 1e6, 1e-3);

  SimulatedRanks direct(8, GatherAlgorithm::kDirect);
  throw_if_error(direct.communicator->all_gather(direct.gathering(1'000'000), direct.stream));
  EXPECT_NEAR(direct.finish(), 5 + 4 * (200 + 1), 1e-3);
}

TEST(SimulatedCommunicator, OverlappingCollectivesShareTheLinks) {
  SimulatedRanks ranks(8, GatherAlgorithm::kDirect);
  const Stream other = value_or_throw(ranks.backend->stream_create());
  throw_if_error(ranks.communicator->all_gather(ranks.gathering(1'000'000), ranks.stream));
  throw_if_error(ranks.communicator->all_gather(ranks.gathering(1'000'000), other));
  EXPECT_NEAR(ranks.finish(), 5 + 2 * 4 * (200 + 1), 1e-3);
}

TEST(SimulatedCommunicator, ProcessorsCarryTheBytesOfAllPeers) {
  std::vector<SimulatedLevel> links = levels(4);
  links[0].processor_seconds_per_byte = 1e-9;
  for (const GatherAlgorithm gather : {GatherAlgorithm::kDirect, GatherAlgorithm::kRing}) {
    SimulatedRanks ranks(4, gather, links);
    throw_if_error(ranks.communicator->all_gather(ranks.gathering(1'000'000), ranks.stream));
    EXPECT_NEAR(ranks.finish(), (gather == GatherAlgorithm::kRing ? 3 : 1) + 3000, 1e-3);
    throw_if_error(ranks.communicator->reduce_scatter(ranks.reduction(500'000), ranks.stream));
    EXPECT_NEAR(ranks.finish(), 1 + 3000, 1e-3);
    throw_if_error(ranks.communicator->send(ranks.memory, 1'000'000, 3, 0, ranks.stream));
    EXPECT_NEAR(ranks.finish(), 1 + 1000, 1e-3);
  }
}

TEST(SimulatedCommunicator, AMessageTakesItsLevel) {
  SimulatedRanks ranks(8);
  throw_if_error(ranks.communicator->send(ranks.memory, 1'000'000, 3, 0, ranks.stream));
  EXPECT_NEAR(ranks.finish(), 1 + 10, 1e-3);
  throw_if_error(ranks.communicator->recv(ranks.memory, 1'000'000, 7, 0, ranks.stream));
  EXPECT_NEAR(ranks.finish(), 5 + 200 + 1, 1e-3);
}

TEST(SimulatedCommunicator, ControlOperationsTakeHops) {
  SimulatedRanks ranks(8);
  throw_if_error(ranks.communicator->barrier());
  EXPECT_EQ(ranks.backend->now(), std::chrono::microseconds(2 * 3 * 10));

  SimulatedRanks five(5);
  throw_if_error(five.communicator->barrier());
  EXPECT_EQ(five.backend->now(), std::chrono::microseconds(2 * 3 * 10));
  SimulatedRanks four(4);
  throw_if_error(four.communicator->barrier());
  EXPECT_EQ(four.backend->now(), std::chrono::microseconds(2 * 2 * 10));
}

// 1 MB to each of 3 neighbours at 100 GB/s, then to each of 4 ranks of the other node at 5 GB/s.
TEST(SimulatedCommunicator, AnExchangeTakesTheTimeOfItsBytesToo) {
  SimulatedRanks ranks(8);
  const std::vector<std::byte> mine(1'000'000);
  std::vector<std::byte> all(8 * mine.size());
  throw_if_error(ranks.communicator->exchange(mine, all));
  EXPECT_EQ(ranks.backend->now(), std::chrono::microseconds(2 * 3 * 10 + 30 + 800));
}

// 5 ranks: one is alone in the second node, and has no neighbours.
TEST(SimulatedCommunicator, ALevelWithoutPeersTakesNoTime) {
  std::vector<SimulatedLevel> links = levels(8);
  links.insert(
      links.begin(),
      {.name = "die", .ranks = 1, .bytes_per_second = 1e9, .latency_seconds = 1, .resource = kCompute});
  SimulatedRanks ranks(8, GatherAlgorithm::kDirect, links);
  throw_if_error(ranks.communicator->all_gather(ranks.gathering(1'000'000), ranks.stream));
  EXPECT_NEAR(ranks.finish(), 5 + 4 * (200 + 1), 1e-3);
}

TEST(SimulatedCommunicator, TheAccountTellsDecisionsFromGathers) {
  SimulatedRanks ranks(4);
  ranks.backend->watch(ranks.stream);
  AllGatherArguments decision = ranks.gathering(1'000'000);
  decision.decides = true;
  throw_if_error(ranks.communicator->all_gather(decision, ranks.stream));
  throw_if_error(ranks.communicator->all_gather(ranks.gathering(2'000'000), ranks.stream));
  ranks.finish();

  std::vector<std::string> names;
  for (const ModelStreamTime& one : ranks.backend->watched()) names.push_back(one.name);
  EXPECT_EQ(names, (std::vector<std::string>{"decision", "all_gather"}));
}

TEST(SimulatedCommunicator, RemembersTheLastSixtyFourOperations) {
  SimulatedRanks ranks(4);
  for (int i = 0; i < 66; ++i) throw_if_error(ranks.communicator->barrier());
  const auto records = ranks.communicator->last_operations();
  ASSERT_EQ(records.size(), 64u);
  EXPECT_EQ(records.front().what, "barrier (operation 2)");
  EXPECT_EQ(records.back().what, "barrier (operation 65)");
}

TEST(SimulatedCommunicator, OneRankSendsNothingAndTakesNoTime) {
  SimulatedRanks one(1);
  throw_if_error(one.communicator->reduce_scatter(one.reduction(512), one.stream));
  throw_if_error(one.communicator->all_gather(one.gathering(512), one.stream));
  throw_if_error(one.communicator->barrier());
  EXPECT_EQ(one.finish(), 0);
  EXPECT_EQ(one.communicator->traffic().sent_bytes, 0u);
}

TEST(SimulatedCommunicator, OtherRanksGiveTheBytesOfThisOne) {
  SimulatedRanks ranks(5);
  const std::vector<std::byte> mine{std::byte{1}, std::byte{2}};
  std::vector<std::byte> all(10);
  throw_if_error(ranks.communicator->exchange(mine, all));
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], mine[i % 2]);
  EXPECT_EQ(ranks.communicator->exchange(mine, {all.data(), 9}).code(), StatusCode::kInvalidArgument);
}

TEST(SimulatedCommunicator, CountsThePayloadOfTheAlgorithm) {
  SimulatedRanks ranks(8);
  throw_if_error(ranks.communicator->reduce_scatter(ranks.reduction(512), ranks.stream));
  throw_if_error(ranks.communicator->all_gather(ranks.gathering(256), ranks.stream));
  throw_if_error(ranks.communicator->send(ranks.memory, 100, 2, 0, ranks.stream));
  throw_if_error(ranks.communicator->recv(ranks.memory, 40, 2, 0, ranks.stream));
  EXPECT_EQ(ranks.communicator->traffic().sent_bytes, 7u * (1024 + 256) + 100);
  EXPECT_EQ(ranks.communicator->traffic().received_bytes, 7u * (1024 + 256) + 40);
  for (const OperationTraffic& one : ranks.communicator->operation_traffic()) {
    EXPECT_EQ(one.count, 1u) << one.operation;
    EXPECT_EQ(one.peers[0].sent_bytes, 0u) << one.operation;
    if (std::string(one.operation) == "reduce_scatter") {
      EXPECT_EQ(one.peers[7].sent_bytes, 1024u);
    }
    if (std::string(one.operation) == "recv") {
      EXPECT_EQ(one.peers[2].received_bytes, 40u);
    }
  }
  const auto records = ranks.communicator->last_operations();
  ASSERT_EQ(records.size(), 4u);
  EXPECT_EQ(records[0].what, "reduce_scatter of 512 bf16 (operation 0)");
}

TEST(SimulatedCommunicator, RefusesWrongArgumentsInTheWordsOfTheOthers) {
  SimulatedRanks ranks(4);
  ReduceScatterArguments reduction = ranks.reduction(512);
  reduction.target = nullptr;
  EXPECT_EQ(ranks.communicator->reduce_scatter(reduction, ranks.stream).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(ranks.communicator->send(ranks.memory, 4, 4, 0, ranks.stream).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(ranks.communicator->send(ranks.memory, 4, 0, 0, ranks.stream).message(),
            "send: peer 0 is not another rank of 0..3 seen from rank 0; give the number of another rank");
  EXPECT_EQ(ranks.communicator->recv(ranks.memory, 4, 0, 0, ranks.stream).message(),
            "recv: peer 0 is not another rank of 0..3 seen from rank 0; give the number of another rank");
  const std::vector<std::byte> decision(kDecisionBytesMax + 1);
  EXPECT_EQ(ranks.communicator->vote(1, decision).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(ranks.communicator->vote(1, Span(decision).first(kDecisionBytesMax)).ok());
  EXPECT_TRUE(ranks.communicator->status().ok());
}

TEST(SimulatedCommunicator, StaysFailedAfterAnAbort) {
  SimulatedRanks ranks(4);
  const Status cause(StatusCode::kTimeout, "scripted");
  ranks.communicator->abort(cause);
  ranks.communicator->abort(Status(StatusCode::kIoError, "later"));
  EXPECT_EQ(ranks.communicator->status().code(), StatusCode::kTimeout);
  EXPECT_EQ(ranks.communicator->barrier().code(), StatusCode::kTimeout);
  EXPECT_EQ(ranks.communicator->all_gather(ranks.gathering(4), ranks.stream).code(), StatusCode::kTimeout);
  const std::vector<std::byte> decision(8);
  EXPECT_EQ(ranks.communicator->vote(1, decision).code(), StatusCode::kTimeout);
  EXPECT_FALSE(ranks.communicator->survivors_vote(1));
}

// Ranks of two communicators over the same ranks, as threads would simulate them.
TEST(SimulatedMail, AMessageIsOfItsCommunicatorItsTagAndItsPlaceInTheOrder) {
  const NoTime timing;
  HostClock clock(HostClock::Mode::kVirtual);
  const auto mail = std::make_shared<SimulatedMail>(clock);
  struct Rank {
    std::unique_ptr<ModelBackend> backend;
    std::unique_ptr<Kernels> kernels;
    std::unique_ptr<SimulatedCommunicator> world;
    std::unique_ptr<Communicator> other;
    Stream stream;
    DevicePtr memory;
  };
  std::vector<Rank> ranks(2);
  for (int r = 0; r < 2; ++r) {
    Rank& rank = ranks[static_cast<std::size_t>(r)];
    rank.backend = value_or_throw(ModelBackend::create({.timing = &timing, .clock = &clock}));
    rank.kernels = value_or_throw(Kernels::create(*rank.backend));
    rank.world = value_or_throw(SimulatedCommunicator::create(
        {.rank = r, .size = 2, .levels = levels(4), .mail = mail}, *rank.backend, *rank.kernels));
    rank.world->expect_split([](int of) { return std::pair(0, of); });
    rank.other = value_or_throw(rank.world->split(0, r));
    rank.stream = value_or_throw(rank.backend->stream_create());
    rank.memory = value_or_throw(rank.backend->alloc(64));
  }
  Rank& receiver = ranks[1];
  std::vector<Event> received;
  for (int i = 0; i < 2; ++i) {
    throw_if_error(receiver.world->recv(receiver.memory, 64, 0, 5, receiver.stream));
    received.push_back(value_or_throw(receiver.backend->event_create()));
    throw_if_error(receiver.backend->event_record(received.back(), receiver.stream));
  }
  const auto count = [&] {
    receiver.backend->spend({.name = "a look", .delay_seconds = 1e-6});  // The stream goes on meanwhile.
    int done = 0;
    for (const Event event : received) done += value_or_throw(receiver.backend->event_query(event)) ? 1 : 0;
    return done;
  };
  const auto send = [&](Communicator& communicator, std::uint32_t tag) {
    throw_if_error(communicator.send(ranks[0].memory, 64, 1, tag, ranks[0].stream));
    throw_if_error(ranks[0].backend->stream_synchronize(ranks[0].stream));
  };

  send(*ranks[0].world, 6);
  EXPECT_EQ(count(), 0) << "it has another tag";
  send(*ranks[0].other, 5);
  EXPECT_EQ(count(), 0) << "it is of another communicator";
  send(*ranks[0].world, 5);
  EXPECT_EQ(count(), 1);
  send(*ranks[0].world, 5);
  EXPECT_EQ(count(), 2);
}

TEST(SimulatedMail, NobodyWaitsForARankThatEndedEarly) {
  HostClock clock(HostClock::Mode::kVirtual);
  SimulatedMail mail(clock);
  const std::shared_ptr<ModelSignal> before = mail.message("before");
  ASSERT_FALSE(before->is_announced());

  mail.abandon();

  EXPECT_TRUE(before->is_announced());
  EXPECT_TRUE(mail.message("after")->is_announced());
}

TEST(SimulatedCommunicator, SplitsByTheRulesOfTheOtherRanks) {
  SimulatedRanks ranks(8);
  EXPECT_EQ(ranks.communicator->split(0, 0).status().code(), StatusCode::kUnsupported);
  ranks.communicator->expect_split([](int rank) { return std::pair(rank / 4, rank % 4); });
  ranks.communicator->expect_split([](int rank) { return std::pair(rank % 4, rank / 4); });
  const auto grouped = value_or_throw(create_grouped_communicator(*ranks.communicator, {.group = 4}));
  ranks.finish();
  EXPECT_EQ(ranks.communicator->traffic().sent_bytes, 0u) << "a split is no payload";
  ASSERT_EQ(ranks.communicator->last_operations().size(), 2u);
  EXPECT_TRUE(ranks.communicator->last_operations()[0].what.starts_with("split (operation "));
  // 1 MB slices: twice 3 MB within the node, then a 4-byte sum of each across.
  throw_if_error(grouped->reduce_scatter(ranks.reduction(500'000), ranks.stream));
  EXPECT_NEAR(ranks.finish(), 2 * (1 + 30) + 5 + 2e6 / 5e9 * 1e6 + 1, 1e-3);
  EXPECT_EQ(grouped->traffic().sent_bytes, 2u * 3'000'000 + 2'000'000);

  ranks.communicator->expect_split([](int) { return std::pair(1, 1); });
  EXPECT_EQ(ranks.communicator->split(0, 0).status().code(), StatusCode::kInvalidArgument);
  ranks.communicator->expect_split([](int) { return std::pair(0, 1); });
  EXPECT_EQ(
      ranks.communicator->split(0, 0).status().message(),
      "the rule of a split gives color 0 and key 1 to rank 0, which asks for 0 and 0; give the rules in "
      "the order of the splits");
}

TEST(SimulatedCommunicator, AnAbortNamesTheRankOfTheWorld) {
  SimulatedRanks ranks(8);
  // The keys put rank 0 behind the others of its group.
  ranks.communicator->expect_split([](int rank) { return std::pair(rank / 4, -rank); });
  const auto part = value_or_throw(ranks.communicator->split(0, 0));
  EXPECT_EQ(part->rank(), 3);
  part->abort(Status());
  EXPECT_EQ(ranks.communicator->status().message(),
            "rank 0 aborted the communicator without a cause; see its output");
}

TEST(SimulatedCommunicator, IsMadeForAHundredThousandRanks) {
  SimulatedRanks ranks(100'000);
  std::vector<std::byte> mine(800), all(800 * 100'000);
  throw_if_error(ranks.communicator->exchange(mine, all));
  for (int i = 0; i < 1000; ++i)
    throw_if_error(ranks.communicator->all_gather(ranks.gathering(1000), ranks.stream));
  EXPECT_GT(ranks.finish(), 0);
}

TEST(SimulatedCommunicator, RefusesABadTopologyByName) {
  SimulatedRanks good(1);
  const auto problem = [&](SimulatedOptions options) {
    return SimulatedCommunicator::create(options, *good.backend, *good.kernels).status();
  };
  EXPECT_EQ(problem({.rank = 2, .size = 2, .levels = levels(4)}).code(), StatusCode::kInvalidArgument);
  EXPECT_NE(problem({.size = 8, .levels = levels(4)}).message().find("outermost level has 4 ranks"),
            std::string::npos);
  std::vector<SimulatedLevel> odd = levels(8);
  odd[1].ranks = 6;
  EXPECT_NE(problem({.size = 4, .levels = odd}).message().find("level network has 6 ranks"),
            std::string::npos);
  odd = levels(8);
  odd[0].bytes_per_second = 0;
  EXPECT_NE(problem({.size = 4, .levels = odd}).message().find("level node has no bytes_per_second"),
            std::string::npos);
  odd = levels(8);
  odd[1].latency_seconds = -1;
  EXPECT_NE(problem({.size = 4, .levels = odd}).message().find("latency_seconds"), std::string::npos);
  EXPECT_EQ(problem({.rank = -1, .size = 2, .levels = levels(4)}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(problem({.rank = 3, .size = 2, .levels = levels(4)}).code(), StatusCode::kInvalidArgument);
  for (double SimulatedLevel::*figure :
       {&SimulatedLevel::message_seconds, &SimulatedLevel::processor_seconds_per_byte}) {
    odd = levels(8);
    odd[1].*figure = -1;
    EXPECT_NE(problem({.size = 4, .levels = odd}).message().find("-1.000000; use 0 or more"),
              std::string::npos);
  }
  odd = levels(8);
  odd[1].resource = -1;
  EXPECT_EQ(problem({.size = 4, .levels = odd}).message(),
            "cannot simulate ranks: level network uses resource -1; use 0 to 15");
  const auto timeless = value_or_throw(ModelBackend::create({}));
  const auto timeless_kernels = value_or_throw(Kernels::create(*timeless));
  EXPECT_EQ(SimulatedCommunicator::create({.size = 1, .levels = levels(4)}, *timeless, *timeless_kernels)
                .status()
                .message(),
            "cannot simulate ranks: nothing takes time on the backend; give it a timing");
  odd = levels(8);
  odd[0].ranks_per_link = 0;
  EXPECT_NE(problem({.size = 4, .levels = odd}).message().find("level node has no ranks_per_link"),
            std::string::npos);
  odd = levels(8);
  odd[0].resource = kModelResourcesMax - 1;
  EXPECT_TRUE(problem({.size = 4, .levels = odd}).ok());
  odd[0].resource = kModelResourcesMax;
  EXPECT_EQ(problem({.size = 4, .levels = odd}).message(),
            "cannot simulate ranks: level node uses resource 16; use 0 to 15");
  odd = levels(8);
  odd.insert(odd.begin(), 2, {.name = "die", .ranks = 1, .bytes_per_second = 1e9});
  EXPECT_TRUE(problem({.size = 4, .levels = odd}).ok());
  odd[0].processor_seconds_per_byte = 1e-9;
  EXPECT_EQ(problem({.size = 4, .levels = odd}).message(),
            "cannot simulate ranks: 5 levels, counting those that use processors twice; use at most 4");
}

}  // namespace
}  // namespace forebay
