// StorePass: a pass over state in a file store. Parts of the state are read, changed by the caller and
// written back; reading, changing and writing overlap in a few staging buffers.
//
// A part is up to five fields, each a piece of a range, one behind the other in one buffer. Parts come in the
// order in which begin() got them. While one part is changed, the next ones are read, as many as there are
// buffers for. A buffer is free again when its part has been written.
//
// Order. A part is read when no write of an earlier pass is in flight (finish() waits for them).
// Failure. The call that meets the first failed read or write returns that failure, and so do all later
// calls. Transfers in flight are waited for before a buffer is used again and before the pass ends.
//
// Threads: one at a time.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "forebay/span.h"
#include "forebay/staging_buffers.h"
#include "forebay/store.h"

namespace forebay {

struct StorePassField {
  StoreRange range;
  std::uint64_t offset = 0;  // Bytes from the start of the range; a multiple of the granule.
  std::size_t bytes = 0;     // To a granule's end or the range's.
  bool read = true;          // False: its place in the buffer is undefined at first.
  bool written = true;
};

struct StorePassPart {
  static constexpr std::size_t kFieldLimit = 5;
  std::array<StorePassField, kFieldLimit> fields;
  std::size_t field_count = 0;

  // Where field `index` begins in the buffer. Every field begins on a page.
  std::size_t field_offset(std::size_t index) const noexcept;
  std::size_t buffer_bytes() const noexcept { return field_offset(field_count); }
};

class StorePass {
 public:
  // Uses all of `buffers`, each large enough for every part. Requires: store and buffers outlive it.
  StorePass(Store& store, StagingBuffers& buffers) noexcept : store_(store), buffers_(buffers) {}
  // Waits for transfers in flight.
  ~StorePass();
  StorePass(const StorePass&) = delete;
  StorePass& operator=(const StorePass&) = delete;

  // Sets the parts of the next pass and begins to read them. Parts of an earlier call that next() has not
  // given are dropped. A common beginning of both lists is read once, so likely parts may be given before
  // the right ones are known. Requires: no part is out; the parts stay where they are until the pass is over.
  void begin(Span<const StorePassPart* const> parts);
  // The next part, read; it is out until done(). Requires: there is one, and none is out. Errors: the
  // store's.
  Result<std::byte*> next();
  // Ends the part that next() gave: it is written back, or left as it was. Errors: the store's, for any part.
  Status done(bool write);
  // Waits until all ended parts are written; reads go on. Errors: the store's.
  Status finish();
  // Waits for the reads under way, so that the store's statistics have all bytes of them. next() or done()
  // reports a read that failed. Order: as drop().
  void wait_for_reads();
  // Forgets parts that were read ahead, because others change them. The next begin() reads them again.
  void drop() noexcept;

 private:
  struct Slot {
    const StorePassPart* part = nullptr;
    StagingBuffer buffer;
    StoreTicket ticket;  // For its read or its write; 0: nothing to wait for.
  };

  void read_ahead();
  bool begin_read();
  Span<const StoreTransfer> transfers_of(const StorePassPart& part, std::byte* memory,
                                         StoreDirection direction);
  Status wait_for_oldest_write();
  Status wait_for_one();
  Status fail(const Status& status);

  Store& store_;
  StagingBuffers& buffers_;
  std::vector<const StorePassPart*> parts_;
  std::size_t read_count_ = 0;  // Parts that are being read or were read.
  std::deque<Slot> reading_;    // In order; the front may be out.
  bool out_ = false;
  std::deque<Slot> writing_;
  std::array<StoreTransfer, StorePassPart::kFieldLimit> transfers_;
  Status failure_;
};

}  // namespace forebay
