#include "cuda_order_book.h"

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

// --- streams ---

CudaOrderBook::StreamKind CudaOrderBook::kind(cuda::CuStream stream) const {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  return found == streams_.end() ? StreamKind::kForeign : found->second.kind;
}

cuda::CuStream CudaOrderBook::take_parked() {
  auto state = std::make_shared<CudaStreamState>();
  const std::lock_guard lock(mutex_);
  if (parked_count_ == 0) return nullptr;
  for (auto& [stream, entry] : streams_) {
    if (entry.kind != StreamKind::kEnded) continue;
    --parked_count_;
    entry.kind = StreamKind::kOurs;
    entry.state.swap(state);  // The old one, with its failure, goes after the mutex.
    return stream;
  }
  return nullptr;
}

void CudaOrderBook::add_stream(cuda::CuStream stream) {
  Streams added{{stream, StreamEntry{StreamKind::kOurs, std::make_shared<CudaStreamState>()}}};
  Streams::node_type stale;  // A foreign stream that is gone, whose handle came back as ours.
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
  Streams added{{stream, StreamEntry{StreamKind::kForeign, std::make_shared<CudaStreamState>()}}};
  Streams::insert_return_type inserted;  // Holds what another thread made superfluous.
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

void CudaOrderBook::add_event(cuda::CuEvent event) {
  Events added{{event, EventEntry{}}};
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

std::size_t CudaOrderBook::live_count() const {
  const std::lock_guard lock(mutex_);
  std::size_t count = events_.size();
  for (const auto& [stream, entry] : streams_) count += entry.kind == StreamKind::kOurs ? 1 : 0;
  return count;
}

std::vector<cuda::CuStream> CudaOrderBook::streams_of(StreamKind kind) const {
  const std::lock_guard lock(mutex_);
  std::vector<cuda::CuStream> streams;
  for (const auto& [stream, entry] : streams_) {
    if (entry.kind == kind) streams.push_back(stream);
  }
  return streams;
}

std::vector<cuda::CuStream> CudaOrderBook::streams_in_use() const {
  return streams_of(StreamKind::kOurs);
}
std::vector<cuda::CuStream> CudaOrderBook::parked_streams() const {
  return streams_of(StreamKind::kEnded);
}

std::vector<cuda::CuEvent> CudaOrderBook::events() const {
  const std::lock_guard lock(mutex_);
  std::vector<cuda::CuEvent> events;
  for (const auto& [event, entry] : events_) events.push_back(event);
  return events;
}

}  // namespace forebay
