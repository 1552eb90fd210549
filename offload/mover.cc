#include "forebay/mover.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <string>
#include <thread>
#include <utility>

#include "forebay/log.h"
#include "forebay/units.h"

namespace forebay {
namespace {

// A drive that answers nothing for so long does not answer any more.
constexpr std::chrono::minutes kDeadline{10};
// Between two attempts to submit to a store that is full of others' transfers.
constexpr std::chrono::microseconds kPause{100};

}  // namespace

struct Mover::Move {
  Mover* mover;
  StoredBytes stored;
  std::size_t piece_count;
  std::vector<StoreTicket> tickets;  // By buffer.
  struct Call {
    void (*function)(Move& move, std::size_t piece);
    Move* move;
    std::size_t piece;
  };
  std::deque<Call> calls;  // Their addresses stay.
  std::list<Move>::iterator self;

  StoreTicket& ticket(std::size_t piece) { return tickets[piece % tickets.size()]; }
  std::uint64_t piece_bytes(std::size_t piece) const {
    return std::min<std::uint64_t>(mover->piece_bytes_, stored.bytes - piece * mover->piece_bytes_);
  }
};

Mover::Mover(Backend& backend, Store& store) noexcept : backend_(backend), store_(store) {}

Result<std::unique_ptr<Mover>> Mover::create(Backend& backend, Store& store, StagingBuffers& buffers,
                                             std::function<void(const Status&)> on_failure) {
  const std::size_t granule = store.facts().granule_bytes;
  const StagingBuffersOptions& options = buffers.options();
  if (options.buffer_bytes % granule != 0) {
    return Status(StatusCode::kInvalidArgument,
                  "a mover cannot use staging buffers of " + std::to_string(options.buffer_bytes) +
                      " bytes; the store's granule is " + std::to_string(granule) +
                      " bytes, give a multiple of it");
  }
  std::unique_ptr<Mover> mover(new Mover(backend, store));
  mover->piece_bytes_ = options.buffer_bytes;
  mover->granule_bytes_ = granule;
  for (std::size_t i = 0; i < options.buffer_count; ++i) {
    std::optional<StagingBuffer> buffer = buffers.try_take();
    if (!buffer) {
      return Status(StatusCode::kInvalidArgument,
                    "a mover cannot use staging buffers that others have taken some of; give it its own");
    }
    mover->buffers_.push_back(std::move(*buffer));
  }
  mover->on_failure_ = std::move(on_failure);
  FOREBAY_ASSIGN_OR_RETURN(mover->stream_, backend.stream_create());
  return mover;
}

Mover::~Mover() {
  if (stream_ == Stream()) return;
  Status status = backend_.stream_synchronize(stream_);
  if (status.ok()) status = backend_.stream_destroy(stream_);
  if (!status.ok()) log(LogLevel::kWarning, "closing a mover: %s", status.message().c_str());
}

void Mover::fail(const Status& status) {
  {
    const std::lock_guard lock(mutex_);
    if (!status_.ok()) return;
    status_ = status;
  }
  if (on_failure_) on_failure_(status);
}

Status Mover::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

Mover::Move& Mover::add_move(const StoredBytes& stored) {
  const std::lock_guard lock(mutex_);
  Move& move = moves_.emplace_back();
  move.mover = this;
  move.stored = stored;
  move.piece_count = ceil_div(stored.bytes, piece_bytes_);
  move.tickets.resize(buffers_.size());
  move.self = std::prev(moves_.end());
  return move;
}

Status Mover::call(void (*function)(Move& move, std::size_t piece), Move& move, std::size_t piece) {
  move.calls.push_back({function, &move, piece});
  return backend_.call_host(
      stream_,
      [](void* argument) {
        const auto& call = *static_cast<const Move::Call*>(argument);
        call.function(*call.move, call.piece);
      },
      &move.calls.back());
}

// The transfer of one piece; its buffer is free.
void Mover::begin(Move& move, std::size_t piece, StoreDirection direction) {
  if (!status().ok()) return;
  const std::uint64_t begin = move.stored.offset + piece * piece_bytes_;
  const std::uint64_t transfer_end =
      std::min(round_up(begin + move.piece_bytes(piece), granule_bytes_), move.stored.range_bytes);
  const StoreTransfer transfer{direction, move.stored.range, begin, buffers_[piece % buffers_.size()].data(),
                               transfer_end - begin};
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  Result<StoreTicket> ticket = store_.submit({&transfer, 1});
  while (!ticket.ok() && ticket.status().code() == StatusCode::kUnavailable &&
         std::chrono::steady_clock::now() < deadline) {
    // Others use the store too. This move can wait for its own transfers, not for theirs.
    const auto under_way = [](const StoreTicket& t) { return t.id != 0; };
    const auto mine = std::find_if(move.tickets.begin(), move.tickets.end(), under_way);
    if (mine != move.tickets.end()) {
      end(*mine);
    } else {
      std::this_thread::sleep_for(kPause);
    }
    ticket = store_.submit({&transfer, 1});
  }
  if (!ticket.ok()) {
    fail(ticket.status());
    return;
  }
  move.ticket(piece) = ticket.value();
}

void Mover::end(StoreTicket& ticket) {
  if (ticket.id == 0) return;
  const Status status = store_.wait(std::exchange(ticket, {}), kDeadline);
  if (!status.ok()) fail(status);
}

Status Mover::fetch(const StoredBytes& source, DevicePtr target) {
  if (source.bytes == 0) return Status();
  Move& move = add_move(source);
  const auto arrive = [](Move& m, std::size_t piece) {
    Mover& mover = *m.mover;
    const std::size_t ahead = mover.buffers_.size();
    if (piece == 0) {
      for (std::size_t i = 0; i < std::min(ahead, m.piece_count); ++i)
        mover.begin(m, i, StoreDirection::kRead);
    } else if (piece - 1 + ahead < m.piece_count) {
      // The copy of the piece before has run.
      mover.begin(m, piece - 1 + ahead, StoreDirection::kRead);
    }
    mover.end(m.ticket(piece));
  };
  for (std::size_t piece = 0; piece < move.piece_count; ++piece) {
    FOREBAY_RETURN_IF_ERROR(call(arrive, move, piece));
    FOREBAY_RETURN_IF_ERROR(backend_.copy_async(target + piece * piece_bytes_,
                                                buffers_[piece % buffers_.size()].data(),
                                                move.piece_bytes(piece), stream_));
  }
  return call(
      [](Move& m, std::size_t) {
        Mover& mover = *m.mover;
        const std::lock_guard lock(mover.mutex_);
        mover.moves_.erase(m.self);
      },
      move, 0);
}

Status Mover::spill(const std::byte* source, const StoredBytes& target) {
  if (target.bytes == 0) return Status();
  Move& move = add_move(target);
  for (std::size_t piece = 0; piece < move.piece_count; ++piece) {
    if (piece >= buffers_.size()) {
      FOREBAY_RETURN_IF_ERROR(call([](Move& m, std::size_t p) { m.mover->end(m.ticket(p)); }, move, piece));
    }
    FOREBAY_RETURN_IF_ERROR(backend_.copy_async(buffers_[piece % buffers_.size()].data(),
                                                source + piece * piece_bytes_, move.piece_bytes(piece),
                                                stream_));
    FOREBAY_RETURN_IF_ERROR(
        call([](Move& m, std::size_t p) { m.mover->begin(m, p, StoreDirection::kWrite); }, move, piece));
  }
  return call(
      [](Move& m, std::size_t) {
        Mover& mover = *m.mover;
        for (StoreTicket& ticket : m.tickets) mover.end(ticket);
        const std::lock_guard lock(mover.mutex_);
        mover.moves_.erase(m.self);
      },
      move, 0);
}

}  // namespace forebay
