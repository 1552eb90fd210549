#include "collectives/process/joining.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "collectives/process/shm_segment.h"
#include "forebay/shm_communicator.h"

namespace forebay {
namespace internal {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPoll{2};
// How long rank 0 still tells why ranks cannot join, should one be stopped. They ask every kPoll.
constexpr std::chrono::milliseconds kFarewellMax{1000};

std::string failure_name(const Joining& joining) {
  return joining.name("failed");
}

// Whether all ranks can share memory, as all of them find.
Result<bool> one_place(const Joining& joining) {
  const Result<std::string> host = host_identity();
  const std::string mine =
      host.ok() ? host.value() : "no /proc on rank " + std::to_string(joining.membership.rank);
  const auto name = [&](int rank) { return joining.name("place." + std::to_string(rank)); };
  FOREBAY_RETURN_IF_ERROR(joining.store->write(name(joining.membership.rank), mine));
  bool one = joining.membership.size <= kShmRanksMax;
  std::string first;
  for (int rank = 0; rank < joining.membership.size; ++rank) {
    FOREBAY_ASSIGN_OR_RETURN(std::string place, await_text(joining, name(rank),
                                                           "rank " + std::to_string(rank) +
                                                               " came but did not say where it runs"));
    if (rank == 0) first = place;
    one = one && place == first;
  }
  return one;
}

Result<std::shared_ptr<Transport>> connect_by_place(const Joining& joining) {
  FOREBAY_ASSIGN_OR_RETURN(const bool one, one_place(joining));
  Result<std::shared_ptr<Transport>> transport = one ? connect_shm(joining) : connect_gloo(joining);
  // All are connected, so all have read it.
  if (transport.ok()) joining.store->remove(joining.name("place." + std::to_string(joining.membership.rank)));
  return transport;
}

}  // namespace

Result<Joining> meet_others(const char* transport, const ProcessOptions& options, const Backend& backend) {
  Joining joining{.interface = options.interface};
  FOREBAY_ASSIGN_OR_RETURN(
      joining.membership, check_membership(transport, options.rank, options.size, options.deadline, backend));
  const std::chrono::milliseconds patience = options.join_deadline.count() == 0
                                                 ? joining.membership.deadline
                                                 : clamp_deadline(options.join_deadline);
  const SteadyClock::time_point limit = SteadyClock::now() + patience;
  const Participant me{options.rank, options.size, std::string(transport) + " " + options.configuration};
  FOREBAY_ASSIGN_OR_RETURN(joining.store,
                           open_rendezvous({options.store, options.texts, me, options.interface, limit}));
  if (joining.interface.empty()) joining.interface = joining.store->local_address();
  FOREBAY_ASSIGN_OR_RETURN(joining.meeting, meet(*joining.store, me, limit, patience));
  joining.limit = SteadyClock::now() + joining.membership.deadline;
  joining.membership.generation = joining.meeting.generation;
  return joining;
}

Result<std::string> await_text(const Joining& joining, const std::string& name, const std::string& missing) {
  for (;;) {
    if (std::optional<std::string> text = joining.store->read(name)) return *std::move(text);
    if (const auto reason = joining.store->read(failure_name(joining))) return decode_failure(*reason);
    FOREBAY_RETURN_IF_ERROR(joining.store->status());
    if (SteadyClock::now() >= joining.limit) {
      return Status(StatusCode::kTimeout, "rank ", joining.membership.rank, " waited ",
                    joining.membership.deadline.count(), " ms: ", missing,
                    "; look there for the reason, or raise the deadline");
    }
    std::this_thread::sleep_for(kPoll);
  }
}

Status conclude(Joining& joining, Status joined) {
  if (!joined.ok()) {
    // The others wait for this rank.
    if (const auto first = joining.store->write_once(failure_name(joining), encode_failure(joined)))
      joined = decode_failure(*first);
    joining.store->stay_at_most(kFarewellMax);
  }
  leave_meeting(*joining.store, joining.membership.rank);
  return joined;
}

Result<std::unique_ptr<Communicator>> create_over(const char* transport, Connect connect,
                                                  const ProcessOptions& options, Backend& backend) {
  FOREBAY_ASSIGN_OR_RETURN(Joining joining, meet_others(transport, options, backend));
  Result<std::shared_ptr<Transport>> connected = connect(joining);
  FOREBAY_RETURN_IF_ERROR(conclude(joining, connected.status()));
  return create_process_communicator(std::move(connected).value(), backend);
}

}  // namespace internal

Result<std::unique_ptr<Communicator>> create_process_communicator(const ProcessOptions& options,
                                                                  Backend& backend) {
  if (options.size == 1) return create_shm_communicator(options, backend);
  return internal::create_over("process", internal::connect_by_place, options, backend);
}

}  // namespace forebay
