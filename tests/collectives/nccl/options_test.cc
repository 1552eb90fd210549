// The features that only the NCCL communicator has: a trainer's communicator, registered buffers, its own
// reduction; and the ranks' agreement about them.
#include "tests/collectives/nccl/world.h"
#include "tests/support/let_others_run.h"

namespace forebay::testing {
namespace {

using nccl::NcclComm;
using nccl::NcclResult;

constexpr std::chrono::milliseconds kDeadline{20'000};

void on_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

// Ranks with a GPU each that share a control plane, and the calls of a trainer into NCCL itself.
class Trainers {
 public:
  explicit Trainers(int size) : size_(size), gpu_(gpus(size)), group_(LocalGroup::create(size)) {
    const fake_nccl::FakeNccl& fake = nccl_.controls();
    init_ = fake.symbol<nccl::ncclCommInitRankConfig_function>("ncclCommInitRankConfig");
    get_error_ = fake.symbol<nccl::ncclCommGetAsyncError_function>("ncclCommGetAsyncError");
    abort_ = fake.symbol<nccl::ncclCommAbort_function>("ncclCommAbort");
    EXPECT_EQ(fake.symbol<nccl::ncclGetUniqueId_function>("ncclGetUniqueId")(&id_), NcclResult::kSuccess);
  }

  std::unique_ptr<Backend> create_backend(int rank) { return gpu_.create_backend(rank); }
  fake_nccl::FakeNcclAccount account() const { return nccl_.controls().accounts(); }

  // A communicator of the trainer's own, of all ranks.
  NcclComm create(CudaBackend& backend, int rank) {
    struct Call {
      Trainers* self;
      int rank;
      NcclComm comm;
    } call{this, rank, nullptr};
    throw_if_error(backend.call_in_context(
        [](void* argument) {
          auto* const wanted = static_cast<Call*>(argument);
          nccl::NcclConfig config;
          config.blocking = 0;
          wanted->self->init_(&wanted->comm, wanted->self->size_, wanted->self->id_, wanted->rank, &config);
        },
        &call));
    for (NcclResult state = NcclResult::kInProgress; state == NcclResult::kInProgress;)
      EXPECT_EQ(get_error_(call.comm, &state), NcclResult::kSuccess);
    return call.comm;
  }
  void abort(NcclComm comm) const { abort_(comm); }

  Result<std::unique_ptr<NcclCommunicator>> join(Member& member, int rank, const NcclOptions& options) {
    Result<std::unique_ptr<Communicator>> control =
        group_->communicator(rank, member.backend(), member.kernels());
    FOREBAY_RETURN_IF_ERROR(control.status());
    return create_nccl_communicator(std::move(control).value(), static_cast<CudaBackend&>(member.backend()),
                                    member.kernels(), options);
  }

 private:
  const int size_;
  FakeGpu gpu_;
  FakeNcclLibrary nccl_;
  const std::shared_ptr<LocalGroup> group_;  // Shared with the communicators it hands out.
  nccl::NcclUniqueId id_{};
  nccl::ncclCommInitRankConfig_function* init_ = nullptr;
  nccl::ncclCommGetAsyncError_function* get_error_ = nullptr;
  nccl::ncclCommAbort_function* abort_ = nullptr;
};

Status gather_by(Member& member, NcclCommunicator& communicator) {
  std::byte* const target = member.allocate(64 * static_cast<std::size_t>(communicator.size()));
  return communicator.all_gather(
      {.source = member.allocate(64), .target = target, .target_stride_bytes = 64, .bytes = 64},
      member.stream());
}

TEST(NcclOptions, ATrainersCommunicatorIsUsedAndLeftToTheTrainer) {
  Trainers trainers(2);
  on_ranks(2, [&](int rank) {
    Member member(trainers.create_backend(rank));
    const NcclComm comm = trainers.create(static_cast<CudaBackend&>(member.backend()), rank);
    {
      auto joined = trainers.join(member, rank, {.deadline = kDeadline, .adopted = comm});
      ASSERT_TRUE(joined.ok()) << joined.status().to_string();
      EXPECT_TRUE(gather_by(member, *joined.value()).ok());
      EXPECT_TRUE(member.backend().stream_synchronize(member.stream()).ok());
      EXPECT_TRUE(joined.value()->status().ok());
      // A group made from it has one of its own, of all the group's ranks.
      EXPECT_TRUE(joined.value()->split(0, -rank).ok());
    }
    EXPECT_GE(trainers.account().comms, 1u);
    trainers.abort(comm);
  });
  EXPECT_EQ(trainers.account().aborts, 2u);
  EXPECT_EQ(trainers.account().destroys, 2u);
}

TEST(NcclOptions, ATrainersCommunicatorOfAnotherRankIsRefused) {
  Trainers trainers(2);
  on_ranks(2, [&](int rank) {
    Member member(trainers.create_backend(rank));
    const NcclComm comm = trainers.create(static_cast<CudaBackend&>(member.backend()), 1 - rank);
    const Status status = trainers.join(member, rank, {.deadline = kDeadline, .adopted = comm}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
    EXPECT_NE(status.message().find("of 2, not rank"), std::string::npos) << status.message();
    trainers.abort(comm);
  });
  EXPECT_EQ(trainers.account().aborts, 2u);
}

// Ranks 0 and 1 of three are all of a group of two.
TEST(NcclOptions, ATrainersCommunicatorOfMoreRanksIsRefused) {
  Trainers trainers(3);
  const std::shared_ptr<LocalGroup> group = LocalGroup::create(2);
  on_ranks(3, [&](int rank) {
    Member member(trainers.create_backend(rank));
    auto& backend = static_cast<CudaBackend&>(member.backend());
    const NcclComm comm = trainers.create(backend, rank);
    if (rank < 2) {
      const Status status =
          create_nccl_communicator(value_or_throw(group->communicator(rank, backend, member.kernels())),
                                   backend, member.kernels(), {.deadline = kDeadline, .adopted = comm})
              .status();
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
      EXPECT_NE(status.message().find("of 3, not rank "), std::string::npos) << status.message();
    }
    trainers.abort(comm);
  });
}

TEST(NcclOptions, AfterAFailureATrainersCommunicatorIsRevokedAndNoMore) {
  Trainers trainers(2);
  on_ranks(2, [&](int rank) {
    Member member(trainers.create_backend(rank));
    const NcclComm comm = trainers.create(static_cast<CudaBackend&>(member.backend()), rank);
    {
      auto joined = trainers.join(member, rank, {.deadline = kDeadline, .adopted = comm});
      ASSERT_TRUE(joined.ok()) << joined.status().to_string();
      if (rank == 0) {
        // Rank 1 never comes to it: without the revocation the stream would wait for ever.
        EXPECT_TRUE(gather_by(member, *joined.value()).ok());
        joined.value()->abort(Status(StatusCode::kUnavailable, "given up"));
      }
      while (joined.value()->status().ok()) testing::let_others_run();
      EXPECT_TRUE(member.backend().stream_synchronize(member.stream()).ok());
      EXPECT_EQ(joined.value()->status().message(), "given up");
    }
    trainers.abort(comm);
  });
  EXPECT_EQ(trainers.account().aborts, 2u);
}

TEST(NcclOptions, RanksThatWantDifferentOrdersAreNamed) {
  Trainers trainers(3);
  on_ranks(3, [&](int rank) {
    Member member(trainers.create_backend(rank));
    const NcclOrder order = rank == 2 ? NcclOrder::kFast : NcclOrder::kRank;
    const Status status = trainers.join(member, rank, {.deadline = kDeadline, .order = order}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
    EXPECT_NE(status.message().find("rank 2 has"), std::string::npos) << status.message();
  });
}

TEST(NcclOptions, ACommunicatorOfTheTrainersIsAdoptedOnAllRanksOrOnNone) {
  Trainers trainers(2);
  on_ranks(2, [&](int rank) {
    Member member(trainers.create_backend(rank));
    const NcclComm comm = trainers.create(static_cast<CudaBackend&>(member.backend()), rank);
    void* const adopted = rank == 1 ? comm : nullptr;
    const Status status = trainers.join(member, rank, {.deadline = kDeadline, .adopted = adopted}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
    EXPECT_NE(status.message().find("rank 0 has none of the trainer's, rank 1 has one; adopt"),
              std::string::npos)
        << status.message();
    trainers.abort(comm);
  });
}

TEST(NcclOptions, TwoRanksOnOneDeviceAreRefusedAsNcclRefusesThem) {
  Trainers trainers(2);
  on_ranks(2, [&](int rank) {
    Member member(trainers.create_backend(0));
    const Status status = trainers.join(member, rank, {.deadline = kDeadline}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
    EXPECT_NE(status.message().find("a device of its own"), std::string::npos) << status.message();
  });
}

TEST(NcclOptions, ABufferIsRegisteredOnceAndGivenBack) {
  Trainers trainers(2);
  on_ranks(2, [&](int rank) {
    Member member(trainers.create_backend(rank));
    auto joined = trainers.join(member, rank, {.deadline = kDeadline});
    ASSERT_TRUE(joined.ok()) << joined.status().to_string();
    NcclCommunicator& communicator = *joined.value();
    std::byte* const buffer = member.allocate(4096);

    EXPECT_EQ(communicator.register_buffer(nullptr, 4096).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(communicator.register_buffer(buffer, 0).code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(communicator.register_buffer(buffer, 4096).ok());
    EXPECT_EQ(communicator.register_buffer(buffer, 4096).code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(communicator.deregister_buffer(buffer).ok());
    EXPECT_EQ(communicator.deregister_buffer(buffer).code(), StatusCode::kInvalidArgument);

    EXPECT_TRUE(communicator.register_buffer(buffer, 4096).ok());
    EXPECT_TRUE(communicator.status().ok());
  });
  EXPECT_EQ(trainers.account().registrations, 0u);
}

// The rank's sums, once they are there.
std::vector<float> reduced(Member& member, Communicator& communicator,
                           const ReduceScatterArguments& arguments) {
  EXPECT_EQ(communicator.reduce_scatter(arguments, member.stream()).to_string(), Status().to_string());
  EXPECT_TRUE(member.backend().stream_synchronize(member.stream()).ok());
  EXPECT_TRUE(communicator.status().ok());
  return member.read(arguments.target, arguments.count);
}

// The fake adds round the ring, so its bits differ from those in rank order: NCCL did it, and was asked to.
TEST(NcclOptions, TheFastOrderIsNcclsOwnSumWhereItIsExactEnough) {
  constexpr std::size_t kCount = 1024;
  constexpr int kRanks = 3;
  Trainers trainers(kRanks);
  std::atomic<int> differences{0};
  on_ranks(kRanks, [&](int rank) {
    Member member(trainers.create_backend(rank));
    auto joined = trainers.join(member, rank, {.deadline = kDeadline, .order = NcclOrder::kFast});
    ASSERT_TRUE(joined.ok()) << joined.status().to_string();
    std::vector<float> contribution(kCount * kRanks);
    for (std::size_t i = 0; i < contribution.size(); ++i) contribution[i] = sample(test_seed(), rank, i);
    float* const source = member.allocate_copy(contribution);
    std::byte* const receive = member.allocate(contribution.size() * sizeof(float));
    float* const target = member.allocate_copy(std::vector<float>(kCount, 0.5f));
    for (const bool first : {false, true}) {
      const std::vector<float> sums = reduced(member, *joined.value(),
                                              {.source = reinterpret_cast<std::byte*>(source),
                                               .source_stride_bytes = kCount * sizeof(float),
                                               .count = kCount,
                                               .type = DataType::kFloat32,
                                               .receive = receive,
                                               .target = target,
                                               .first = first});
      for (std::size_t i = 0; i < kCount; ++i) {
        const std::size_t index = static_cast<std::size_t>(rank) * kCount + i;
        float in_order = sample(test_seed(), 0, index);
        for (int r = 1; r < kRanks; ++r) in_order += sample(test_seed(), r, index);
        if (!first) in_order = 0.5f + in_order;
        ASSERT_NEAR(sums[i], in_order, 1e-4f);
        if (float_bits(sums[i]) != float_bits(in_order)) ++differences;
      }
    }
  });
  EXPECT_GT(differences.load(), 0);
}

// NCCL takes slices that lie side by side, and would round sums of narrow types.
TEST(NcclOptions, TheFastOrderIsTheRanksOwnWhereNcclsIsAnother) {
  constexpr std::size_t kCount = 96;
  constexpr std::size_t kColumns = 2 * kCount;
  constexpr int kRanks = 3;
  Trainers trainers(kRanks);
  on_ranks(kRanks, [&](int rank) {
    Member member(trainers.create_backend(rank));
    auto joined = trainers.join(member, rank, {.deadline = kDeadline, .order = NcclOrder::kFast});
    ASSERT_TRUE(joined.ok()) << joined.status().to_string();
    // Values that every type has.
    const auto value = [](int of, std::size_t i) { return static_cast<float>((of + 1) * (i % 7)); };
    std::vector<float> wide(kColumns * kRanks);
    std::vector<std::uint16_t> narrow(kColumns * kRanks);
    for (std::size_t i = 0; i < wide.size(); ++i) {
      wide[i] = value(rank, i);
      narrow[i] = static_cast<std::uint16_t>(float_bits(wide[i]) >> 16);
    }
    std::byte* const sources[] = {reinterpret_cast<std::byte*>(member.allocate_copy(wide)),
                                  reinterpret_cast<std::byte*>(member.allocate_copy(narrow))};
    std::byte* const receive = member.allocate(wide.size() * sizeof(float));
    float* const target = member.allocate<float>(kCount);
    for (const DataType type : {DataType::kFloat32, DataType::kBfloat16}) {
      const bool is_wide = type == DataType::kFloat32;
      const std::vector<float> sums = reduced(member, *joined.value(),
                                              {.source = sources[is_wide ? 0 : 1],
                                               .source_stride_bytes = kColumns * element_bytes(type),
                                               .count = kCount,
                                               .type = type,
                                               .receive = receive,
                                               .target = target,
                                               .first = true});
      for (std::size_t i = 0; i < kCount; ++i) {
        const std::size_t index = static_cast<std::size_t>(rank) * kColumns + i;
        EXPECT_EQ(sums[i], value(0, index) + value(1, index) + value(2, index)) << i;
      }
    }
  });
}

}  // namespace
}  // namespace forebay::testing
