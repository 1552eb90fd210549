// Gloo gives connections, framing and an I/O thread; everything that decides a result or an error is here.
//
// Each communicator has two Gloo contexts, one per plane, so that the stream's thread and the trainer's
// thread never share a sequence, and a third for the health of all (see Health). An operation sends its
// fingerprint to every peer under a slot made of its plane's sequence number, and its payload under a slot
// that also holds a hash of the fingerprint: the payload of a different operation never matches, so a
// mismatch cannot overrun a buffer (Gloo would end the process) and is reported by comparing fingerprints.
// Every rank sends to and receives from every other directly, with no intermediate copy.
//
// First failure. A rank that fails writes why into the rendezvous store, under a name that only the first
// gets, and then closes its connections; a rank that finds a connection closed looks there before it blames
// the other end. The text stays until the store goes: a rank that looks late still learns the first failure.
//
// Health. The end of a process does not end every wait of its peers: Gloo forgets a send whose connection
// breaks while its I/O thread writes it, and a rank may be waiting for nothing at all. So each rank also has
// a thread that waits for one byte from every peer, over connections of their own. A rank that leaves in
// order sends its byte; a connection that breaks before it means that the peer died or has failed (and has
// said why). No operation after connect() times out on these connections, so nobody is blamed for another's
// timeout.
//
// Deadlines. A wait of Gloo that times out closes connections, and says of whom it waited for only that they
// did not come. So a WaitMonitor judges each wait at its deadline and ends it; Gloo's own timeout is later,
// for a process that does not get to run its monitor.
#include "forebay/gloo_communicator.h"

#include <gloo/common/error.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "collectives/arguments.h"
#include "collectives/ballot.h"
#include "collectives/fingerprint.h"
#include "collectives/first_failure.h"
#include "collectives/process/gloo_context.h"
#include "collectives/process/joining.h"
#include "collectives/process/transport.h"
#include "collectives/rendezvous/rendezvous_store.h"
#include "collectives/rendezvous/store_address.h"
#include "collectives/rendezvous/wait_monitor.h"
#include "forebay/host_gradients.h"

namespace forebay {
namespace {

using internal::Ballot;
using internal::Collective;
using internal::Fingerprint;
using internal::kDeadlineMax;
using internal::Membership;
using internal::Operation;
using internal::Piece;
using internal::RendezvousStore;
using internal::SplitWish;
using internal::Transport;
using internal::TransportPlane;
using internal::WaitMonitor;
using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Gloo closes all connections of a context when a wait of it times out, before that rank can publish why. A
// rank that sees a connection close gives the other this long to publish before it reports its own view.
constexpr milliseconds kFirstFailureWaitMax{200};
constexpr milliseconds kPoll{2};
// How long a rank that has failed waits for the votes of the others, which hear of it within milliseconds and
// then say what they voted for. One that died says nothing.
constexpr milliseconds kVoteWaitMax{2000};
// How long a rank that leaves tries to say so, should a peer's socket be full. After it the peer takes this
// rank for dead.
constexpr milliseconds kGoodbyeMax{200};
// From an operation's deadline to Gloo's own timeout. Shorter: a rank on a busy host is blamed for what
// another did. Longer: where threads do not run, a failure is found later.
constexpr milliseconds kBackstop{5000};
// How often a rank that connects looks whether the others still come.
constexpr milliseconds kLookPeriod{20};
constexpr std::uint64_t kNeverSent = ~std::uint64_t{0};
constexpr Fingerprint kConnecting{.sequence = internal::kConnectSequence,
                                  .operation = static_cast<std::uint32_t>(Operation::kBarrier)};
constexpr std::uint64_t kNoStep = ~std::uint64_t{0};

// A peer that dies while we write makes the kernel send SIGPIPE, which would end this process instead of
// giving an error to handle. The signal is kept from this thread, and taken back if one came.
class NoSigpipe {
 public:
  NoSigpipe() noexcept {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoSigpipe() {
    const timespec now{};
    if (!was_pending_) {
      while (sigtimedwait(&pipe_, nullptr, &now) == -1 && errno == EINTR) {
      }
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  sigset_t pipe_, before_;
  bool was_pending_;
};

// Keeps all signals from this thread.
class NoSignals {
 public:
  NoSignals() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

enum Plane : int { kDataPlane, kControlPlane, kHealthPlane, kPlaneCount };

constexpr const char* kPlaneNames[kPlaneCount] = {"data", "control", "health"};

enum class Kind : std::uint64_t { kFingerprint = 1, kPayload, kMessage, kMessagePayload, kProbe, kGoodbye };

std::uint64_t slot(Kind kind, std::uint64_t sequence, std::uint32_t low) {
  return static_cast<std::uint64_t>(kind) << 56 | (sequence & 0xffffff) << 32 | low;
}

// What the payload's slot knows of the operation.
std::uint32_t hash(const Fingerprint& fingerprint) {
  std::uint64_t value = fingerprint.count * 0x9e3779b97f4a7c15u;
  value ^= (static_cast<std::uint64_t>(fingerprint.operation) << 32 | fingerprint.type) * 0xc2b2ae3d27d4eb4fu;
  value ^= value >> 29;
  value *= 0x165667b19e3779f9u;
  return static_cast<std::uint32_t>(value >> 32);
}

constexpr std::byte kLeaving{1};

class Mesh final : public Transport {
 public:
  Mesh(Membership membership, std::shared_ptr<RendezvousStore> store,
       std::shared_ptr<gloo::transport::Device> device, std::shared_ptr<WaitMonitor> monitor)
      : Transport(std::move(membership)),
        store_(std::move(store)),
        device_(std::move(device)),
        monitor_(std::move(monitor)) {}
  ~Mesh() override {
    leave_origin();
    leave();
    // Those that are left may still ask for each other's votes.
    if (store_ != nullptr && !own_status().ok()) store_->stay_at_most(kVoteWaitMax + kFirstFailureWaitMax);
    // Never closeConnections() here: Gloo resets them, and what is still on its way to a peer is lost.
  }

  Status connect(SteadyClock::time_point deadline);

  const char* name() const noexcept override { return "gloo"; }

  Status reduce_scatter(const Fingerprint& fingerprint, const ReduceScatterArguments& arguments) override;
  Status gather(TransportPlane plane, const Fingerprint& fingerprint, const Piece& piece) override {
    return transfer(plane == TransportPlane::kData ? kDataPlane : kControlPlane, fingerprint, piece);
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

  // Buffers that something may wait for: fail() wakes the waiters.
  class InFlight {
   public:
    // `ok()` is false when the mesh has failed already.
    InFlight(Mesh& mesh, std::vector<gloo::transport::UnboundBuffer*> buffers)
        : mesh_(mesh), buffers_(std::move(buffers)) {
      const std::lock_guard lock(mesh_.mutex_);
      ok_ = mesh_.failure_.ok();
      mesh_.in_flight_.push_back(this);
    }
    ~InFlight() {
      const std::lock_guard lock(mesh_.mutex_);
      std::erase(mesh_.in_flight_, this);
    }
    InFlight(const InFlight&) = delete;
    InFlight& operator=(const InFlight&) = delete;
    bool ok() const noexcept { return ok_; }
    void wake() const {
      for (gloo::transport::UnboundBuffer* waiting : buffers_) {
        waiting->abortWaitRecv();
        waiting->abortWaitSend();
      }
    }

   private:
    Mesh& mesh_;
    std::vector<gloo::transport::UnboundBuffer*> buffers_;
    bool ok_;
  };

  // An operation that waits for `peers`, for the monitor and for messages.
  class Operating {
   public:
    Operating(Mesh& mesh, const internal::Issued& issued, const InFlight& in_flight,
              const std::vector<int>& peers)
        : mesh_(mesh),
          waiting_(*mesh.monitor_, issued, mesh.membership().name_in_origin, mesh.world_ranks(peers),
                   [&in_flight] { in_flight.wake(); }) {}

    // Waits for a completion, of which `peer` is the other end. False when fail() or the monitor ended the
    // wait. Throws what Gloo throws.
    bool await_next(gloo::transport::UnboundBuffer& buffer, Direction direction, int* peer,
                    SteadyClock::time_point limit) {
      if (!await_one(buffer, direction, peer, limit)) return false;
      waiting_.came(mesh_.world_rank(*peer));
      return true;
    }
    bool await(gloo::transport::UnboundBuffer& buffer, Direction direction, std::size_t count,
               SteadyClock::time_point limit) {
      int peer = 0;
      for (std::size_t i = 0; i < count; ++i) {
        if (!await_next(buffer, direction, &peer, limit)) return false;
      }
      return true;
    }
    // All peers have come; what is left is that they finish.
    void finish(const std::vector<int>& peers) { waiting_.finish(mesh_.world_ranks(peers)); }
    // What ended a wait.
    Status end() {
      const Status verdict = waiting_.verdict();
      return verdict.ok() ? mesh_.status() : mesh_.fail_of_all(verdict);
    }

   private:
    Mesh& mesh_;
    WaitMonitor::Waiting waiting_;
  };

  // In the order of their ranks.
  std::vector<int> peers() const {
    std::vector<int> all;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) all.push_back(peer);
    }
    return all;
  }

  std::string failure_name() const { return membership().generation + ".failed"; }
  std::string addresses_name(Plane plane, int of_rank) const {
    return membership().generation + "." + kPlaneNames[plane] + "." + std::to_string(of_rank);
  }
  std::string vote_name(int of_rank) const {
    return membership().generation + ".vote." + std::to_string(of_rank);
  }
  void publish_vote(const Ballot& ballot);

  Status transfer(Plane plane, const Fingerprint& fingerprint, const Piece& piece);

  Buffer buffer(Plane plane, const void* address, std::size_t bytes) {
    return contexts_[plane]->createUnboundBuffer(const_cast<void*>(address), bytes);
  }

  // Waits for a completion, of which `peer` is the other end. False when something ended the wait. Throws
  // what Gloo throws.
  static bool await_one(gloo::transport::UnboundBuffer& buffer, Direction direction, int* peer,
                        SteadyClock::time_point limit) {
    const auto left = std::chrono::ceil<milliseconds>(limit - SteadyClock::now());
    const milliseconds timeout = std::max(left, milliseconds(1));
    return direction == Direction::kReceived ? buffer.waitRecv(peer, timeout)
                                             : buffer.waitSend(peer, timeout);
  }

  // The failure behind an exception of Gloo in the operation `what`. `missing`: the ranks nothing has come
  // from, which are to blame for a timeout. `lost_candidates`: whom to ask about a broken connection.
  Status diagnose(const std::exception& error, Plane plane, const std::string& what,
                  const std::vector<int>& candidates, const std::vector<int>& missing,
                  SteadyClock::time_point deadline);

  // The ranks of `candidates` whose connection on this plane is broken.
  std::vector<int> find_lost(Plane plane, const std::vector<int>& candidates);

  Status connect_planes(SteadyClock::time_point deadline);
  class ConnectWatch;
  // Neither this rank nor, as far as the store knows, another has failed.
  bool is_awaited();

  // Lets this rank or another publish why a connection is closed, if it can.
  void await_first_failure();

  // Posts the receives of all goodbyes and starts the thread that waits for them.
  void start_watching();
  void watch() noexcept;
  // Ends the thread, and unless this communicator has failed tells the peers that its end is in order.
  void leave() noexcept;

  // Shared with the communicators split from this one: texts of each are there, and whoever is last closes
  // it.
  const std::shared_ptr<RendezvousStore> store_;
  const std::shared_ptr<gloo::transport::Device> device_;
  const std::shared_ptr<WaitMonitor> monitor_;  // The world's; its groups have it too.
  std::unique_ptr<internal::GlooContext> contexts_[kPlaneCount];
  // By rank: kLeaving once its goodbye is here. Written by Gloo's I/O thread.
  std::vector<std::byte> goodbyes_;
  Buffer goodbye_in_;  // Over goodbyes_; null until watched.
  std::thread watcher_;
  std::atomic<bool> connected_{false};
  std::mutex mutex_;
  // Guarded by mutex_.
  Status failure_;
  Ballot ballot_;  // Does not change any more once failure_ is set.
  std::vector<const InFlight*> in_flight_;
};

// Ends the waits of connecting.
class Mesh::ConnectWatch {
 public:
  // `goes_on`: false when there is nothing more to wait for.
  ConnectWatch(Mesh& mesh, const std::function<bool()>& goes_on) : mesh_(mesh) {
    // The thread inherits the mask: signals are for the program's own threads.
    const NoSignals guard;
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
  Mesh& mesh_;
  std::mutex mutex_;
  std::condition_variable done_;
  bool is_done_ = false;
  std::thread thread_;
};

bool Mesh::is_awaited() {
  return own_status().ok() && store_->status().ok() && !store_->posted(failure_name());
}

Status Mesh::connect_planes(SteadyClock::time_point deadline) {
  for (int plane = 0; plane < kPlaneCount; ++plane) {
    const auto left = std::chrono::ceil<milliseconds>(deadline + kBackstop - SteadyClock::now());
    contexts_[plane] = std::make_unique<internal::GlooContext>(rank(), size(), device_, left);
    FOREBAY_RETURN_IF_ERROR(
        store_->write(addresses_name(static_cast<Plane>(plane), rank()), contexts_[plane]->addresses()));
  }
  // A rank that is stopped here keeps its peers from connecting to each other: whom to blame is at the end of
  // the chain, which the monitor follows at the deadline.
  WaitMonitor::Waiting waiting(*monitor_, {.fingerprint = kConnecting}, membership().name_in_origin, {},
                               [] {});
  const SteadyClock::time_point limit = deadline + kBackstop;
  const std::function<bool()> goes_on = [&] {
    return is_awaited() && waiting.verdict().ok() && SteadyClock::now() < limit;
  };
  const ConnectWatch watch(*this, goes_on);
  // All ranks connect in this order, so that they do not wait for each other in a circle.
  for (int plane = 0; plane < kPlaneCount; ++plane) {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      const std::string name = addresses_name(static_cast<Plane>(plane), peer);
      std::optional<std::string> addresses;
      waiting.expect({world_rank(peer)});
      while (!(addresses = store_->read(name)) && goes_on()) std::this_thread::sleep_for(kPoll);
      const std::string who = "rank " + std::to_string(world_rank(peer));
      Status failed;
      try {
        if (addresses && !contexts_[plane]->connect(peer, *addresses))
          failed = Status(StatusCode::kPeerLost, who + " gives addresses that are none");
      } catch (const std::exception& error) {
        failed = Status(StatusCode::kPeerLost, who + ": " + error.what());
      }
      FOREBAY_RETURN_IF_ERROR(store_->status());
      FOREBAY_RETURN_IF_ERROR(waiting.verdict());
      if (SteadyClock::now() >= limit) return Status(StatusCode::kTimeout, who + " did not join");
      FOREBAY_RETURN_IF_ERROR(failed);
      // Whose text says more, and is the first failure.
      if (!is_awaited()) return Status(StatusCode::kPeerLost, "another rank failed");
    }
  }
  return {};
}

Status Mesh::connect(SteadyClock::time_point deadline) {
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
    // No view of this rank's.
    if (!status.ok()) status = known;
  } else if (!status.ok()) {
    status = Status(status.code(), "rank " + std::to_string(world_rank(rank())) +
                                       " cannot connect to the other ranks over " + device_->str() + ": " +
                                       status.message() +
                                       "; see whether a rank ended, or give the right interface");
  }
  if (status.ok()) {
    try {
      start_watching();
    } catch (const std::system_error& error) {
      status =
          Status(StatusCode::kUnavailable, "rank " + std::to_string(world_rank(rank())) +
                                               " cannot start a thread to watch its peers: " + error.what() +
                                               "; raise ulimit -u or -v");
    } catch (const std::exception& error) {
      status = diagnose(error, kHealthPlane, internal::describe(kConnecting), peers(), {}, deadline);
    }
  }
  if (status.ok()) {
    // Each rank has read all addresses once all are here. It is on the health plane because a connection
    // keeps order: afterwards every peer's receive of our goodbye is known here, and leave() writes without a
    // wait.
    status = transfer(kHealthPlane, kConnecting, {});
    connected_ = true;
  } else {
    status = fail(status);
  }
  for (int plane = 0; plane < kPlaneCount; ++plane)
    store_->remove(addresses_name(static_cast<Plane>(plane), rank()));
  return status;
}

Status Mesh::fail_own(const Status& cause) noexcept {
  try {
    if (Status first = own_status(); !first.ok()) return first;
    Status first = cause;
    if (size() > 1) {
      if (const auto published = store_->write_once(failure_name(), internal::encode_failure(cause)))
        first = internal::decode_failure(*published);
    }
    Ballot ballot;
    {
      const std::lock_guard lock(mutex_);
      if (!failure_.ok()) return failure_;
      failure_ = first;
      ballot = ballot_;
      for (const InFlight* waiting : in_flight_) waiting->wake();
    }
    if (size() > 1) publish_vote(ballot);
    for (const auto& context : contexts_) {
      if (context != nullptr) context->closeConnections();
    }
    return first;
  } catch (const std::exception&) {
    // Closing failed half-way; the cause is kept, and the peers' deadline does the rest.
    const std::lock_guard lock(mutex_);
    if (failure_.ok()) failure_ = cause;
    return failure_;
  }
}

Status Mesh::diagnose(const std::exception& error, Plane plane, const std::string& what,
                      const std::vector<int>& candidates, const std::vector<int>& missing,
                      SteadyClock::time_point deadline) {
  if (Status first = status(); !first.ok()) return first;
  const std::string where = what + " on rank " + std::to_string(world_rank(rank())) + ": ";
  if (SteadyClock::now() >= deadline) {
    const std::string who = missing.empty() ? internal::rank_list(world_ranks(candidates)) + " did not finish"
                                            : internal::rank_list(world_ranks(missing)) + " did not join";
    return fail(Status(StatusCode::kTimeout, where + who + " within " +
                                                 std::to_string(membership().deadline.count()) +
                                                 " ms; look there for the reason, or raise the deadline"));
  }
  std::vector<int> lost = find_lost(plane, candidates);
  await_first_failure();
  if (const Status server = monitor_->server_status(); !server.ok()) return fail_of_all(server);
  if (lost.empty()) lost = candidates;
  return fail(Status(StatusCode::kPeerLost, where + internal::rank_list(world_ranks(lost)) +
                                                " closed the connection (" + error.what() +
                                                "); see why it ended"));
}

void Mesh::await_first_failure() {
  const auto patience = SteadyClock::now() + kFirstFailureWaitMax;
  while (is_awaited() && SteadyClock::now() < patience) std::this_thread::sleep_for(kPoll);
}

std::vector<int> Mesh::find_lost(Plane plane, const std::vector<int>& candidates) {
  // A broken connection throws at once, and one that works takes the empty message.
  std::vector<int> lost;
  std::byte nothing{};
  for (const int peer : candidates) {
    try {
      const Buffer probe = buffer(plane, &nothing, 1);
      probe->send(peer, slot(Kind::kProbe, 0, 0), 0, 0);
    } catch (const std::exception&) {
      lost.push_back(peer);
    }
  }
  return lost;
}

void Mesh::start_watching() {
  goodbyes_.resize(static_cast<std::size_t>(size()));
  goodbye_in_ = buffer(kHealthPlane, goodbyes_.data(), goodbyes_.size());
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank())
      goodbye_in_->recv(peer, slot(Kind::kGoodbye, 0, 0), static_cast<std::size_t>(peer), 1);
  }
  // The thread inherits the mask: signals are for the program's own threads.
  const NoSignals guard;
  watcher_ = std::thread([this] { watch(); });
}

void Mesh::watch() noexcept {
  try {
    const InFlight in_flight(*this, {goodbye_in_.get()});
    if (!in_flight.ok()) return;
    try {
      // Ends when this communicator has failed or leaves, or everybody else has left.
      const SteadyClock::time_point never = SteadyClock::now() + kDeadlineMax;
      int peer = -1;
      for (int left = size() - 1; left > 0; --left) {
        if (!await_one(*goodbye_in_, Direction::kReceived, &peer, never)) return;
      }
    } catch (const std::exception& error) {
      // Until then a rank's timeout closes these connections too, before it has published that.
      if (!connected_) await_first_failure();
      if (!status().ok()) return;
      // Gloo writes nothing into goodbyes_ for a rank that is found lost here, nor will it again.
      std::vector<int> lost = find_lost(kHealthPlane, peers());
      std::erase_if(lost, [&](int peer) { return goodbyes_[static_cast<std::size_t>(peer)] == kLeaving; });
      if (lost.empty()) lost = peers();
      if (const Status server = monitor_->server_status(); !server.ok()) {
        static_cast<void>(fail_of_all(server));
        return;
      }
      static_cast<void>(fail(Status(StatusCode::kPeerLost,
                                    "rank " + std::to_string(world_rank(rank())) +
                                        " watched its peers: " + internal::rank_list(world_ranks(lost)) +
                                        " closed the connection (" + error.what() + "); see why it ended")));
    }
  } catch (const std::exception&) {
    // Out of memory for the message: the operations still see the broken connection, or their deadline.
  }
}

void Mesh::leave() noexcept {
  if (!watcher_.joinable()) return;
  goodbye_in_->abortWaitRecv();
  // From here on no peer's end is this rank's failure; all leave at about the same time.
  watcher_.join();
  if (!status().ok()) return;
  try {
    const NoSigpipe guard;
    const SteadyClock::time_point limit = SteadyClock::now() + kGoodbyeMax;
    // One buffer each: what breaks towards one peer must not end the wait for another.
    std::vector<Buffer> goodbyes;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      Buffer goodbye = buffer(kHealthPlane, &kLeaving, 1);
      try {
        goodbye->send(peer, slot(Kind::kGoodbye, 0, 0), 0, 1);
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
  } catch (const std::exception&) {
    // Out of memory: the peers take this rank for dead.
  }
}

Status Mesh::transfer(Plane plane, const Fingerprint& fingerprint, const Piece& piece) {
  FOREBAY_RETURN_IF_ERROR(status());
  if (size() == 1) {
    internal::place_own(piece, rank());
    return {};
  }
  const NoSigpipe guard;
  const SteadyClock::time_point limit = deadline();
  const auto last = static_cast<std::size_t>(size() - 1);
  std::vector<Fingerprint> theirs(static_cast<std::size_t>(size()), Fingerprint{.sequence = kNeverSent});
  // Each rank starts with its right neighbour, so that no rank is written to by all at once.
  std::vector<int> peers;
  for (int step = 1; step < size(); ++step) peers.push_back((rank() + step) % size());

  try {
    const Buffer fingerprint_out = buffer(plane, &fingerprint, sizeof(fingerprint));
    const Buffer fingerprint_in = buffer(plane, theirs.data(), theirs.size() * sizeof(Fingerprint));
    const Buffer source = buffer(plane, piece.source, piece.source_stride * last + piece.bytes);
    const Buffer target = buffer(plane, piece.target, piece.target_stride * last + piece.bytes);
    const InFlight in_flight(*this,
                             {fingerprint_out.get(), fingerprint_in.get(), source.get(), target.get()});
    if (!in_flight.ok()) return status();
    Operating operating(*this, {.fingerprint = fingerprint}, in_flight, peers);

    const std::uint64_t fingerprint_slot = slot(Kind::kFingerprint, fingerprint.sequence, 0);
    const std::uint64_t payload_slot = slot(Kind::kPayload, fingerprint.sequence, hash(fingerprint));
    for (const int peer : peers) {
      const auto p = static_cast<std::size_t>(peer);
      fingerprint_in->recv(peer, fingerprint_slot, p * sizeof(Fingerprint), sizeof(Fingerprint));
      fingerprint_out->send(peer, fingerprint_slot, 0, sizeof(Fingerprint));
      if (piece.bytes == 0) continue;
      target->recv(peer, payload_slot, p * piece.target_stride, piece.bytes);
      source->send(peer, payload_slot, p * piece.source_stride, piece.bytes);
    }
    internal::place_own(piece, rank());

    const SteadyClock::time_point gloos_limit = limit + kBackstop;
    const auto all = [&](const Buffer& buffer, Direction direction) {
      return operating.await(*buffer, direction, peers.size(), gloos_limit);
    };
    // Compared as they come, so that two that disagree are named though a third never comes.
    for (std::size_t i = 0; i < peers.size(); ++i) {
      int peer = 0;
      if (!operating.await_next(*fingerprint_in, Direction::kReceived, &peer, gloos_limit))
        return operating.end();
      const Fingerprint& other = theirs[static_cast<std::size_t>(peer)];
      if (other != fingerprint) {
        return fail(internal::mismatch(world_rank(rank()), fingerprint, world_rank(peer), other));
      }
    }
    operating.finish(peers);
    if (piece.bytes > 0) {
      if (!all(target, Direction::kReceived)) return operating.end();
      operating.finish(peers);
      if (!all(source, Direction::kSent)) return operating.end();
    }
    operating.finish(peers);
    if (!all(fingerprint_out, Direction::kSent)) return operating.end();
  } catch (const std::exception& error) {
    std::vector<int> missing;
    for (const int peer : peers) {
      if (theirs[static_cast<std::size_t>(peer)].sequence == kNeverSent) missing.push_back(peer);
    }
    std::sort(missing.begin(), missing.end());
    std::sort(peers.begin(), peers.end());
    return diagnose(error, plane, describe(fingerprint), peers, missing, limit + kBackstop);
  }
  return {};
}

Status Mesh::send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
                  std::uint64_t sequence) {
  FOREBAY_RETURN_IF_ERROR(status());
  const NoSigpipe guard;
  const SteadyClock::time_point limit = deadline();
  const Fingerprint fingerprint{
      .sequence = sequence, .count = bytes, .operation = static_cast<std::uint32_t>(Operation::kSend)};
  const internal::Issued issued{.fingerprint = fingerprint, .peer = world_rank(peer), .tag = tag};
  try {
    const Buffer head = buffer(kDataPlane, &fingerprint, sizeof(fingerprint));
    const Buffer body = buffer(kDataPlane, source, bytes);
    const InFlight in_flight(*this, {head.get(), body.get()});
    if (!in_flight.ok()) return status();
    Operating operating(*this, issued, in_flight, {peer});
    head->send(peer, slot(Kind::kMessage, sequence, tag), 0, sizeof(fingerprint));
    if (bytes > 0) body->send(peer, slot(Kind::kMessagePayload, sequence, tag), 0, bytes);
    if (!operating.await(*head, Direction::kSent, 1, limit + kBackstop)) return operating.end();
    operating.finish({peer});
    if (bytes > 0 && !operating.await(*body, Direction::kSent, 1, limit + kBackstop)) return operating.end();
  } catch (const std::exception& error) {
    return diagnose(error, kDataPlane, describe(issued), {peer}, {peer}, limit + kBackstop);
  }
  return {};
}

Status Mesh::recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag, std::uint64_t sequence) {
  FOREBAY_RETURN_IF_ERROR(status());
  const NoSigpipe guard;
  const SteadyClock::time_point limit = deadline();
  const internal::Issued issued{.fingerprint = {.sequence = sequence,
                                                .count = bytes,
                                                .operation = static_cast<std::uint32_t>(Operation::kRecv)},
                                .peer = world_rank(peer),
                                .tag = tag};
  Fingerprint theirs;
  try {
    const Buffer head = buffer(kDataPlane, &theirs, sizeof(theirs));
    const Buffer body = buffer(kDataPlane, target, bytes);
    const InFlight in_flight(*this, {head.get(), body.get()});
    if (!in_flight.ok()) return status();
    Operating operating(*this, issued, in_flight, {peer});
    head->recv(peer, slot(Kind::kMessage, sequence, tag), 0, sizeof(theirs));
    if (!operating.await(*head, Direction::kReceived, 1, limit + kBackstop)) return operating.end();
    if (theirs.count != bytes) {
      return fail(Status(StatusCode::kInvalidArgument,
                         describe(issued) + " on rank " + std::to_string(world_rank(rank())) + ", but rank " +
                             std::to_string(world_rank(peer)) + " sends " + std::to_string(theirs.count) +
                             " bytes; give both the same size"));
    }
    if (bytes > 0) {
      body->recv(peer, slot(Kind::kMessagePayload, sequence, tag), 0, bytes);
      operating.finish({peer});
      if (!operating.await(*body, Direction::kReceived, 1, limit + kBackstop)) return operating.end();
    }
  } catch (const std::exception& error) {
    return diagnose(error, kDataPlane, describe(issued), {peer}, {peer}, limit + kBackstop);
  }
  return {};
}

Status Mesh::reduce_scatter(const Fingerprint& fingerprint, const ReduceScatterArguments& arguments) {
  FOREBAY_RETURN_IF_ERROR(status());
  if (size() > 1) {
    FOREBAY_RETURN_IF_ERROR(
        transfer(kDataPlane, fingerprint, internal::reduce_scatter_transfer(arguments).piece));
  }
  const Status added = host_accumulate(internal::accumulate_arguments(arguments, rank(), size()));
  return added.ok() ? added : fail(added.with_context("rank " + std::to_string(world_rank(rank()))));
}

// --- votes ---

Status Mesh::vote(std::uint64_t step, std::span<const std::byte> decision) {
  const std::lock_guard lock(mutex_);
  if (failure_.ok()) ballot_.mark(step, decision);
  return failure_;
}

// A rank that fails says once and for all what it voted for: the step, then the decision.
void Mesh::publish_vote(const Ballot& ballot) {
  const std::uint64_t step = ballot.cast ? ballot.step : kNoStep;
  std::string text(reinterpret_cast<const char*>(&step), sizeof(step));
  text.append(reinterpret_cast<const char*>(ballot.decision.data()), ballot.decision.size());
  // As a last word: what replaces texts is refused once the store knows of a lost rank.
  static_cast<void>(store_->write_once(vote_name(rank()), text));
}

std::optional<std::vector<std::byte>> Mesh::survivors_vote(std::uint64_t step) {
  {
    const std::lock_guard lock(mutex_);
    if (ballot_.is_for(step)) return ballot_.decision;
  }
  const SteadyClock::time_point limit = SteadyClock::now() + kVoteWaitMax;
  std::vector<char> said(static_cast<std::size_t>(size()));
  said[static_cast<std::size_t>(rank())] = 1;
  while (std::count(said.begin(), said.end(), 1) < size() && SteadyClock::now() < limit &&
         store_->answers()) {
    for (int peer = 0; peer < size(); ++peer) {
      if (said[static_cast<std::size_t>(peer)]) continue;
      const bool is_lost = store_->is_lost(world_rank(peer));
      const std::optional<std::string> text = store_->read(vote_name(peer));
      std::uint64_t voted = kNoStep;
      if (!text || text->size() < sizeof(voted)) {
        said[static_cast<std::size_t>(peer)] = is_lost ? 1 : 0;
        continue;
      }
      said[static_cast<std::size_t>(peer)] = 1;
      std::memcpy(&voted, text->data(), sizeof(voted));
      if (voted != step) continue;
      const auto* const decision = reinterpret_cast<const std::byte*>(text->data()) + sizeof(voted);
      return std::vector<std::byte>(decision, decision + (text->size() - sizeof(voted)));
    }
    std::this_thread::sleep_for(kPoll);
  }
  return std::nullopt;
}

Result<std::shared_ptr<Transport>> Mesh::split_own(Membership membership,
                                                   const std::vector<SplitWish>& /*members*/,
                                                   const Exchange& /*exchange*/) {
  auto mesh = std::make_shared<Mesh>(std::move(membership), store_, device_, monitor_);
  FOREBAY_RETURN_IF_ERROR(mesh->connect(mesh->deadline()));
  return std::shared_ptr<Transport>(std::move(mesh));
}

constexpr const char* kInterfaceAdvice = "; give an address or an interface of this host";

// Of an interface or an address, empty for the loopback one: a numeric address that works. Debian 12's Gloo
// reads an uninitialised pointer when a name has none.
Result<std::string> address_to_listen_at(const std::string& interface) {
  const std::string wanted = interface.empty() ? "127.0.0.1" : interface;
  std::string address = internal::listening_address(wanted);
  if (!address.empty()) return address;
  return Status(StatusCode::kInvalidArgument, "cannot listen on \"" + wanted +
                                                  "\": no interface or address of this host has that name" +
                                                  kInterfaceAdvice);
}

Result<std::shared_ptr<gloo::transport::Device>> create_device(const std::string& interface) {
  Result<std::string> address = address_to_listen_at(interface);
  FOREBAY_RETURN_IF_ERROR(address.status());
  gloo::transport::tcp::attr attributes;
  attributes.hostname = address.value();
  try {
    // The I/O thread that starts here inherits the mask: signals are for the program's own threads.
    const NoSignals guard;
    return gloo::transport::tcp::CreateDevice(attributes);
  } catch (const std::exception& error) {
    return Status(StatusCode::kUnavailable,
                  "cannot listen on \"" + address.value() + "\": " + error.what() + kInterfaceAdvice);
  }
}

}  // namespace

Result<std::shared_ptr<Transport>> internal::connect_gloo(const Joining& joining) {
  if (joining.interface.empty() && !joining.meeting.one_host) {
    const Meeting& meeting = joining.meeting;
    return Status(
        StatusCode::kInvalidArgument,
        "ranks are on several hosts (rank 0 on " + meeting.first_host + ", rank " +
            std::to_string(meeting.other_host_rank) + " on " + meeting.other_host +
            ") and the default is to listen on the loopback address only; give the address or interface "
            "that the hosts share");
  }
  Result<std::shared_ptr<gloo::transport::Device>> device = create_device(joining.interface);
  FOREBAY_RETURN_IF_ERROR(device.status());
  auto monitor = std::make_shared<WaitMonitor>(joining.membership.rank, joining.membership.deadline,
                                               joining.store, joining.name("wait."));
  FOREBAY_RETURN_IF_ERROR(monitor->start());
  auto mesh = std::make_shared<Mesh>(joining.membership, joining.store, device.value(), std::move(monitor));
  FOREBAY_RETURN_IF_ERROR(mesh->connect(joining.limit));
  return std::shared_ptr<Transport>(std::move(mesh));
}

bool gloo_available() noexcept {
  return true;
}

Result<std::unique_ptr<Communicator>> create_gloo_communicator(const GlooOptions& options, Backend& backend) {
  if (!options.interface.empty()) FOREBAY_RETURN_IF_ERROR(address_to_listen_at(options.interface).status());
  if (options.size > 1) return internal::create_over("gloo", internal::connect_gloo, options, backend);
  Result<Membership> membership =
      internal::check_membership("gloo", options.rank, options.size, options.deadline, backend);
  FOREBAY_RETURN_IF_ERROR(membership.status());
  return internal::create_process_communicator(
      std::make_shared<Mesh>(std::move(membership).value(), nullptr, nullptr, nullptr), backend);
}

}  // namespace forebay
