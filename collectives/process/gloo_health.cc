// How the ranks of a mesh learn that a peer has left or is lost: one byte from each, over the health plane.
#include <chrono>
#include <utility>

#include "collectives/process/gloo_mesh.h"
#include "collectives/signal_mask.h"

namespace forebay::internal {
namespace {

// How long a rank that leaves tries to say so, if a peer's socket is full. After it the peer takes this rank
// for dead.
constexpr std::chrono::milliseconds kGoodbyeMax{200};

constexpr std::byte kLeaving{1};

}  // namespace

void GlooMesh::start_watching() {
  goodbyes_.resize(static_cast<std::size_t>(size()));
  goodbye_in_ = buffer(kGlooHealth, goodbyes_.data(), goodbyes_.size());
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank())
      goodbye_in_->recv(peer, gloo_slot(GlooSlot::kGoodbye, 0, 0), static_cast<std::size_t>(peer), 1);
  }
  const BlockedSignals blocked;
  watcher_ = std::thread([this] { watch(); });
}

void GlooMesh::watch() noexcept {
  try {
    const InFlight in_flight(*this, {goodbye_in_.get()});
    if (!in_flight.ok()) return;
    try {
      // Ends when this communicator has failed or leaves, or when all peers have left.
      const Clock::time_point never = Clock::now() + kDeadlineMax;
      int peer = -1;
      for (int left = size() - 1; left > 0; --left) {
        if (!await_one(*goodbye_in_, Direction::kReceived, &peer, never)) return;
      }
    } catch (const std::exception& error) {
      fail_for_lost_peers(error);
    }
  } catch (const std::exception&) {
    // Out of memory for the message: the operations still see the broken connection, or their deadline.
  }
}

void GlooMesh::fail_for_lost_peers(const std::exception& error) {
  // While ranks connect, a rank's timeout closes these connections too, before it has published that.
  if (!connected_) await_first_failure();
  if (!status().ok()) return;
  // Gloo writes nothing into goodbyes_ for a rank that is found lost here.
  std::vector<int> lost = find_lost(kGlooHealth, peers());
  std::erase_if(lost, [&](int peer) { return goodbyes_[static_cast<std::size_t>(peer)] == kLeaving; });
  if (lost.empty()) lost = peers();
  if (const Status server = monitor_->server_status(); !server.ok()) {
    static_cast<void>(fail_of_all(server));
    return;
  }
  static_cast<void>(
      fail(Status(StatusCode::kPeerLost, here(), " checked its peers: ", rank_list(world_ranks(lost)),
                  " closed the connection (", error.what(), "); see why it ended")));
}

void GlooMesh::leave() noexcept {
  if (!watcher_.joinable()) return;
  goodbye_in_->abortWaitRecv();
  // From here on no peer's end is this rank's failure; all leave at about the same time.
  watcher_.join();
  if (!status().ok()) return;
  try {
    say_goodbye();
  } catch (const std::exception&) {
    // Out of memory: the peers take this rank for dead.
  }
}

void GlooMesh::say_goodbye() {
  const NoSigpipe guard;
  const Clock::time_point limit = Clock::now() + kGoodbyeMax;
  // One buffer for each peer: a broken connection to one must not end the wait for another.
  std::vector<Buffer> goodbyes;
  for (const int peer : peers()) {
    Buffer goodbye = buffer(kGlooHealth, &kLeaving, 1);
    try {
      goodbye->send(peer, gloo_slot(GlooSlot::kGoodbye, 0, 0), 0, 1);
      goodbyes.push_back(std::move(goodbye));
    } catch (const std::exception&) {
      // That peer has left already.
    }
  }
  for (const Buffer& goodbye : goodbyes) {
    try {
      int peer = -1;
      static_cast<void>(await_one(*goodbye, Direction::kSent, &peer, limit));
    } catch (const std::exception&) {
      // It left meanwhile, or cannot be reached.
    }
  }
}

}  // namespace forebay::internal
