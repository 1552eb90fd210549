#include "runtime/device/cuda/order_book.h"

#include <atomic>
#include <utility>

namespace forebay {

std::uint64_t CudaStreamState::next_call() noexcept {
  const std::lock_guard lock(mutex_);
  return ++call_count_;
}

std::uint64_t CudaStreamState::call_count() const noexcept {
  const std::lock_guard lock(mutex_);
  return call_count_;
}

void CudaStreamState::fail(std::uint64_t call, Status status) {
  const std::lock_guard lock(mutex_);
  if (failed_call_ != 0) return;
  failed_call_ = call;
  failure_ = std::move(status);
}

Status CudaStreamState::failure(std::uint64_t call) const {
  const std::lock_guard lock(mutex_);
  return failed_call_ != 0 && failed_call_ <= call ? failure_ : Status();
}

CudaOrderBook& CudaOrderBook::of_process() {
  static constinit std::atomic<CudaOrderBook*> book{nullptr};
  CudaOrderBook* found = book.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  auto made = std::make_unique<CudaOrderBook>();
  if (book.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) return *made.release();
  return *found;  // Another thread was faster.
}

// --- streams ---

CudaOrderBook::StreamKind CudaOrderBook::kind(cuda::CuStream stream) const {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  return found == streams_.end() ? StreamKind::kForeign : found->second.kind;
}

bool CudaOrderBook::is_owner(cuda::CuStream stream, Owner owner) const {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  return found != streams_.end() && found->second.owner == owner;
}

cuda::CuStream CudaOrderBook::take_parked(Owner owner, bool urgent) {
  auto state = std::make_shared<CudaStreamState>();
  const std::lock_guard lock(mutex_);
  if (parked_count_ == 0) return nullptr;
  for (auto& [stream, entry] : streams_) {
    if (entry.kind != StreamKind::kEnded || entry.owner != owner || entry.urgent != urgent) continue;
    --parked_count_;
    entry.kind = StreamKind::kOurs;
    entry.state.swap(state);  // The old one, with its failure, goes after the mutex.
    return stream;
  }
  return nullptr;
}

void CudaOrderBook::add_stream(cuda::CuStream stream, Owner owner, bool urgent) {
  Streams added{{stream, StreamEntry{StreamKind::kOurs, owner, std::make_shared<CudaStreamState>(), urgent}}};
  // A foreign stream ended, and its handle came back as ours.
  Streams::node_type stale;
  const std::lock_guard lock(mutex_);
  stale = streams_.extract(stream);
  streams_.insert(added.extract(added.begin()));
}

bool CudaOrderBook::park_stream(cuda::CuStream stream) {
  Streams::node_type forgotten;
  const std::lock_guard lock(mutex_);
  if (parked_count_ >= kParkedLimit) {
    forgotten = streams_.extract(stream);
    return false;
  }
  ++parked_count_;
  streams_.find(stream)->second.kind = StreamKind::kEnded;
  return true;
}

void CudaOrderBook::forget_stream(cuda::CuStream stream) {
  Streams::node_type forgotten;
  const std::lock_guard lock(mutex_);
  forgotten = streams_.extract(stream);
}

std::shared_ptr<CudaStreamState> CudaOrderBook::state(cuda::CuStream stream) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(stream);
    if (found != streams_.end()) return found->second.state;
  }
  Streams added{
      {stream, StreamEntry{StreamKind::kForeign, nullptr, std::make_shared<CudaStreamState>(), false}}};
  Streams::insert_return_type inserted;  // Keeps a node that another thread made superfluous.
  const std::lock_guard lock(mutex_);
  inserted = streams_.insert(added.extract(added.begin()));
  return inserted.position->second.state;
}

Status CudaOrderBook::failure(cuda::CuStream stream) const {
  std::shared_ptr<CudaStreamState> state;
  {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(stream);
    if (found == streams_.end()) return {};
    state = found->second.state;
  }
  return state->failure(state->call_count());
}

// --- events ---

void CudaOrderBook::add_event(cuda::CuEvent event, Owner owner) {
  Events added{{event, EventEntry{.owner = owner}}};
  const std::lock_guard lock(mutex_);
  events_.insert(added.extract(added.begin()));
}

bool CudaOrderBook::has_event(cuda::CuEvent event) const {
  const std::lock_guard lock(mutex_);
  return events_.contains(event);
}

void CudaOrderBook::remove_event(cuda::CuEvent event) {
  Events::node_type removed;
  const std::lock_guard lock(mutex_);
  removed = events_.extract(event);
}

void CudaOrderBook::record(cuda::CuEvent event, cuda::CuStream stream) {
  std::shared_ptr<CudaStreamState> state;
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) return;
  const auto recorded = streams_.find(stream);
  if (recorded != streams_.end()) state = recorded->second.state;
  found->second.call = state == nullptr ? 0 : state->call_count();
  found->second.state.swap(state);
}

Status CudaOrderBook::failure(cuda::CuEvent event) const {
  EventEntry entry;
  {
    const std::lock_guard lock(mutex_);
    const auto found = events_.find(event);
    if (found == events_.end()) return {};
    entry = found->second;
  }
  return entry.state == nullptr ? Status() : entry.state->failure(entry.call);
}

// --- the end ---

std::size_t CudaOrderBook::live_count(Owner owner) const {
  const std::lock_guard lock(mutex_);
  std::size_t count = 0;
  for (const auto& [stream, entry] : streams_) {
    count += entry.owner == owner && entry.kind == StreamKind::kOurs ? 1 : 0;
  }
  for (const auto& [event, entry] : events_) count += entry.owner == owner ? 1 : 0;
  return count;
}

CudaOrderBook::Left CudaOrderBook::take_all(Owner owner) {
  Left left;
  const std::lock_guard lock(mutex_);
  std::erase_if(streams_, [&](const auto& stream) {
    if (stream.second.owner != owner) return false;
    const bool is_parked = stream.second.kind == StreamKind::kEnded;
    parked_count_ -= is_parked ? 1 : 0;
    (is_parked ? left.parked : left.in_use).push_back(stream.first);
    return true;
  });
  std::erase_if(events_, [&](const auto& event) {
    if (event.second.owner == owner) left.events.push_back(event.first);
    return event.second.owner == owner;
  });
  return left;
}

}  // namespace forebay
