// GlooMesh: the Transport over TCP. Gloo gives connections, framing and an I/O thread; everything that
// decides a result or an error is here.
//
// Planes. Each communicator has two Gloo contexts, one per plane, so that the stream's thread and the
// trainer's thread never share a sequence, and a third one for health. Every rank sends to and receives from
// every other rank directly, without an intermediate copy. An operation sends its fingerprint to every peer
// under a slot that is made of its plane's sequence number, and its payload under a slot that also holds a
// hash of the fingerprint. So the payload of a different operation never matches: it cannot overrun a buffer,
// for which Gloo would end the process, and comparing the fingerprints reports the mismatch.
//
// First failure. A rank that fails writes the reason into the rendezvous store, under a name that only the
// first gets, and then closes its connections. A rank that finds a connection closed looks there before it
// blames the other end. The text stays as long as the store: a rank that looks late still learns the failure.
//
// Health. The end of a process does not end every wait of its peers: Gloo forgets a send whose connection
// breaks while its I/O thread writes it, and a rank may be waiting for nothing at all. So each rank has a
// thread that waits for one byte from every peer, over connections of their own. A rank that leaves in order
// sends its byte. A connection that breaks before means that the peer died, or that it failed and has said
// why. No operation after connect() times out on these connections, so no rank is blamed for another's
// timeout.
//
// Strangers. Gloo takes the first connection that comes to a port of its own, whoever makes it. So the ranks
// connect to each other at one port each, prove who they are (ProvenConnections), and give Gloo the connected
// sockets. The port is closed once all are connected.
//
// Deadlines. A wait of Gloo that times out closes connections, and tells only that some rank did not come. So
// a WaitMonitor ends each wait at its deadline and says which rank blocked it. Gloo's own timeout is later,
// for a process in which the monitor's thread does not get to run.
//
// Its parts: gloo_connecting.cc, gloo_health.cc, gloo_operations.cc, and gloo_mesh.cc for the rest.
#pragma once

#include <gloo/transport/unbound_buffer.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "collectives/arguments.h"
#include "collectives/fingerprint.h"
#include "collectives/operation_book.h"
#include "collectives/process/gloo_context.h"
#include "collectives/process/proven_connections.h"
#include "collectives/process/transport.h"
#include "collectives/rendezvous/rendezvous_store.h"
#include "collectives/rendezvous/wait_monitor.h"

namespace forebay::internal {

enum GlooPlane : int { kGlooData, kGlooControl, kGlooHealth, kGlooPlaneCount };

// From an operation's deadline to Gloo's own timeout. Shorter: a rank on a busy host is blamed for another
// rank's delay. Longer: where threads do not run, a failure is found later.
inline constexpr std::chrono::milliseconds kGlooBackstop{5000};

// The operation "connecting".
inline constexpr Fingerprint kGlooConnecting{.sequence = kConnectSequence, .operation = Operation::kBarrier};

// Gloo matches a send and a recv of two ranks by their slot.
enum class GlooSlot : std::uint64_t {
  kFingerprint = 1,
  kPayload,
  kMessage,
  kMessagePayload,
  kProbe,
  kGoodbye
};
constexpr std::uint64_t gloo_slot(GlooSlot kind, std::uint64_t sequence, std::uint32_t low) {
  return static_cast<std::uint64_t>(kind) << 56 | (sequence & 0xffffff) << 32 | low;
}

class GlooMesh final : public Transport {
 public:
  using Clock = std::chrono::steady_clock;

  // Listens at `address` while ranks connect. Without peers, the last four are null or empty.
  GlooMesh(Membership membership, std::shared_ptr<RendezvousStore> store,
           std::shared_ptr<gloo::transport::tcp::Device> device, std::string address,
           std::shared_ptr<WaitMonitor> monitor)
      : Transport(std::move(membership)),
        store_(std::move(store)),
        device_(std::move(device)),
        address_(std::move(address)),
        monitor_(std::move(monitor)) {}
  ~GlooMesh() override;

  // Once, before anything else; collective.
  Status connect(Clock::time_point deadline);

  const char* name() const noexcept override { return "gloo"; }

  Status reduce_scatter(const Fingerprint& fingerprint, const ReduceScatterArguments& arguments) override;
  Status gather(TransportPlane plane, const Fingerprint& fingerprint, const Piece& piece) override {
    return transfer(plane == TransportPlane::kData ? kGlooData : kGlooControl, fingerprint, piece);
  }
  Status send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
              std::uint64_t sequence) override;
  Status recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag,
              std::uint64_t sequence) override;
  Status vote(std::uint64_t step, std::span<const std::byte> decision) override;
  std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t step) override;

 protected:
  Status own_status() override {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  Status fail_own(const Status& cause) noexcept override;
  Result<std::shared_ptr<Transport>> split_own(Membership membership, const std::vector<SplitWish>& members,
                                               const Exchange& exchange) override;

 private:
  using Buffer = std::unique_ptr<gloo::transport::UnboundBuffer>;
  enum class Direction : std::uint8_t { kReceived, kSent };

  // Buffers that a thread may wait for; fail_own() wakes it.
  class InFlight {
   public:
    InFlight(GlooMesh& mesh, std::vector<gloo::transport::UnboundBuffer*> buffers);
    ~InFlight();
    InFlight(const InFlight&) = delete;
    InFlight& operator=(const InFlight&) = delete;

    // False when the mesh had failed before.
    bool ok() const noexcept { return ok_; }
    void wake() const;

   private:
    GlooMesh& mesh_;
    std::vector<gloo::transport::UnboundBuffer*> buffers_;
    bool ok_;
  };
  class Operating;

  // --- names ---
  std::vector<int> peers() const;  // In the order of their ranks.
  std::string here() const { return "rank " + std::to_string(world_rank(rank())); }
  std::string failure_name() const { return membership().generation + ".failed"; }
  std::string address_name(int of_rank) const {
    return membership().generation + ".address." + std::to_string(of_rank);
  }
  std::string vote_name(int of_rank) const {
    return membership().generation + ".vote." + std::to_string(of_rank);
  }

  // --- connecting ---
  Status connect_planes(Clock::time_point deadline);
  // Until every peer has proved who it is.
  Status connect_peers(ProvenConnections& connections, Clock::time_point limit);
  // Starts the thread that watches the peers.
  Status begin_watching(Clock::time_point deadline);

  // --- health ---
  // Posts the receives of all goodbyes and starts the thread that waits for them.
  void start_watching();
  void watch() noexcept;
  // The failure when a health connection broke.
  void fail_for_lost_peers(const std::exception& error);
  // Ends the thread, and unless this communicator has failed tells the peers that its end is in order.
  void leave() noexcept;
  void say_goodbye();

  // --- operations ---
  Buffer buffer(GlooPlane plane, const void* address, std::size_t bytes) {
    return contexts_[plane]->createUnboundBuffer(const_cast<void*>(address), bytes);
  }
  // Waits for a completion, of which `peer` is the other end. False when something ended the wait. Throws
  // Gloo's exceptions.
  static bool await_one(gloo::transport::UnboundBuffer& buffer, Direction direction, int* peer,
                        Clock::time_point limit);
  Status transfer(GlooPlane plane, const Fingerprint& fingerprint, const Piece& piece);
  // A send or recv: `fingerprint` travels in front of `bytes`. Calls run(head, body, operating, limit).
  template <typename Function>
  Status run_message(const Issued& issued, int peer, const Fingerprint& fingerprint, const std::byte* bytes,
                     Function run);
  // The body of transfer(); `theirs` gets the peers' fingerprints, by rank. Throws Gloo's exceptions.
  Status transfer_over(GlooPlane plane, const Fingerprint& fingerprint, const Piece& piece,
                       const std::vector<int>& peers, std::vector<Fingerprint>& theirs,
                       Clock::time_point limit);

  // --- failing ---
  // Neither this rank nor, as far as the store knows, another has failed.
  bool is_running();
  // Gives the rank that closed a connection, or another one, some time to publish the reason.
  void await_first_failure();
  // The failure behind an exception of Gloo in the operation `what`. `candidates` are asked whether their
  // connection is broken; `missing` are the ranks that nothing has come from; a timeout names them.
  Status diagnose(const std::exception& error, GlooPlane plane, const std::string& what,
                  const std::vector<int>& candidates, const std::vector<int>& missing,
                  Clock::time_point deadline);
  // The ranks of `candidates` whose connection on this plane is broken.
  std::vector<int> find_lost(GlooPlane plane, const std::vector<int>& candidates);
  void publish_vote(const Ballot& ballot);

  // Shared with the communicators split from this one, whose texts are there too; the last one closes it.
  const std::shared_ptr<RendezvousStore> store_;
  const std::shared_ptr<gloo::transport::tcp::Device> device_;
  const std::string address_;
  const std::shared_ptr<WaitMonitor> monitor_;  // The world's, which its groups share.
  std::unique_ptr<GlooContext> contexts_[kGlooPlaneCount];
  // By rank: kLeaving once its goodbye is here. Written by Gloo's I/O thread.
  std::vector<std::byte> goodbyes_;
  Buffer goodbye_in_;  // Over goodbyes_; null until watched.
  std::thread watcher_;
  std::atomic<bool> connected_{false};
  std::mutex mutex_;
  // Guarded by mutex_.
  Status failure_;
  Ballot ballot_;  // Fixed once failure_ is set.
  std::vector<const InFlight*> in_flight_;
};

// One operation while it waits: for the monitor, and for messages.
class GlooMesh::Operating {
 public:
  Operating(GlooMesh& mesh, const Issued& issued, const InFlight& in_flight, const std::vector<int>& peers)
      : mesh_(mesh),
        waiting_(*mesh.monitor_, issued, mesh.membership().name_in_origin, mesh.world_ranks(peers),
                 [&in_flight] { in_flight.wake(); }) {}

  // Waits for a completion, of which `peer` is the other end. False when fail_own() or the monitor ended the
  // wait. Throws Gloo's exceptions.
  bool await_next(gloo::transport::UnboundBuffer& buffer, Direction direction, int* peer,
                  Clock::time_point limit);
  // The same for `count` completions.
  bool await(gloo::transport::UnboundBuffer& buffer, Direction direction, std::size_t count,
             Clock::time_point limit);
  // All peers have come; now they have to finish.
  void finish(const std::vector<int>& peers) { waiting_.finish(mesh_.world_ranks(peers)); }
  // The failure that ended a wait.
  Status end();

 private:
  GlooMesh& mesh_;
  WaitMonitor::Waiting waiting_;
};

}  // namespace forebay::internal
