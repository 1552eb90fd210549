// How the ranks of a mesh connect: through addresses in the rendezvous store.
#include <algorithm>
#include <numeric>
#include <system_error>

#include "collectives/process/gloo_mesh.h"
#include "collectives/signal_mask.h"

namespace forebay::internal {
namespace {

using std::chrono::milliseconds;

// How often a rank that connects looks for addresses, and whether the others still come.
constexpr milliseconds kPoll{2};
constexpr milliseconds kLookPeriod{20};

}  // namespace

Status GlooMesh::connect_planes(Clock::time_point deadline) {
  std::vector<int> all(static_cast<std::size_t>(size()));
  std::iota(all.begin(), all.end(), 0);
  FOREBAY_ASSIGN_OR_RETURN(ProvenConnections connections,
                           ProvenConnections::listen({.address = address_,
                                                      .group = membership().generation,
                                                      .secret = store_->secret(),
                                                      .rank = rank(),
                                                      .size = size(),
                                                      .world_ranks = world_ranks(all),
                                                      .planes = kGlooPlaneCount}));
  FOREBAY_RETURN_IF_ERROR(store_->write(address_name(rank()), connections.introduction()));
  const Clock::time_point limit = deadline + kGlooBackstop;
  FOREBAY_RETURN_IF_ERROR(connect_peers(connections, limit));
  for (int plane = 0; plane < kGlooPlaneCount; ++plane) {
    const auto left = std::max(std::chrono::ceil<milliseconds>(limit - Clock::now()), milliseconds(1));
    int taken = rank();
    try {
      contexts_[plane] = std::make_unique<GlooContext>(rank(), size(), device_, left, [&](int peer) {
        taken = peer;
        return connections.take(plane, peer);
      });
    } catch (const std::exception& error) {
      if (taken == rank()) throw;
      return Status(StatusCode::kPeerLost, rank_list(world_ranks({taken})),
                    " closed its connection: ", error.what());
    }
  }
  return {};
}

Status GlooMesh::connect_peers(ProvenConnections& connections, Clock::time_point limit) {
  // A rank that is stopped here keeps its peers from connecting to each other. The monitor finds it through
  // the wait graph at the deadline.
  WaitMonitor::Waiting waiting(*monitor_, {.fingerprint = kGlooConnecting}, membership().name_in_origin, {},
                               [] {});
  std::vector<int> unread(static_cast<std::size_t>(rank()));
  std::iota(unread.begin(), unread.end(), 0);
  for (std::vector<int> missing = connections.missing(); !missing.empty(); missing = connections.missing()) {
    waiting.expect(world_ranks(missing));
    Status failed;
    std::erase_if(unread, [&](int peer) {
      const std::optional<std::string> address = store_->read(address_name(peer));
      if (address && failed.ok()) failed = connections.connect(peer, *address);
      return address.has_value();
    });
    if (failed.ok()) failed = connections.advance(unread.empty() ? kLookPeriod : kPoll);
    FOREBAY_RETURN_IF_ERROR(store_->status());
    FOREBAY_RETURN_IF_ERROR(waiting.verdict());
    if (Clock::now() >= limit)
      return Status(StatusCode::kTimeout, rank_list(world_ranks(missing)), " did not join");
    FOREBAY_RETURN_IF_ERROR(failed);
    // That rank's own text says more, and is the first failure.
    if (!is_running()) return Status(StatusCode::kPeerLost, "another rank failed");
  }
  return {};
}

Status GlooMesh::begin_watching(Clock::time_point deadline) {
  try {
    start_watching();
    return {};
  } catch (const std::system_error& error) {
    return Status(StatusCode::kUnavailable, here(),
                  " cannot start a thread to check its peers: ", error.what(), "; raise ulimit -u or -v");
  } catch (const std::exception& error) {
    return diagnose(error, kGlooHealth, describe(kGlooConnecting), peers(), {}, deadline);
  }
}

Status GlooMesh::connect(Clock::time_point deadline) {
  if (size() == 1) return {};
  const NoSigpipe guard;
  Status status;
  try {
    status = connect_planes(deadline);
  } catch (const std::exception& error) {
    status = Status(StatusCode::kUnavailable, error.what());
  }
  if (status.code() == StatusCode::kPeerLost) await_first_failure();
  if (const Status known = store_->status(); !known.ok()) {
    // The store's word comes before this rank's own view.
    if (!status.ok()) status = known;
  } else if (!status.ok()) {
    status = Status(status.code(), here(), " cannot connect to the other ranks at ", address_, ": ",
                    status.message(), "; see whether a rank ended, or give the right interface");
  }
  if (status.ok()) status = begin_watching(deadline);
  if (status.ok()) {
    // A barrier: after it every rank has read all addresses. It is on the health plane because a connection
    // keeps order: afterwards every peer's receive of our goodbye is known here, and leave() does not wait.
    status = transfer(kGlooHealth, kGlooConnecting, {});
    connected_ = true;
  } else {
    status = fail(status);
  }
  store_->remove(address_name(rank()));
  return status;
}

}  // namespace forebay::internal
