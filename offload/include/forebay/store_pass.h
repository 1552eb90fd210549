// StorePass: a pass over state that is kept in a Store: parts of it are read, changed by the caller, and
// written back, with reading, changing and writing under way at the same time in a few staging buffers.
//
// A part is up to four fields, each a piece of a range, which lie one behind the other in one buffer. Parts
// come in the order they were given in. The next ones are read while this one is changed, as many as there
// are buffers for; a buffer is free again when its part has been written.
//
// Order. A part is read when nothing of an earlier pass is being written any more (finish() waits for that).
// Failure. The first failure of a read or a write is given back by the call that meets it, and by all later
// ones; what is under way is waited for before a buffer is used again or the pass ends.
//
// Threads: one at a time.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "forebay/staging_buffers.h"
#include "forebay/store.h"

namespace forebay {

struct StorePassField {
  StoreRange range;
  std::uint64_t offset = 0;  // Bytes from the range's begin; a multiple of the granule.
  std::size_t bytes = 0;     // To a granule's end or the range's.
  bool read = true;          // False: its place in the buffer holds whatever was there.
  bool written = true;
};

struct StorePassPart {
  static constexpr std::size_t kFieldLimit = 4;
  std::array<StorePassField, kFieldLimit> fields;
  std::size_t field_count = 0;

  // Where field `index` begins in the buffer: every field is on a page.
  std::size_t field_offset(std::size_t index) const noexcept;
  std::size_t buffer_bytes() const noexcept { return field_offset(field_count); }
};

class StorePass {
 public:
  // Uses all of `buffers`, each large enough for every part. Requires: store and buffers outlive it.
  StorePass(Store& store, StagingBuffers& buffers) noexcept : store_(store), buffers_(buffers) {}
  // Waits for what is under way.
  ~StorePass();
  StorePass(const StorePass&) = delete;
  StorePass& operator=(const StorePass&) = delete;

  // The parts of the next pass, which stay where they are until it is over; begins to read them. What an
  // earlier call gave and nobody asked for is dropped, but the parts both begin with are read once: so the
  // likely parts may be given before the right ones are known. Requires: no part is out.
  void begin(std::span<const StorePassPart* const> parts);
  // The next part, read. Requires: there is one, and the one before is done. Errors: the store's.
  Result<std::byte*> next();
  // The part that next() gave is done: written back, or as it was. Errors: the store's, of any part's.
  Status done(bool write);
  // Waits until everything that is done is written; reads go on. Errors: the store's.
  Status finish();
  // Forgets what was read ahead, because others change it. Errors: none; the next begin() starts anew.
  void drop() noexcept;

 private:
  struct Slot {
    const StorePassPart* part = nullptr;
    StagingBuffer buffer;
    StoreTicket ticket;  // Of its read or its write; 0: nothing to wait for.
  };

  void read_ahead();
  bool begin_read();
  std::span<const StoreTransfer> transfers_of(const StorePassPart& part, std::byte* memory,
                                              StoreDirection direction);
  Status wait_for_oldest_write();
  Status wait_for_one();
  Status fail(const Status& status);

  Store& store_;
  StagingBuffers& buffers_;
  std::vector<const StorePassPart*> parts_;
  std::size_t read_count_ = 0;  // Parts whose reads have begun.
  std::deque<Slot> reading_;    // In order; the front may be out.
  bool out_ = false;
  std::deque<Slot> writing_;
  std::array<StoreTransfer, StorePassPart::kFieldLimit> transfers_;
  Status failure_;
};

}  // namespace forebay
