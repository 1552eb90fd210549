// How the ranks of a mesh connect: through addresses in the rendezvous store, plane by plane.
#include <algorithm>
#include <condition_variable>
#include <functional>
#include <system_error>

#include "collectives/process/gloo_mesh.h"
#include "collectives/signal_mask.h"

namespace forebay::internal {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPoll{2};
// How often a rank that connects looks whether the others still come.
constexpr milliseconds kLookPeriod{20};

}  // namespace

// Ends the waits of connecting.
class GlooMesh::ConnectWatch {
 public:
  // `goes_on`: false when there is nothing more to wait for.
  ConnectWatch(GlooMesh& mesh, const std::function<bool()>& goes_on) : mesh_(mesh) {
    const BlockedSignals blocked;
    thread_ = std::thread([this, goes_on] {
      std::unique_lock lock(mutex_);
      while (!done_.wait_for(lock, kLookPeriod, [this] { return is_done_; })) {
        if (goes_on()) continue;
        for (const auto& context : mesh_.contexts_) context->closeConnections();
        return;
      }
    });
  }
  ~ConnectWatch() {
    {
      const std::lock_guard lock(mutex_);
      is_done_ = true;
    }
    done_.notify_one();
    thread_.join();
  }
  ConnectWatch(const ConnectWatch&) = delete;
  ConnectWatch& operator=(const ConnectWatch&) = delete;

 private:
  GlooMesh& mesh_;
  std::mutex mutex_;
  std::condition_variable done_;
  bool is_done_ = false;
  std::thread thread_;
};

Status GlooMesh::make_contexts(Clock::time_point deadline) {
  for (int plane = 0; plane < kGlooPlaneCount; ++plane) {
    const auto left = std::chrono::ceil<milliseconds>(deadline + kGlooBackstop - Clock::now());
    contexts_[plane] = std::make_unique<GlooContext>(rank(), size(), device_, left);
    FOREBAY_RETURN_IF_ERROR(
        store_->write(addresses_name(static_cast<GlooPlane>(plane), rank()), contexts_[plane]->addresses()));
  }
  return {};
}

Status GlooMesh::connect_planes(Clock::time_point deadline) {
  FOREBAY_RETURN_IF_ERROR(make_contexts(deadline));
  // A rank that is stopped here keeps its peers from connecting to each other. The monitor finds it through
  // the wait graph at the deadline.
  WaitMonitor::Waiting waiting(*monitor_, {.fingerprint = kGlooConnecting}, membership().name_in_origin, {},
                               [] {});
  const Clock::time_point limit = deadline + kGlooBackstop;
  const std::function<bool()> goes_on = [&] {
    return is_running() && waiting.verdict().ok() && Clock::now() < limit;
  };
  const ConnectWatch watch(*this, goes_on);
  // All ranks connect in this order, so that they do not wait for each other in a circle.
  for (int plane = 0; plane < kGlooPlaneCount; ++plane) {
    for (const int peer : peers()) {
      FOREBAY_RETURN_IF_ERROR(connect_peer(static_cast<GlooPlane>(plane), peer, limit, waiting, goes_on));
    }
  }
  return {};
}

Status GlooMesh::connect_peer(GlooPlane plane, int peer, Clock::time_point limit,
                              WaitMonitor::Waiting& waiting, const std::function<bool()>& goes_on) {
  const std::string name = addresses_name(plane, peer);
  const std::string who = "rank " + std::to_string(world_rank(peer));
  waiting.expect({world_rank(peer)});
  std::optional<std::string> addresses;
  while (!(addresses = store_->read(name)) && goes_on()) std::this_thread::sleep_for(kPoll);
  Status failed;
  try {
    if (addresses && !contexts_[plane]->connect(peer, *addresses))
      failed = Status(StatusCode::kPeerLost, who,
                      " gave addresses that cannot be read; run one version of forebay");
  } catch (const std::exception& error) {
    failed = Status(StatusCode::kPeerLost, who, ": ", error.what());
  }
  FOREBAY_RETURN_IF_ERROR(store_->status());
  FOREBAY_RETURN_IF_ERROR(waiting.verdict());
  if (Clock::now() >= limit) return Status(StatusCode::kTimeout, who, " did not join");
  FOREBAY_RETURN_IF_ERROR(failed);
  // That rank's own text says more, and is the first failure.
  if (!is_running()) return Status(StatusCode::kPeerLost, "another rank failed");
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
    status = Status(status.code(), here(), " cannot connect to the other ranks over ", device_->str(), ": ",
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
  for (int plane = 0; plane < kGlooPlaneCount; ++plane)
    store_->remove(addresses_name(static_cast<GlooPlane>(plane), rank()));
  return status;
}

}  // namespace forebay::internal
