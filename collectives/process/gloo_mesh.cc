// A mesh's failures, votes and groups.
#include "collectives/process/gloo_mesh.h"

#include <cstring>
#include <utility>

namespace forebay::internal {
namespace {

using std::chrono::milliseconds;

// Gloo closes all connections of a context when one of its waits times out, before that rank can publish why.
// A rank that sees a connection close gives the other this long to publish before it reports its own view.
constexpr milliseconds kFirstFailureWaitMax{200};
constexpr milliseconds kPoll{2};
// How long a rank that has failed waits for the votes of the others, which hear of the failure within
// milliseconds and then publish theirs. A rank that died publishes nothing.
constexpr milliseconds kVoteWaitMax{2000};
constexpr std::uint64_t kNoStep = ~std::uint64_t{0};

struct PublishedVote {
  std::uint64_t step = kNoStep;
  std::vector<std::byte> decision;
};

// Nothing for a text that is not there or not whole.
std::optional<PublishedVote> decode_vote(const std::optional<std::string>& text) {
  PublishedVote vote;
  if (!text || text->size() < sizeof(vote.step)) return std::nullopt;
  std::memcpy(&vote.step, text->data(), sizeof(vote.step));
  const auto* const decision = reinterpret_cast<const std::byte*>(text->data()) + sizeof(vote.step);
  vote.decision.assign(decision, decision + (text->size() - sizeof(vote.step)));
  return vote;
}

}  // namespace

GlooMesh::~GlooMesh() {
  leave_origin();
  leave();
  // The ranks that are left may still ask for each other's votes.
  if (store_ != nullptr && !own_status().ok()) store_->stay_at_most(kVoteWaitMax + kFirstFailureWaitMax);
  // Never closeConnections() here: Gloo resets them, and bytes on their way to a peer are lost.
}

GlooMesh::InFlight::InFlight(GlooMesh& mesh, std::vector<gloo::transport::UnboundBuffer*> buffers)
    : mesh_(mesh), buffers_(std::move(buffers)) {
  const std::lock_guard lock(mesh_.mutex_);
  ok_ = mesh_.failure_.ok();
  mesh_.in_flight_.push_back(this);
}

GlooMesh::InFlight::~InFlight() {
  const std::lock_guard lock(mesh_.mutex_);
  std::erase(mesh_.in_flight_, this);
}

void GlooMesh::InFlight::wake() const {
  for (gloo::transport::UnboundBuffer* waiting : buffers_) {
    waiting->abortWaitRecv();
    waiting->abortWaitSend();
  }
}

std::vector<int> GlooMesh::peers() const {
  std::vector<int> all;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) all.push_back(peer);
  }
  return all;
}

bool GlooMesh::is_running() {
  return own_status().ok() && store_->status().ok() && !store_->posted(failure_name());
}

Status GlooMesh::fail_own(const Status& cause) noexcept {
  try {
    if (Status first = own_status(); !first.ok()) return first;
    Status first = cause;
    if (size() > 1) {
      if (const auto published = store_->write_once(failure_name(), encode_failure(cause)))
        first = decode_failure(*published);
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
    // Closing failed half-way. The failure is kept, and the peers find it at their deadline.
    const std::lock_guard lock(mutex_);
    if (failure_.ok()) failure_ = cause;
    return failure_;
  }
}

Status GlooMesh::diagnose(const std::exception& error, GlooPlane plane, const std::string& what,
                          const std::vector<int>& candidates, const std::vector<int>& missing,
                          Clock::time_point deadline) {
  if (Status first = status(); !first.ok()) return first;
  const std::string where = what + " on " + here() + ": ";
  if (Clock::now() >= deadline) {
    const std::string who = missing.empty() ? rank_list(world_ranks(candidates)) + " did not finish"
                                            : rank_list(world_ranks(missing)) + " did not join";
    return fail(Status(StatusCode::kTimeout, where, who, " within ", membership().deadline.count(),
                       " ms; look there for the reason, or raise the deadline"));
  }
  std::vector<int> lost = find_lost(plane, candidates);
  await_first_failure();
  if (const Status server = monitor_->server_status(); !server.ok()) return fail_of_all(server);
  if (lost.empty()) lost = candidates;
  return fail(Status(StatusCode::kPeerLost, where, rank_list(world_ranks(lost)), " closed the connection (",
                     error.what(), "); see why it ended"));
}

void GlooMesh::await_first_failure() {
  const auto patience = Clock::now() + kFirstFailureWaitMax;
  while (is_running() && Clock::now() < patience) std::this_thread::sleep_for(kPoll);
}

std::vector<int> GlooMesh::find_lost(GlooPlane plane, const std::vector<int>& candidates) {
  // A broken connection throws at once, and one that works takes the empty message.
  std::vector<int> lost;
  std::byte nothing{};
  for (const int peer : candidates) {
    try {
      const Buffer probe = buffer(plane, &nothing, 1);
      probe->send(peer, gloo_slot(GlooSlot::kProbe, 0, 0), 0, 0);
    } catch (const std::exception&) {
      lost.push_back(peer);
    }
  }
  return lost;
}

Status GlooMesh::vote(std::uint64_t step, std::span<const std::byte> decision) {
  const std::lock_guard lock(mutex_);
  if (failure_.ok()) ballot_.mark(step, decision);
  return failure_;
}

// A rank that fails publishes its vote once and for all: the step, then the decision.
void GlooMesh::publish_vote(const Ballot& ballot) {
  const std::uint64_t step = ballot.cast ? ballot.step : kNoStep;
  std::string text(reinterpret_cast<const char*>(&step), sizeof(step));
  text.append(reinterpret_cast<const char*>(ballot.decision.data()), ballot.decision.size());
  // Written once: the store refuses to replace texts once it knows of a lost rank.
  static_cast<void>(store_->write_once(vote_name(rank()), text));
}

std::optional<std::vector<std::byte>> GlooMesh::survivors_vote(std::uint64_t step) {
  {
    const std::lock_guard lock(mutex_);
    if (ballot_.is_for(step)) return ballot_.decision;
  }
  const Clock::time_point limit = Clock::now() + kVoteWaitMax;
  std::vector<int> silent = peers();
  while (!silent.empty() && Clock::now() < limit && store_->answers()) {
    for (auto peer = silent.begin(); peer != silent.end();) {
      // Asked before its vote is read: a lost rank writes nothing more.
      const bool is_lost = store_->is_lost(world_rank(*peer));
      const std::optional<PublishedVote> vote = decode_vote(store_->read(vote_name(*peer)));
      if (vote && vote->step == step) return vote->decision;
      peer = vote || is_lost ? silent.erase(peer) : peer + 1;
    }
    if (!silent.empty()) std::this_thread::sleep_for(kPoll);
  }
  return std::nullopt;
}

Result<std::shared_ptr<Transport>> GlooMesh::split_own(Membership membership,
                                                       const std::vector<SplitWish>& /*members*/,
                                                       const Exchange& /*exchange*/) {
  auto mesh = std::make_shared<GlooMesh>(std::move(membership), store_, device_, address_, monitor_);
  FOREBAY_RETURN_IF_ERROR(mesh->connect(mesh->deadline()));
  return mesh;
}

}  // namespace forebay::internal
