#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "collectives/arguments.h"
#include "collectives/operation_book.h"
#include "collectives/simulated/link_times.h"
#include "forebay/simulated_communicator.h"

namespace forebay {
namespace {

using internal::Issued;
using internal::LinkTimes;
using internal::Operation;

constexpr std::size_t kRecordCount = 64;

// Shared by a communicator and those split from it.
struct World {
  SimulatedOptions options;
  ModelBackend& backend;
  Kernels& kernels;
  std::deque<SimulatedCommunicator::SplitRule> rules;
  Status failure;
  std::deque<OperationRecord> records;  // The last kRecordCount operations.
  std::uint64_t communicators = 0;
};

class Simulated final : public SimulatedCommunicator {
 public:
  Simulated(std::shared_ptr<World> world, int rank, std::vector<int> members)
      : world_(std::move(world)),
        rank_(rank),
        members_(std::move(members)),
        times_(world_->options, members_, rank),
        number_(world_->communicators++) {}

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return static_cast<int>(members_.size()); }
  const char* name() const noexcept override { return "simulated"; }

  Status reduce_scatter(const ReduceScatterArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(world_->failure);
    FOREBAY_RETURN_IF_ERROR(internal::check_arguments(arguments, size()));
    const std::uint64_t bytes = arguments.count * element_bytes(arguments.type);
    note(internal::reduce_scatter_transfer(arguments).fingerprint);
    FOREBAY_RETURN_IF_ERROR(queue(times_.direct("reduce_scatter", bytes), stream));
    count(Operation::kReduceScatter, bytes);
    if (arguments.count == 0) return {};
    return world_->kernels.accumulate(internal::accumulate_arguments(arguments, rank_, size()), stream);
  }

  Status all_gather(const AllGatherArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(world_->failure);
    FOREBAY_RETURN_IF_ERROR(internal::check_arguments(arguments, size()));
    note(internal::all_gather_transfer(arguments).fingerprint);
    FOREBAY_RETURN_IF_ERROR(
        queue(times_.gather(arguments.decides ? "decision" : "all_gather", arguments.bytes), stream));
    count(Operation::kAllGather, arguments.bytes);
    return {};
  }

  Status send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
              Stream stream) override {
    return message(Operation::kSend, source, bytes, peer, tag, stream);
  }
  Status recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag, Stream stream) override {
    return message(Operation::kRecv, target, bytes, peer, tag, stream);
  }

  Status exchange(Span<const std::byte> mine, Span<std::byte> all) override {
    FOREBAY_RETURN_IF_ERROR(world_->failure);
    FOREBAY_RETURN_IF_ERROR(internal::check_exchange(mine, all, size()));
    note(internal::control_transfer(Operation::kExchange, mine, all).fingerprint);
    world_->backend.spend(times_.control("exchange", mine.size()));
    for (std::size_t r = 0; !mine.empty() && r < members_.size(); ++r)
      std::copy(mine.begin(), mine.end(), all.begin() + r * mine.size());
    count(Operation::kExchange, mine.size());
    return {};
  }

  Status barrier() override {
    FOREBAY_RETURN_IF_ERROR(world_->failure);
    note(internal::control_transfer(Operation::kBarrier, {}, {}).fingerprint);
    world_->backend.spend(times_.control("barrier", 0));
    count(Operation::kBarrier, 0);
    return {};
  }

  Result<std::unique_ptr<Communicator>> split(int color, int key) override {
    FOREBAY_RETURN_IF_ERROR(world_->failure);
    if (world_->rules.empty() && size() > 1) {
      return Status(StatusCode::kUnsupported, "cannot split " + std::to_string(size()) +
                                                  " simulated ranks: the color and key of the others are "
                                                  "not known; give a rule by expect_split()");
    }
    std::vector<internal::SplitWish> wishes{{color, key, 0}};
    if (!world_->rules.empty()) {
      const SplitRule rule = std::move(world_->rules.front());
      world_->rules.pop_front();
      wishes.clear();
      for (int r = 0; r < size(); ++r) {
        const auto [other_color, other_key] = rule(r);
        wishes.push_back({other_color, other_key, r});
      }
      const internal::SplitWish& mine = wishes[static_cast<std::size_t>(rank_)];
      if (mine.color != color || mine.key != key) {
        return invalid_argument("the rule of a split gives color ", mine.color, " and key ", mine.key,
                                " to rank ", rank_, ", which asks for ", color, " and ", key,
                                "; give the rules in the order of the splits");
      }
    }
    note(internal::Fingerprint{.operation = Operation::kSplit});
    world_->backend.spend(times_.control("split", 2 * sizeof(int)));
    count(Operation::kSplit, 0);
    std::vector<int> members;
    int rank = 0;
    for (const internal::SplitWish& member : internal::split_members(std::move(wishes), color)) {
      if (member.rank == rank_) rank = static_cast<int>(members.size());
      members.push_back(members_[static_cast<std::size_t>(member.rank)]);
    }
    return std::unique_ptr<Communicator>(std::make_unique<Simulated>(world_, rank, std::move(members)));
  }
  void expect_split(SplitRule rule) override { world_->rules.push_back(std::move(rule)); }

  Status status() const override { return world_->failure; }
  void abort(const Status& cause) noexcept override {
    if (world_->failure.ok()) {
      world_->failure = internal::cause_of_abort(cause, members_[static_cast<std::size_t>(rank_)]);
    }
  }
  Status vote(std::uint64_t, Span<const std::byte> decision) override {
    FOREBAY_RETURN_IF_ERROR(world_->failure);
    return internal::check_vote(decision);
  }
  std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t) override { return std::nullopt; }

  Traffic traffic() const override {
    Traffic all;
    const auto peers = static_cast<std::uint64_t>(size() - 1);
    for (const auto& [operation, account] : accounts_) {
      all.sent_bytes += account.bytes_to_each * peers;
      all.received_bytes += account.bytes_to_each * peers;
      for (const auto& [peer, traffic] : account.messages) {
        all.sent_bytes += traffic.sent_bytes;
        all.received_bytes += traffic.received_bytes;
      }
    }
    return all;
  }
  std::vector<OperationTraffic> operation_traffic() const override {
    std::vector<OperationTraffic> result;
    for (const auto& [operation, account] : accounts_) {
      OperationTraffic& one = result.emplace_back();
      one.operation = internal::operation_name(operation);
      one.count = account.count;
      one.peers.assign(members_.size(), {account.bytes_to_each, account.bytes_to_each});
      one.peers[static_cast<std::size_t>(rank_)] = {};
      for (const auto& [peer, traffic] : account.messages)
        one.peers[static_cast<std::size_t>(peer)] = traffic;
    }
    return result;
  }
  std::vector<OperationRecord> last_operations() const override {
    return {world_->records.begin(), world_->records.end()};
  }

 private:
  struct Account {
    std::uint64_t count = 0;
    std::uint64_t bytes_to_each = 0;  // Collectives: to each other rank, and from it.
    std::map<int, Traffic> messages;  // By peer.
  };

  Status queue(const ModelWork& work, Stream stream) {
    return size() == 1 ? Status() : world_->backend.work(work, stream);
  }

  Status message(Operation operation, const std::byte* address, std::size_t bytes, int peer,
                 std::uint32_t tag, Stream stream) {
    const bool sends = operation == Operation::kSend;
    FOREBAY_RETURN_IF_ERROR(world_->failure);
    FOREBAY_RETURN_IF_ERROR(
        internal::check_peer(sends ? "send" : "recv", address, bytes, peer, rank_, size()));
    note(internal::issued_message(operation, bytes, peer, tag));
    if (world_->options.mail != nullptr) {
      FOREBAY_RETURN_IF_ERROR(deliver(sends, bytes, peer, tag, stream));
    } else {
      FOREBAY_RETURN_IF_ERROR(queue(times_.message(sends ? "send" : "recv", bytes, peer), stream));
    }
    Account& account = accounts_[operation];
    ++account.count;
    (sends ? account.messages[peer].sent_bytes : account.messages[peer].received_bytes) += bytes;
    return {};
  }

  // The link's time is the sender's; the receiver waits for its end.
  Status deliver(bool sends, std::size_t bytes, int peer, std::uint32_t tag, Stream stream) {
    const int from = members_[static_cast<std::size_t>(sends ? rank_ : peer)];
    const int to = members_[static_cast<std::size_t>(sends ? peer : rank_)];
    const std::uint64_t sequence = messages_[{sends, peer, tag}]++;
    std::string name;
    for (const std::uint64_t part :
         {number_, static_cast<std::uint64_t>(from), static_cast<std::uint64_t>(to),
          static_cast<std::uint64_t>(tag), sequence})
      name += std::to_string(part) + ".";
    std::shared_ptr<ModelSignal> signal = world_->options.mail->message(name);
    if (!sends) return world_->backend.wait_for(std::move(signal), "recv", stream);
    FOREBAY_RETURN_IF_ERROR(queue(times_.message("send", bytes, peer), stream));
    auto argument = std::make_unique<std::shared_ptr<ModelSignal>>(std::move(signal));
    const Status queued = world_->backend.call_host(
        stream,
        [](void* given) {
          const std::unique_ptr<std::shared_ptr<ModelSignal>> sent(
              static_cast<std::shared_ptr<ModelSignal>*>(given));
          (*sent)->announce();
        },
        argument.get());
    if (queued.ok()) argument.release();
    return queued;
  }

  void count(Operation operation, std::uint64_t bytes_to_each) {
    Account& account = accounts_[operation];
    ++account.count;
    account.bytes_to_each += bytes_to_each;
  }

  void note(internal::Fingerprint fingerprint) {
    fingerprint.sequence = sequence_++;
    note(Issued{.fingerprint = fingerprint});
  }
  void note(const Issued& issued) {
    if (world_->records.size() == kRecordCount) world_->records.pop_front();
    const auto now = world_->backend.now();
    world_->records.push_back({.what = describe(issued), .state = OperationState::kQueued, .queued = now});
  }

  const std::shared_ptr<World> world_;
  const int rank_;
  const std::vector<int> members_;  // The world's numbers.
  const LinkTimes times_;
  const std::uint64_t
      number_;  // This communicator among those of its world; the same on ranks that split alike.
  std::uint64_t sequence_ = 0;
  std::map<std::tuple<bool, int, std::uint32_t>, std::uint64_t> messages_;  // Sent and received so far.
  std::map<Operation, Account> accounts_;
};

Status refuse(const std::string& message) {
  return Status(StatusCode::kInvalidArgument, "cannot simulate ranks: " + message);
}

Status check_level(const SimulatedLevel& level, int smaller) {
  const std::string name = "level " + level.name;
  if (level.ranks < 1 || level.ranks % smaller != 0) {
    return refuse(name + " has " + std::to_string(level.ranks) + " ranks; use a multiple of the " +
                  std::to_string(smaller) + " of the level before");
  }
  const std::pair<const char*, double> figures[] = {
      {"latency_seconds", level.latency_seconds},
      {"message_seconds", level.message_seconds},
      {"processor_seconds_per_byte", level.processor_seconds_per_byte}};
  for (const auto& [figure, value] : figures) {
    if (!(value >= 0))
      return refuse(name + " has " + figure + " " + std::to_string(value) + "; use 0 or more");
  }
  if (!(level.bytes_per_second > 0)) return refuse(name + " has no bytes_per_second; use a number above 0");
  if (level.ranks_per_link < 1) return refuse(name + " has no ranks_per_link; use 1 or more");
  if (level.resource < 0 || level.resource >= kModelResourcesMax) {
    return refuse(name + " uses resource " + std::to_string(level.resource) + "; use 0 to " +
                  std::to_string(kModelResourcesMax - 1));
  }
  return {};
}

}  // namespace

std::shared_ptr<ModelSignal> SimulatedMail::message(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto [place, is_new] = messages_.try_emplace(name, nullptr);
  if (is_new) place->second = std::make_shared<ModelSignal>(clock_);
  if (abandoned_) place->second->announce();
  return place->second;
}

void SimulatedMail::abandon() {
  const std::lock_guard lock(mutex_);
  abandoned_ = true;
  for (const auto& [name, signal] : messages_) signal->announce();
}

Result<std::unique_ptr<SimulatedCommunicator>> SimulatedCommunicator::create(const SimulatedOptions& options,
                                                                             ModelBackend& backend,
                                                                             Kernels& kernels) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    return refuse("rank " + std::to_string(options.rank) + " of " + std::to_string(options.size) +
                  " does not exist; use 0 to size - 1");
  }
  if (backend.timing() == nullptr) return refuse("nothing takes time on the backend; give it a timing");
  constexpr std::size_t kLevelsMax = std::tuple_size_v<decltype(ModelWork::parts)>;
  std::size_t parts = options.levels.size();
  for (const SimulatedLevel& level : options.levels) parts += level.processor_seconds_per_byte > 0 ? 1 : 0;
  if (parts > kLevelsMax)
    return refuse(std::to_string(parts) + " levels, counting those that use processors twice; use at most " +
                  std::to_string(kLevelsMax));
  int smaller = 1;
  for (const SimulatedLevel& level : options.levels) {
    FOREBAY_RETURN_IF_ERROR(check_level(level, smaller));
    smaller = level.ranks;
  }
  if (smaller < options.size) {
    return refuse("the outermost level has " + std::to_string(smaller) + " ranks and there are " +
                  std::to_string(options.size) + "; add a level that joins them all");
  }
  std::vector<int> members(static_cast<std::size_t>(options.size));
  std::iota(members.begin(), members.end(), 0);
  auto world = std::make_shared<World>(World{options, backend, kernels, {}, {}, {}, 0});
  return std::unique_ptr<SimulatedCommunicator>(
      std::make_unique<Simulated>(std::move(world), options.rank, std::move(members)));
}

}  // namespace forebay
