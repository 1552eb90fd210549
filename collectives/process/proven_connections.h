// ProvenConnections: TCP connections between the ranks of a group. Both ends of each have proved that they
// are these two ranks of this run. A connection that proves nothing is closed, and nobody else reads from it.
//
//   the higher rank   magic, its nonce, plane, its rank          the lower rank   magic, its nonce
//   the higher rank   a proof                                    the lower rank   a proof
//
// A proof is an HMAC over all of this. Its key holds the secret of the rendezvous store and a random text
// that the lower rank wrote there beside its address.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <list>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/rendezvous/authentication.h"
#include "collectives/rendezvous/store_address.h"
#include "forebay/descriptor.h"
#include "forebay/status.h"

namespace forebay::internal {

struct ProvenConnectionsOptions {
  std::string address;  // Numeric; the only one to listen at.
  std::string group;    // A word that no other group of ranks has.
  std::string secret;   // The rendezvous store's; may be empty.
  int rank = 0;
  int size = 1;
  std::vector<int> world_ranks;  // By rank: its number in messages.
  int planes = 1;                // Connections between any two ranks.
};

// Threads: one at a time.
class ProvenConnections {
 public:
  // Listens at a port that the system chooses. Errors: those of listen_at.
  static Result<ProvenConnections> listen(ProvenConnectionsOptions options);

  // The address and the random text, for the higher ranks to read in the rendezvous store.
  std::string introduction() const;
  // Begins to connect to `peer`, a lower rank. Errors: kPeerLost if nobody can read `introduction`.
  Status connect(int peer, const std::string& introduction);
  // Waits at most `patience` for something to happen, and does the next steps.
  // Errors: kPeerLost if a lower rank does not listen any more, or cannot be reached.
  Status advance(std::chrono::milliseconds patience);
  // The ranks to which some connection is missing.
  std::vector<int> missing() const;
  // Requires: nothing is missing; once for each plane and peer.
  Descriptor take(int plane, int peer) { return std::move(proven_[index(plane, peer)]); }

 private:
  using Clock = std::chrono::steady_clock;
  enum class Stage : std::uint8_t { kPaused, kConnecting, kHello, kProof, kEnded };
  struct Proofs {
    Digest higher;
    Digest lower;
  };
  struct Attempt {
    Descriptor socket{};
    bool is_ours = false;  // Made by this rank, else accepted.
    Stage stage = Stage::kHello;
    Clock::time_point limit{};  // Accepted: until when it must be proven. kPaused: when to connect again.
    int plane = -1;
    int peer = -1;
    Digest nonce{};
    std::string in{};  // The bytes of this stage so far.
    Proofs proofs{};
  };
  struct Target {
    SocketAddress address{};
    std::string key{};
  };

  ProvenConnections(ProvenConnectionsOptions options, Descriptor listener);
  std::string name(int peer) const {
    return "rank " + std::to_string(options_.world_ranks[static_cast<std::size_t>(peer)]);
  }
  std::size_t index(int plane, int peer) const {
    return static_cast<std::size_t>(plane * options_.size + peer);
  }
  Proofs prove(const Attempt& attempt, const Digest& higher_nonce, const Digest& lower_nonce) const;
  Status start(Attempt& attempt);
  Status step(Attempt& attempt);
  // Reads until `bytes` are there; false if they are not.
  bool read(Attempt& attempt, std::size_t bytes);
  void greet(Attempt& attempt);
  void answer_hello(Attempt& attempt);
  void answer_proof(Attempt& attempt);
  void send(Attempt& attempt, std::string_view bytes);
  void accept_some();
  static void give_up(Attempt& attempt);

  ProvenConnectionsOptions options_;
  Descriptor listener_;
  std::string key_;              // The random text of this rank.
  std::vector<Target> targets_;  // By lower rank.
  std::list<Attempt> attempts_;  // In the order of their coming.
  std::vector<Descriptor> proven_;
  Clock::time_point accept_after_{};
};

}  // namespace forebay::internal
