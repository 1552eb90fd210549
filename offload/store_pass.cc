#include "forebay/store_pass.h"

#include <algorithm>
#include <utility>

#include "forebay/check.h"
#include "forebay/units.h"

namespace forebay {
namespace {

constexpr std::size_t kPageBytes = 4096;
// A drive that answers nothing for so long does not answer any more.
constexpr std::chrono::minutes kDeadline{10};

}  // namespace

std::size_t StorePassPart::field_offset(std::size_t index) const noexcept {
  std::size_t offset = 0;
  for (std::size_t i = 0; i < index; ++i) offset += round_up(fields[i].bytes, kPageBytes);
  return offset;
}

StorePass::~StorePass() {
  drop();
  while (!writing_.empty()) (void)wait_for_oldest_write();
}

Status StorePass::fail(const Status& status) {
  if (failure_.ok()) failure_ = status;
  return failure_;
}

Span<const StoreTransfer> StorePass::transfers_of(const StorePassPart& part, std::byte* memory,
                                                  StoreDirection direction) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < part.field_count; ++i) {
    const StorePassField& field = part.fields[i];
    if (!(direction == StoreDirection::kRead ? field.read : field.written)) continue;
    transfers_[count++] = {direction, field.range, field.offset, memory + part.field_offset(i), field.bytes};
  }
  return std::span(transfers_).first(count);
}

void StorePass::drop() noexcept {
  FOREBAY_CHECK(!out_, "a part of the pass is out with %zu others", reading_.size());
  for (Slot& slot : reading_) {
    if (slot.ticket.id != 0) (void)store_.wait(slot.ticket, kDeadline);
  }
  reading_.clear();
  parts_.clear();
  read_count_ = 0;
}

void StorePass::wait_for_reads() {
  FOREBAY_CHECK(!out_, "a part of the pass is out with %zu others", reading_.size());
  for (Slot& slot : reading_) {
    if (slot.ticket.id == 0) continue;
    const Status read = store_.wait(std::exchange(slot.ticket, {}), kDeadline);
    if (!read.ok()) (void)fail(read);
  }
}

void StorePass::begin(Span<const StorePassPart* const> parts) {
  FOREBAY_CHECK(!out_, "a part of the pass is out with %zu others", reading_.size());
  std::size_t same = 0;
  while (same < reading_.size() && same < parts.size() && reading_[same].part == parts[same]) ++same;
  while (reading_.size() > same) {
    if (reading_.back().ticket.id != 0) (void)store_.wait(reading_.back().ticket, kDeadline);
    reading_.pop_back();
  }
  parts_.assign(parts.begin(), parts.end());
  read_count_ = same;
  read_ahead();
}

// Begins the next part's read. False if there is none, no buffer is free, or the store has enough to do.
bool StorePass::begin_read() {
  if (!failure_.ok() || read_count_ == parts_.size()) return false;
  // Writes end in any order; their buffers are taken back in the order they began.
  while (!writing_.empty()) {
    const Result<bool> written = store_.poll(writing_.front().ticket);
    if (written.ok() && !written.value()) break;
    if (!written.ok()) (void)fail(written.status());
    writing_.pop_front();
  }
  if (!failure_.ok()) return false;
  std::optional<StagingBuffer> buffer = buffers_.try_take();
  if (!buffer) return false;
  const StorePassPart& part = *parts_[read_count_];
  FOREBAY_CHECK(part.buffer_bytes() <= buffer->bytes(), "a part of %zu bytes in a buffer of %zu",
                part.buffer_bytes(), buffer->bytes());
  Slot slot;
  slot.part = &part;
  const std::span<const StoreTransfer> transfers = transfers_of(part, buffer->data(), StoreDirection::kRead);
  if (!transfers.empty()) {
    const Result<StoreTicket> ticket = store_.submit(transfers);
    if (!ticket.ok()) {
      if (ticket.status().code() != StatusCode::kUnavailable) (void)fail(ticket.status());
      return false;
    }
    slot.ticket = ticket.value();
  }
  slot.buffer = std::move(*buffer);
  reading_.push_back(std::move(slot));
  ++read_count_;
  return true;
}

void StorePass::read_ahead() {
  while (begin_read()) {
  }
}

Status StorePass::wait_for_oldest_write() {
  const Status written = store_.wait(writing_.front().ticket, kDeadline);
  writing_.pop_front();
  return written.ok() ? written : fail(written);
}

// One transfer less is under way.
Status StorePass::wait_for_one() {
  if (!writing_.empty()) return wait_for_oldest_write();
  for (Slot& slot : reading_) {
    if (slot.ticket.id == 0) continue;
    const Status read = store_.wait(std::exchange(slot.ticket, {}), kDeadline);
    return read.ok() ? read : fail(read);
  }
  return fail(
      Status(StatusCode::kInternal, "a store has no room for a part's write though nothing is under way"));
}

Result<std::byte*> StorePass::next() {
  FOREBAY_CHECK(!out_, "a part of the pass is out with %zu others", reading_.size());
  read_ahead();
  while (failure_.ok() && reading_.empty()) {
    // Its buffer, or its place in the store's queue, is with a write.
    if (writing_.empty()) {
      return fail(Status(StatusCode::kInternal,
                         "a pass over a store has neither a free buffer nor a write that it could wait for"));
    }
    FOREBAY_RETURN_IF_ERROR(wait_for_oldest_write());
    read_ahead();
  }
  if (!failure_.ok()) return failure_;
  Slot& slot = reading_.front();
  if (slot.ticket.id != 0) {
    const Status read = store_.wait(std::exchange(slot.ticket, {}), kDeadline);
    if (!read.ok()) return fail(read);
  }
  out_ = true;
  return slot.buffer.data();
}

Status StorePass::done(bool write) {
  FOREBAY_CHECK(out_, "no part of the pass is out, %zu are read", reading_.size());
  out_ = false;
  Slot slot = std::move(reading_.front());
  reading_.pop_front();
  if (write && failure_.ok()) {
    const std::span<const StoreTransfer> transfers =
        transfers_of(*slot.part, slot.buffer.data(), StoreDirection::kWrite);
    Result<StoreTicket> ticket = store_.submit(transfers);
    while (!ticket.ok() && ticket.status().code() == StatusCode::kUnavailable) {
      FOREBAY_RETURN_IF_ERROR(wait_for_one());
      ticket = store_.submit(transfers);
    }
    if (!ticket.ok()) return fail(ticket.status());
    slot.ticket = ticket.value();
    writing_.push_back(std::move(slot));
  } else {
    slot.buffer.give();
  }
  read_ahead();
  return failure_;
}

Status StorePass::finish() {
  while (!writing_.empty()) (void)wait_for_oldest_write();
  return failure_;
}

}  // namespace forebay
