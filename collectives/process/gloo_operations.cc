// The operations of a mesh.
#include <algorithm>
#include <utility>

#include "collectives/process/gloo_mesh.h"
#include "collectives/signal_mask.h"
#include "forebay/host_gradients.h"

namespace forebay::internal {
namespace {

using std::chrono::milliseconds;

// The sequence of a fingerprint that has not come.
constexpr std::uint64_t kNeverSent = ~std::uint64_t{0};

// The part of the operation that the payload's slot holds.
std::uint32_t hash(const Fingerprint& fingerprint) {
  std::uint64_t value = fingerprint.count * 0x9e3779b97f4a7c15u;
  value ^= (static_cast<std::uint64_t>(fingerprint.operation) << 32 | fingerprint.type) * 0xc2b2ae3d27d4eb4fu;
  value ^= value >> 29;
  value *= 0x165667b19e3779f9u;
  return static_cast<std::uint32_t>(value >> 32);
}

}  // namespace

bool GlooMesh::await_one(gloo::transport::UnboundBuffer& buffer, Direction direction, int* peer,
                         Clock::time_point limit) {
  const auto left = std::chrono::ceil<milliseconds>(limit - Clock::now());
  const milliseconds timeout = std::max(left, milliseconds(1));
  return direction == Direction::kReceived ? buffer.waitRecv(peer, timeout) : buffer.waitSend(peer, timeout);
}

bool GlooMesh::Operating::await_next(gloo::transport::UnboundBuffer& buffer, Direction direction, int* peer,
                                     Clock::time_point limit) {
  if (!await_one(buffer, direction, peer, limit)) return false;
  waiting_.came(mesh_.world_rank(*peer));
  return true;
}

bool GlooMesh::Operating::await(gloo::transport::UnboundBuffer& buffer, Direction direction,
                                std::size_t count, Clock::time_point limit) {
  int peer = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (!await_next(buffer, direction, &peer, limit)) return false;
  }
  return true;
}

Status GlooMesh::Operating::end() {
  const Status verdict = waiting_.verdict();
  return verdict.ok() ? mesh_.status() : mesh_.fail_of_all(verdict);
}

Status GlooMesh::transfer(GlooPlane plane, const Fingerprint& fingerprint, const Piece& piece) {
  FOREBAY_RETURN_IF_ERROR(status());
  if (size() == 1) {
    place_own(piece, rank());
    return {};
  }
  const NoSigpipe guard;
  const Clock::time_point limit = deadline() + kGlooBackstop;
  std::vector<Fingerprint> theirs(static_cast<std::size_t>(size()), Fingerprint{.sequence = kNeverSent});
  // Each rank starts with its right neighbour, so that not all ranks write to one rank at once.
  std::vector<int> peers;
  for (int step = 1; step < size(); ++step) peers.push_back((rank() + step) % size());
  try {
    return transfer_over(plane, fingerprint, piece, peers, theirs, limit);
  } catch (const std::exception& error) {
    std::vector<int> missing;
    std::sort(peers.begin(), peers.end());
    for (const int peer : peers) {
      if (theirs[static_cast<std::size_t>(peer)].sequence == kNeverSent) missing.push_back(peer);
    }
    return diagnose(error, plane, describe(fingerprint), peers, missing, limit);
  }
}

Status GlooMesh::transfer_over(GlooPlane plane, const Fingerprint& fingerprint, const Piece& piece,
                               const std::vector<int>& peers, std::vector<Fingerprint>& theirs,
                               Clock::time_point limit) {
  const auto last = static_cast<std::size_t>(size() - 1);
  const Buffer fingerprint_out = buffer(plane, &fingerprint, sizeof(fingerprint));
  const Buffer fingerprint_in = buffer(plane, theirs.data(), theirs.size() * sizeof(Fingerprint));
  const Buffer source = buffer(plane, piece.source, piece.source_stride * last + piece.bytes);
  const Buffer target = buffer(plane, piece.target, piece.target_stride * last + piece.bytes);
  const InFlight in_flight(*this, {fingerprint_out.get(), fingerprint_in.get(), source.get(), target.get()});
  if (!in_flight.ok()) return status();
  Operating operating(*this, {.fingerprint = fingerprint}, in_flight, peers);

  const std::uint64_t fingerprint_slot = gloo_slot(GlooSlot::kFingerprint, fingerprint.sequence, 0);
  const std::uint64_t payload_slot = gloo_slot(GlooSlot::kPayload, fingerprint.sequence, hash(fingerprint));
  for (const int peer : peers) {
    const auto p = static_cast<std::size_t>(peer);
    fingerprint_in->recv(peer, fingerprint_slot, p * sizeof(Fingerprint), sizeof(Fingerprint));
    fingerprint_out->send(peer, fingerprint_slot, 0, sizeof(Fingerprint));
    if (piece.bytes == 0) continue;
    target->recv(peer, payload_slot, p * piece.target_stride, piece.bytes);
    source->send(peer, payload_slot, p * piece.source_stride, piece.bytes);
  }
  place_own(piece, rank());

  // Fingerprints are compared as they come, so that two ranks that disagree are named though a third never
  // comes.
  for (std::size_t i = 0; i < peers.size(); ++i) {
    int peer = 0;
    if (!operating.await_next(*fingerprint_in, Direction::kReceived, &peer, limit)) return operating.end();
    const Fingerprint& other = theirs[static_cast<std::size_t>(peer)];
    if (other != fingerprint) return fail(mismatch(world_rank(rank()), fingerprint, world_rank(peer), other));
  }
  const auto all = [&](const Buffer& buffer, Direction direction) {
    operating.finish(peers);
    return operating.await(*buffer, direction, peers.size(), limit);
  };
  const bool is_done =
      (piece.bytes == 0 || (all(target, Direction::kReceived) && all(source, Direction::kSent))) &&
      all(fingerprint_out, Direction::kSent);
  return is_done ? Status() : operating.end();
}

template <typename Function>
Status GlooMesh::run_message(const Issued& issued, int peer, const Fingerprint& fingerprint,
                             const std::byte* bytes, Function run) {
  FOREBAY_RETURN_IF_ERROR(status());
  const NoSigpipe guard;
  const Clock::time_point limit = deadline() + kGlooBackstop;
  try {
    const Buffer head = buffer(kGlooData, &fingerprint, sizeof(fingerprint));
    const Buffer body = buffer(kGlooData, bytes, issued.fingerprint.count);
    const InFlight in_flight(*this, {head.get(), body.get()});
    if (!in_flight.ok()) return status();
    Operating operating(*this, issued, in_flight, {peer});
    return run(*head, *body, operating, limit);
  } catch (const std::exception& error) {
    return diagnose(error, kGlooData, describe(issued), {peer}, {peer}, limit);
  }
}

Status GlooMesh::send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
                      std::uint64_t sequence) {
  const Issued issued = issued_message(Operation::kSend, bytes, world_rank(peer), tag, sequence);
  return run_message(issued, peer, issued.fingerprint, source,
                     [&](auto& head, auto& body, Operating& operating, Clock::time_point limit) {
                       head.send(peer, gloo_slot(GlooSlot::kMessage, sequence, tag), 0, sizeof(Fingerprint));
                       if (bytes > 0)
                         body.send(peer, gloo_slot(GlooSlot::kMessagePayload, sequence, tag), 0, bytes);
                       if (!operating.await(head, Direction::kSent, 1, limit)) return operating.end();
                       operating.finish({peer});
                       const bool done = bytes == 0 || operating.await(body, Direction::kSent, 1, limit);
                       return done ? Status() : operating.end();
                     });
}

Status GlooMesh::recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag,
                      std::uint64_t sequence) {
  const Issued issued = issued_message(Operation::kRecv, bytes, world_rank(peer), tag, sequence);
  Fingerprint theirs;
  return run_message(
      issued, peer, theirs, target,
      [&](auto& head, auto& body, Operating& operating, Clock::time_point limit) {
        head.recv(peer, gloo_slot(GlooSlot::kMessage, sequence, tag), 0, sizeof(theirs));
        if (!operating.await(head, Direction::kReceived, 1, limit)) return operating.end();
        if (theirs.count != bytes) {
          return fail(invalid_argument(describe(issued), " on ", here(), ", but rank ", world_rank(peer),
                                       " sends ", theirs.count, " bytes; give both the same size"));
        }
        if (bytes == 0) return Status();
        body.recv(peer, gloo_slot(GlooSlot::kMessagePayload, sequence, tag), 0, bytes);
        operating.finish({peer});
        const bool done = operating.await(body, Direction::kReceived, 1, limit);
        return done ? Status() : operating.end();
      });
}

Status GlooMesh::reduce_scatter(const Fingerprint& fingerprint, const ReduceScatterArguments& arguments) {
  FOREBAY_RETURN_IF_ERROR(status());
  if (size() > 1) {
    FOREBAY_RETURN_IF_ERROR(transfer(kGlooData, fingerprint, reduce_scatter_transfer(arguments).piece));
  }
  const Status added = host_accumulate(accumulate_arguments(arguments, rank(), size()));
  return added.ok() ? added : fail(added.with_context(here()));
}

}  // namespace forebay::internal
