#include "forebay/pinned_pool.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "forebay/check.h"
#include "forebay/descriptor.h"
#include "forebay/host_room.h"
#include "forebay/log.h"
#include "forebay/units.h"

namespace forebay {
namespace {

constexpr std::size_t kHugePageBytes = 2u << 20;

// Memory taken ahead of requests makes fewer, larger slabs. Together with all other unused memory it is at
// most this fraction of the pool. Larger divisor: almost every request of a growing pool calls pin. Smaller:
// more unused memory is pinned; the pool promises at most a fiftieth.
constexpr std::size_t kAheadDivisor = 64;

// This much may always be taken ahead. Smaller: a small pool of small blocks makes a call for each block.
// Larger: a small pool pins several times its live bytes.
constexpr std::size_t kAheadBytesMin = kHugePageBytes;

// A prewarmed pool has at most this many slabs, or slabs of slab_bytes. Smaller: a request that misses during
// prewarm waits longer for the slab that is being made. Larger: more ends of slabs that fit no block.
constexpr std::size_t kPrewarmSlabsMax = 16;

// The pages of a slab are counted in 32 bits; half of that leaves room for rounding up.
constexpr std::size_t kPageCountMax = std::size_t{1} << 31;

// Busy streams remembered during one poll of the pending blocks. More streams than this: some events are
// queried needlessly.
constexpr std::size_t kBusyStreamsMax = 16;

enum class PageState : std::uint8_t {
  kInside,    // Not the first page of a range.
  kFree,      // In a bin.
  kLive,      // A block.
  kFreeing,   // Claimed by the thread that is recording its event.
  kPending,   // In the pending list: freed, and its event has not completed as far as known.
  kStranded,  // Freed, but the end of the queued work cannot be found out.
};

struct Slab;

// One range of pages. It is stored in its slab's table, at the entry of its first page; the entry of its last
// page points back. So neighbours are found without a search, and ranges allocate no memory.
struct Range {
  Slab* slab = nullptr;
  Range* previous = nullptr;  // In its bin or in the pending list.
  Range* next = nullptr;
  Event event;    // Pending.
  Stream stream;  // Pending.
  std::size_t requested_bytes = 0;
  std::uint32_t page_count = 0;
  std::uint32_t first_page = 0;  // Valid at the first and at the last page.
  PageState state = PageState::kInside;
};

struct Slab {
  std::byte* base = nullptr;
  std::size_t bytes = 0;
  Range* pages = nullptr;  // One entry for each page; the system backs the table as it is touched.
  std::size_t table_bytes = 0;
  std::uint32_t page_count = 0;
  bool huge = false;  // Reserved huge pages.
};

// Free ranges by size: one bin for each size below sixteen pages, then sixteen bins for each power of two,
// and a bitmap of the bins in use. The smallest fit is in the first bin that has a fit.
class SizeBins {
 public:
  void insert(Range* range) noexcept {
    const unsigned bin = bin_of(range->page_count);
    range->previous = nullptr;
    range->next = heads_[bin];
    if (range->next != nullptr) range->next->previous = range;
    heads_[bin] = range;
    filled_[bin / 64] |= std::uint64_t{1} << (bin % 64);
  }

  void remove(Range* range) noexcept {
    if (range->next != nullptr) range->next->previous = range->previous;
    if (range->previous != nullptr) {
      range->previous->next = range->next;
      return;
    }
    const unsigned bin = bin_of(range->page_count);
    heads_[bin] = range->next;
    if (heads_[bin] == nullptr) filled_[bin / 64] &= ~(std::uint64_t{1} << (bin % 64));
  }

  // The smallest range of at least `page_count` pages, or null.
  Range* best_fit(std::uint32_t page_count) const noexcept {
    for (unsigned bin = next_filled(bin_of(page_count)); bin < kBinCount; bin = next_filled(bin + 1)) {
      Range* best = nullptr;
      for (Range* range = heads_[bin]; range != nullptr; range = range->next) {
        if (range->page_count == page_count) return range;
        if (range->page_count > page_count && (best == nullptr || range->page_count < best->page_count)) {
          best = range;
        }
      }
      if (best != nullptr) return best;
    }
    return nullptr;
  }

  std::uint32_t largest_page_count() const noexcept {
    std::uint32_t largest = 0;
    for (unsigned bin = kBinCount; bin-- > 0 && largest == 0;) {
      for (const Range* range = heads_[bin]; range != nullptr; range = range->next) {
        largest = std::max(largest, range->page_count);
      }
    }
    return largest;
  }

 private:
  static constexpr unsigned kColumnBits = 4;
  static constexpr unsigned kBinCount = (32 - kColumnBits + 1) << kColumnBits;

  static unsigned bin_of(std::uint32_t page_count) noexcept {
    if (page_count < 1u << kColumnBits) return page_count;
    const unsigned shift = static_cast<unsigned>(std::bit_width(page_count)) - 1 - kColumnBits;
    return ((shift + 1) << kColumnBits) + ((page_count >> shift) & ((1u << kColumnBits) - 1));
  }
  unsigned next_filled(unsigned bin) const noexcept {
    while (bin < kBinCount) {
      const std::uint64_t rest = filled_[bin / 64] >> (bin % 64);
      if (rest != 0) return bin + static_cast<unsigned>(std::countr_zero(rest));
      bin = (bin / 64 + 1) * 64;
    }
    return kBinCount;
  }

  std::uint64_t filled_[(kBinCount + 63) / 64] = {};
  Range* heads_[kBinCount] = {};
};

// --- system calls -------------------------------------------------

// An entry of /proc/meminfo, or `otherwise` if it is missing.
std::size_t meminfo(const char* text, const char* label, std::size_t otherwise) noexcept {
  const char* line = std::strstr(text, label);
  return line == nullptr ? otherwise
                         : static_cast<std::size_t>(std::strtoull(line + std::strlen(label), nullptr, 10));
}

struct HostMemory {
  std::size_t available_bytes = SIZE_MAX;  // Without swapping. SIZE_MAX: not known.
  std::size_t huge_page_bytes = 0;         // Unused reserved huge pages; not part of available_bytes.
};

HostMemory host_memory() noexcept {
  HostMemory memory;
  const internal::Descriptor file(::open("/proc/meminfo", O_RDONLY | O_CLOEXEC));
  char text[4096];
  const ssize_t length = ::read(file.number(), text, sizeof(text) - 1);
  if (length <= 0) return memory;
  text[length] = '\0';
  const std::size_t available_kib = meminfo(text, "\nMemAvailable:", SIZE_MAX);
  if (available_kib != SIZE_MAX) memory.available_bytes = available_kib << 10;
  if (meminfo(text, "\nHugepagesize:", 0) << 10 == kHugePageBytes) {
    memory.huge_page_bytes = meminfo(text, "\nHugePages_Free:", 0) * kHugePageBytes;
  }
  return memory;
}

std::string memlock_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : format_bytes(limit.rlim_cur);
}

// Zeroed memory that exists where it is touched, or null.
std::byte* map_addresses(std::size_t bytes) noexcept {
  void* raw =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return raw == MAP_FAILED ? nullptr : static_cast<std::byte*>(raw);
}

// New zeroed memory, aligned to huge pages if it is large enough, or null.
std::byte* map_pages(std::size_t bytes, bool align_to_huge) noexcept {
  const std::size_t slack = align_to_huge && bytes >= kHugePageBytes ? kHugePageBytes : 0;
  if (bytes > SIZE_MAX - slack) return nullptr;
  void* raw = ::mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  if (slack == 0) return static_cast<std::byte*>(raw);
  auto* begin = static_cast<std::byte*>(raw);
  const auto address = reinterpret_cast<std::uintptr_t>(raw);
  std::byte* base = begin + (round_up(address, kHugePageBytes) - address);
  if (base > begin) ::munmap(begin, static_cast<std::size_t>(base - begin));
  std::byte* end = base + bytes;
  std::byte* raw_end = begin + bytes + slack;
  if (raw_end > end) ::munmap(end, static_cast<std::size_t>(raw_end - end));
  return base;
}

// Memory in reserved huge pages, or null. The kernel checks the reservation here, so touching cannot fail.
std::byte* map_huge_pages(std::size_t bytes) noexcept {
#if defined(MAP_HUGETLB)
  constexpr int kTwoMebibytes = 21 << 26;  // MAP_HUGE_2MB; some C libraries do not define it.
  void* raw = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | kTwoMebibytes, -1, 0);
  return raw == MAP_FAILED ? nullptr : static_cast<std::byte*>(raw);
#else
  (void)bytes;
  return nullptr;
#endif
}

// Prefers `node` for pages not touched yet. False if the kernel refuses. The system call is made by number,
// so that libnuma is not needed. Not bound to the node: when a bound node is full, the kernel kills the
// process.
bool prefer_node(void* address, std::size_t bytes, int node) noexcept {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED
  constexpr int kBits = static_cast<int>(sizeof(unsigned long)) * 8;
  unsigned long mask[16] = {};
  if (node >= 16 * kBits) return false;
  mask[node / kBits] = 1ul << (node % kBits);
  return ::syscall(SYS_mbind, address, bytes, kPreferred, mask, 16ul * kBits + 1, 0) == 0;
}

// Touches the pages. False, with errno, if the system has no memory left.
bool touch_pages(std::byte* base, std::size_t bytes, std::size_t page_bytes) noexcept {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, from Linux 5.14.
  if (::madvise(base, bytes, kPopulateWrite) == 0) return true;
  if (errno != EINVAL) return false;
  for (std::size_t offset = 0; offset < bytes; offset += page_bytes) {
    *static_cast<volatile std::byte*>(base + offset) = std::byte{0};
  }
  return true;
}

// --- the pool -----------------------------------------------------

class SlabPinnedPool final : public PinnedPool {
 public:
  SlabPinnedPool(Backend& backend, const PinnedPoolOptions& options, std::size_t page_bytes)
      : backend_(backend),
        options_(options),
        page_bytes_(page_bytes),
        numa_node_(options.numa_node >= 0 ? options.numa_node : backend.capabilities().numa_node) {}
  ~SlabPinnedPool() override;

  Result<std::byte*> allocate(std::size_t bytes) override;
  Status free(void* block, Stream stream) override;
  Status prewarm(std::size_t bytes, std::size_t block_bytes) override;
  std::size_t trim() override;
  std::size_t block_bytes(const void* block) const override;
  PinnedPoolStatistics statistics() const override;
  void reset_peaks() override;
  std::string report() const override;

 private:
  using Lock = std::unique_lock<std::mutex>;

  // --- books; mutex_ held ---
  Range* find_block(const void* block) const;
  std::byte* take(Range* range, std::uint32_t page_count, std::size_t requested_bytes);
  void put_free(Range* range);
  void shape(Range* first, std::uint32_t page_count, PageState state);
  void append_pending(Range* range);
  void remove_pending(Range* range);
  void add_slab(std::unique_ptr<Slab> slab);
  std::vector<std::unique_ptr<Slab>> remove_unused(std::size_t bytes_max);
  std::size_t ahead_limit_bytes() const;
  std::size_t bytes_of(const Range* range) const { return range->page_count * page_bytes_; }

  // --- no lock held on entry ---
  bool collect_completed();
  std::byte* take_free(std::uint32_t page_count, std::size_t requested_bytes);

  // --- growth_mutex_ held ---
  std::size_t slab_bytes_for(std::size_t bytes) const;
  void replace_unused(std::size_t added_bytes, std::size_t needed_bytes);
  Result<std::unique_ptr<Slab>> make_slab(std::size_t bytes);
  Status map_slab(Slab& slab);
  void destroy_slab(const Slab& slab) noexcept;
  std::size_t trim_slabs();

  Status too_large(std::size_t bytes) const;
  bool make_event_room();
  std::string memory_line() const;

  // Constant after construction.
  Backend& backend_;
  const PinnedPoolOptions options_;
  const std::size_t page_bytes_;
  const int numa_node_;

  // Has its own synchronization.
  std::atomic<bool> placement_refused_{false};

  // Lock order: growth_mutex_, poll_mutex_, mutex_. The first is held while memory is taken or given back,
  // the second while events are queried. Both are held across calls that wait for the system, but never for
  // queued work.
  std::mutex growth_mutex_;
  std::mutex poll_mutex_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<std::unique_ptr<Slab>> slabs_;  // By address.
  SizeBins bins_;
  Range* pending_first_ = nullptr;  // Oldest first.
  Range* pending_last_ = nullptr;
  std::vector<Event> spare_events_;  // Its capacity suffices for all events made so far.
  std::size_t event_count_ = 0;
  std::size_t prewarmed_bytes_ = 0;  // The most that prewarm was asked for since the last trim.
  PinnedPoolStatistics statistics_;
};

SlabPinnedPool::~SlabPinnedPool() {
  for (Range* range = pending_first_; range != nullptr; range = range->next) {
    (void)backend_.event_destroy(range->event);
  }
  for (const Event event : spare_events_) (void)backend_.event_destroy(event);
  for (const auto& slab : slabs_) destroy_slab(*slab);
}

// --- books --------------------------------------------------------

Range* SlabPinnedPool::find_block(const void* block) const {
  const auto address = reinterpret_cast<std::uintptr_t>(block);
  const auto after = std::upper_bound(
      slabs_.begin(), slabs_.end(), address,
      [](std::uintptr_t at, const auto& slab) { return at < reinterpret_cast<std::uintptr_t>(slab->base); });
  if (after == slabs_.begin()) return nullptr;
  const Slab& slab = **std::prev(after);
  const std::size_t offset = address - reinterpret_cast<std::uintptr_t>(slab.base);
  if (offset >= slab.bytes || offset % page_bytes_ != 0) return nullptr;
  Range* range = &slab.pages[offset / page_bytes_];
  return range->state == PageState::kLive ? range : nullptr;
}

// Makes the pages from `first` on one range.
void SlabPinnedPool::shape(Range* first, std::uint32_t page_count, PageState state) {
  Slab* slab = first->slab;
  const auto index = static_cast<std::uint32_t>(first - slab->pages);
  first->page_count = page_count;
  first->first_page = index;
  first->state = state;
  first[page_count - 1].first_page = index;
}

// Cuts a block from the front of a free range.
std::byte* SlabPinnedPool::take(Range* range, std::uint32_t page_count, std::size_t requested_bytes) {
  bins_.remove(range);
  const std::uint32_t rest = range->page_count - page_count;
  shape(range, page_count, PageState::kLive);
  if (rest > 0) {
    Range* upper = range + page_count;
    upper->slab = range->slab;
    shape(upper, rest, PageState::kFree);
    bins_.insert(upper);
  }
  range->requested_bytes = requested_bytes;
  statistics_.requested_bytes += requested_bytes;
  statistics_.peak_requested_bytes = std::max(statistics_.peak_requested_bytes, statistics_.requested_bytes);
  statistics_.live_bytes += bytes_of(range);
  ++statistics_.allocation_count;
  return range->slab->base + range->first_page * page_bytes_;
}

// Cuts a block from the best fit among the free ranges. Null if there is none. Called without mutex_.
std::byte* SlabPinnedPool::take_free(std::uint32_t page_count, std::size_t requested_bytes) {
  const Lock lock(mutex_);
  Range* range = bins_.best_fit(page_count);
  return range == nullptr ? nullptr : take(range, page_count, requested_bytes);
}

// Frees a range that is in no list, together with its free neighbours.
void SlabPinnedPool::put_free(Range* range) {
  Slab* slab = range->slab;
  std::uint32_t page_count = range->page_count;
  if (range->first_page + page_count < slab->page_count) {
    Range* next = range + page_count;
    if (next->state == PageState::kFree) {
      bins_.remove(next);
      page_count += next->page_count;
      next->state = PageState::kInside;
    }
  }
  if (range->first_page > 0) {
    Range* previous = &slab->pages[range[-1].first_page];
    if (previous->state == PageState::kFree) {
      bins_.remove(previous);
      page_count += previous->page_count;
      range->state = PageState::kInside;
      range = previous;
    }
  }
  shape(range, page_count, PageState::kFree);
  bins_.insert(range);
}

void SlabPinnedPool::append_pending(Range* range) {
  range->state = PageState::kPending;
  range->next = nullptr;
  range->previous = pending_last_;
  (pending_last_ != nullptr ? pending_last_->next : pending_first_) = range;
  pending_last_ = range;
}

void SlabPinnedPool::remove_pending(Range* range) {
  (range->previous != nullptr ? range->previous->next : pending_first_) = range->next;
  (range->next != nullptr ? range->next->previous : pending_last_) = range->previous;
}

void SlabPinnedPool::add_slab(std::unique_ptr<Slab> slab) {
  slab->pages[0].slab = slab.get();
  shape(slab->pages, slab->page_count, PageState::kFree);
  bins_.insert(slab->pages);
  statistics_.held_bytes += slab->bytes;
  statistics_.peak_held_bytes = std::max(statistics_.peak_held_bytes, statistics_.held_bytes);
  if (slab->huge) statistics_.huge_page_bytes += slab->bytes;
  ++statistics_.slab_count;
  ++statistics_.pin_count;
  const auto place = std::upper_bound(slabs_.begin(), slabs_.end(), slab,
                                      [](const auto& a, const auto& b) { return a->base < b->base; });
  slabs_.insert(place, std::move(slab));
}

// Removes slabs without a block from the books, the largest first, at most `bytes_max` in all.
std::vector<std::unique_ptr<Slab>> SlabPinnedPool::remove_unused(std::size_t bytes_max) {
  std::vector<std::size_t> unused;  // Indices.
  for (std::size_t i = 0; i < slabs_.size(); ++i) {
    const Range& first = slabs_[i]->pages[0];
    if (first.state == PageState::kFree && first.page_count == slabs_[i]->page_count) unused.push_back(i);
  }
  std::sort(unused.begin(), unused.end(),
            [this](std::size_t a, std::size_t b) { return slabs_[a]->bytes > slabs_[b]->bytes; });
  std::vector<std::unique_ptr<Slab>> removed;
  for (const std::size_t i : unused) {
    Slab& slab = *slabs_[i];
    if (slab.bytes > bytes_max) continue;
    bytes_max -= slab.bytes;
    bins_.remove(slab.pages);
    statistics_.held_bytes -= slab.bytes;
    if (slab.huge) statistics_.huge_page_bytes -= slab.bytes;
    --statistics_.slab_count;
    removed.push_back(std::move(slabs_[i]));
  }
  std::erase(slabs_, nullptr);
  return removed;
}

// --- blocks -------------------------------------------------------

Result<std::byte*> SlabPinnedPool::allocate(std::size_t bytes) {
  const std::size_t page_count_wide = bytes == 0 ? 1 : (bytes - 1) / page_bytes_ + 1;
  if (page_count_wide > kPageCountMax) return too_large(bytes);
  const auto page_count = static_cast<std::uint32_t>(page_count_wide);
  if (std::byte* block = take_free(page_count, bytes)) return block;
  if (collect_completed()) {
    if (std::byte* block = take_free(page_count, bytes)) return block;
  }

  const Lock growth_lock(growth_mutex_);
  // Meanwhile another thread may have taken memory or freed a block.
  if (std::byte* block = take_free(page_count, bytes)) return block;
  if (!internal::has_text_room()) return Status(StatusCode::kOutOfMemory, internal::kNoHostMemory);
  const std::size_t needed_bytes = page_count * page_bytes_;
  const std::size_t slab_bytes = slab_bytes_for(needed_bytes);
  replace_unused(slab_bytes, needed_bytes);
  Result<std::unique_ptr<Slab>> slab = make_slab(slab_bytes);
  if (!slab.ok() && slab.status().code() == StatusCode::kOutOfMemory) {
    // Then nothing is taken ahead, and free slabs that are too small for this request go back first.
    const bool easier = trim_slabs() > 0 || slab_bytes > needed_bytes;
    if (std::byte* block = take_free(page_count, bytes)) return block;
    if (easier) slab = make_slab(needed_bytes);
  }
  if (!slab.ok()) {
    return slab.status().with_context("cannot allocate " + format_bytes(bytes) +
                                      " of pinned host memory for " + backend_.capabilities().name);
  }
  const Lock lock(mutex_);
  Range* first = slab.value()->pages;
  add_slab(std::move(slab).value());
  return take(first, page_count, bytes);
}

// Room for the event of one more block. Without it the block's stream is waited for.
bool SlabPinnedPool::make_event_room() {
  const Lock lock(mutex_);
  if (!internal::make_vector_room(spare_events_, event_count_ + 1)) return false;
  ++event_count_;
  return true;
}

Status SlabPinnedPool::free(void* block, Stream stream) {
  Range* range = nullptr;
  Event event;
  {
    const Lock lock(mutex_);
    range = find_block(block);
    if (range == nullptr) {
      char address[32];
      std::snprintf(address, sizeof(address), "%p", block);
      return invalid_argument(
          "cannot free ", address,
          ": no live pinned block starts there; free each block once, by the address that "
          "allocate returned");
    }
    statistics_.requested_bytes -= range->requested_bytes;
    statistics_.live_bytes -= bytes_of(range);
    if (stream == Stream()) {
      put_free(range);
      return {};
    }
    statistics_.pending_bytes += bytes_of(range);
    range->state = PageState::kFreeing;
    if (!spare_events_.empty()) {
      event = spare_events_.back();
      spare_events_.pop_back();
    }
  }
  if (event == Event() && make_event_room()) {
    if (Result<Event> made = backend_.event_create(); made.ok()) event = made.value();
  }

  const bool recorded = event != Event() && backend_.event_record(event, stream).ok();
  // Without an event the end of the queued work is only known by waiting for it.
  const Status status = recorded ? Status() : backend_.stream_synchronize(stream);
  const Lock lock(mutex_);
  if (recorded) {
    range->event = event;
    range->stream = stream;
    append_pending(range);
    return {};
  }
  if (event != Event()) spare_events_.push_back(event);
  if (!status.ok()) {
    range->state = PageState::kStranded;
    return status.with_context("a freed pinned block of " + format_bytes(bytes_of(range)) +
                               " stays unused: its stream takes no event and cannot be waited for");
  }
  statistics_.pending_bytes -= bytes_of(range);
  put_free(range);
  return {};
}

// Frees the pending ranges that have a completed event. Returns whether there were any.
bool SlabPinnedPool::collect_completed() {
  const std::lock_guard poll_lock(poll_mutex_);
  Stream busy[kBusyStreamsMax];
  std::size_t busy_count = 0;
  bool collected = false;
  Lock lock(mutex_);
  // Ranges leave the list only here, under poll_mutex_, so `range` stays in it while mutex_ is released.
  for (Range* range = pending_first_; range != nullptr;) {
    // Later events of a busy stream have not completed either.
    if (std::find(busy, busy + busy_count, range->stream) != busy + busy_count) {
      range = range->next;
      continue;
    }
    lock.unlock();
    const Result<bool> completed = backend_.event_query(range->event);
    lock.lock();
    Range* next = range->next;
    if (completed.ok() && completed.value()) {
      remove_pending(range);
      spare_events_.push_back(range->event);
      statistics_.pending_bytes -= bytes_of(range);
      put_free(range);
      collected = true;
    } else if (busy_count < kBusyStreamsMax) {
      busy[busy_count++] = range->stream;
    }
    range = next;
  }
  return collected;
}

// --- memory from the system ---------------------------------------

// How much may be held that no live or pending block uses.
std::size_t SlabPinnedPool::ahead_limit_bytes() const {
  const std::size_t used_bytes = statistics_.live_bytes + statistics_.pending_bytes;
  const std::size_t ahead_bytes = std::max(kAheadBytesMin, statistics_.held_bytes / kAheadDivisor);
  return std::max(ahead_bytes, prewarmed_bytes_ > used_bytes ? prewarmed_bytes_ - used_bytes : 0);
}

// The size of the slab to make for a request. It includes as much as may be held ahead, in whole huge pages
// for small blocks and in whole blocks for larger ones.
std::size_t SlabPinnedPool::slab_bytes_for(std::size_t bytes) const {
  if (bytes >= options_.slab_bytes) return bytes;
  std::size_t ahead_bytes = 0;
  {
    // Pending blocks will be free soon, so they count as held ahead.
    const Lock lock(mutex_);
    const std::size_t limit_bytes = std::max(kAheadBytesMin, statistics_.held_bytes / kAheadDivisor);
    const std::size_t unused_bytes = statistics_.held_bytes - statistics_.live_bytes;
    if (limit_bytes > unused_bytes) ahead_bytes = limit_bytes - unused_bytes;
  }
  const std::size_t most_bytes =
      std::min({bytes + ahead_bytes, options_.slab_bytes, kPageCountMax * page_bytes_});
  const std::size_t unit_bytes =
      bytes < kHugePageBytes && most_bytes >= kHugePageBytes ? kHugePageBytes : bytes;
  return most_bytes / unit_bytes * unit_bytes;
}

// Called before `added_bytes` more are taken, `needed_bytes` of them for a request. Gives unused slabs back
// if together with the new memory more would be unused than may be held ahead. So a pool adapts when the
// sizes of requests change, at the cost of pinning again.
void SlabPinnedPool::replace_unused(std::size_t added_bytes, std::size_t needed_bytes) {
  std::vector<std::unique_ptr<Slab>> replaced;
  {
    const Lock lock(mutex_);
    const std::size_t unused_bytes = statistics_.held_bytes - statistics_.live_bytes -
                                     statistics_.pending_bytes + (added_bytes - needed_bytes);
    const std::size_t limit_bytes = ahead_limit_bytes();
    if (unused_bytes <= limit_bytes) return;
    replaced = remove_unused(unused_bytes - limit_bytes);
  }
  for (const auto& slab : replaced) destroy_slab(*slab);
}

Result<std::unique_ptr<Slab>> SlabPinnedPool::make_slab(std::size_t bytes) {
  if (options_.limit_bytes != 0) {
    const Lock lock(mutex_);
    const std::size_t held_bytes = statistics_.held_bytes;
    if (held_bytes > options_.limit_bytes || bytes > options_.limit_bytes - held_bytes) {
      return Status(StatusCode::kOutOfMemory, "a slab of ", format_bytes(bytes),
                    " would exceed the limit of ", format_bytes(options_.limit_bytes), "; ", memory_line(),
                    "; free blocks, synchronize the streams they were freed on, or raise limit_bytes");
    }
  }
  {
    const Lock lock(mutex_);
    if (!internal::make_vector_room(slabs_)) return Status(StatusCode::kOutOfMemory, internal::kNoHostMemory);
  }
  auto slab = std::make_unique<Slab>();
  slab->bytes = bytes;
  slab->page_count = static_cast<std::uint32_t>(bytes / page_bytes_);
  slab->table_bytes = round_up(slab->page_count * sizeof(Range), page_bytes_);
  void* table = ::mmap(nullptr, slab->table_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (table == MAP_FAILED) {
    return Status(StatusCode::kOutOfMemory, "the host has no addresses left for the books of a slab of ",
                  format_bytes(bytes), "; raise ulimit -v");
  }
  // Zero bytes are the state of a page inside a range.
  static_assert(static_cast<int>(PageState::kInside) == 0);
  slab->pages = static_cast<Range*>(table);
  if (Status status = map_slab(*slab); !status.ok()) {
    ::munmap(table, slab->table_bytes);
    return status;
  }
  return slab;
}

Status SlabPinnedPool::map_slab(Slab& slab) {
  const std::string what = "a slab of " + format_bytes(slab.bytes);
  if (options_.addresses_only) {
    slab.base = map_addresses(slab.bytes);
    if (slab.base == nullptr) {
      return Status(StatusCode::kOutOfMemory, "the host has no addresses left for ", what,
                    "; raise ulimit -v");
    }
    Status status = backend_.pin(slab.base, slab.bytes);
    if (!status.ok()) ::munmap(slab.base, slab.bytes);
    return status;
  }
  if (options_.huge_pages && slab.bytes % kHugePageBytes == 0) slab.base = map_huge_pages(slab.bytes);
  slab.huge = slab.base != nullptr;
  if (!slab.huge) {
    // Asked first: the kernel maps more than it has, and kills processes when that is touched.
    const std::size_t available_bytes = host_memory().available_bytes;
    if (slab.bytes > available_bytes) {
      return Status(StatusCode::kOutOfMemory, what, " is more than the ", format_bytes(available_bytes),
                    " the host has available; free host memory or ask for less");
    }
    slab.base = map_pages(slab.bytes, options_.huge_pages);
  }
  if (slab.base == nullptr) {
    return Status(StatusCode::kOutOfMemory, "the host refuses to map ", what, ": ", std::strerror(errno),
                  "; free host memory or raise ulimit -v");
  }
  if (!slab.huge && options_.huge_pages) ::madvise(slab.base, slab.bytes, MADV_HUGEPAGE);
  // Child processes do not get this memory. A fork then copies no page tables, and a write does not move the
  // pages away from the device.
  ::madvise(slab.base, slab.bytes, MADV_DONTFORK);
  if (numa_node_ >= 0 && !prefer_node(slab.base, slab.bytes, numa_node_) &&
      !placement_refused_.exchange(true)) {
    log(LogLevel::kInfo, "pinned memory for %s is not placed on NUMA node %d: %s",
        backend_.capabilities().name, numa_node_, std::strerror(errno));
  }
  if (!touch_pages(slab.base, slab.bytes, page_bytes_)) {
    const int error = errno;
    ::munmap(slab.base, slab.bytes);
    return Status(StatusCode::kOutOfMemory, "the host has no memory for ", what, ": ", std::strerror(error),
                  "; free host memory or ask for less");
  }
  if (Status status = backend_.pin(slab.base, slab.bytes); !status.ok()) {
    ::munmap(slab.base, slab.bytes);
    return Status(status.code(), what, " cannot be pinned: ", status.message(),
                  "; the limit on locked memory (ulimit -l) is ", memlock_limit(),
                  ": raise it, free host memory, or set limit_bytes");
  }
  return {};
}

void SlabPinnedPool::destroy_slab(const Slab& slab) noexcept {
  // Memory that the Backend does not unpin stays mapped, because the device may still use the addresses.
  if (const Status status = backend_.unpin(slab.base); status.ok()) {
    ::munmap(slab.base, slab.bytes);
  } else {
    log(LogLevel::kWarning, "%zu bytes of pinned memory are lost: %s", slab.bytes, status.message().c_str());
  }
  ::munmap(slab.pages, slab.table_bytes);
}

Status SlabPinnedPool::prewarm(std::size_t bytes, std::size_t block_bytes) {
  const std::string what =
      "cannot prewarm " + format_bytes(bytes) + " of pinned host memory for " + backend_.capabilities().name;
  if (bytes / page_bytes_ > kPageCountMax || block_bytes / page_bytes_ > kPageCountMax) {
    return too_large(std::max(bytes, block_bytes));
  }
  const std::size_t unit_bytes = std::max<std::size_t>(page_bytes_, round_up(block_bytes, page_bytes_));
  const std::size_t slab_bytes_max =
      std::max(options_.slab_bytes, round_up(bytes / kPrewarmSlabsMax, page_bytes_)) / unit_bytes *
      unit_bytes;
  for (bool first = true;; first = false) {
    // Released between slabs, so that a request that misses waits for at most one slab.
    const Lock growth_lock(growth_mutex_);
    const std::size_t held_bytes = statistics().held_bytes;
    if (held_bytes < bytes) {
      const std::size_t missing_bytes = round_up(bytes - held_bytes, unit_bytes);
      if (first) {
        // Refused before it begins: half of the memory would be of no use and exhaust the host.
        const HostMemory host = host_memory();
        if (missing_bytes > host.huge_page_bytes &&
            missing_bytes - host.huge_page_bytes > host.available_bytes) {
          return Status(StatusCode::kOutOfMemory, what, ": ", format_bytes(missing_bytes),
                        " are missing and the host has ", format_bytes(host.available_bytes),
                        " available; free host memory or ask for less");
        }
      }
      Result<std::unique_ptr<Slab>> slab =
          make_slab(std::min(missing_bytes, std::max(slab_bytes_max, unit_bytes)));
      if (!slab.ok()) return slab.status().with_context(what);
      const Lock lock(mutex_);
      add_slab(std::move(slab).value());
      continue;
    }
    const Lock lock(mutex_);
    prewarmed_bytes_ = std::max(prewarmed_bytes_, bytes);
    return {};
  }
}

std::size_t SlabPinnedPool::trim() {
  const Lock growth_lock(growth_mutex_);
  {
    const Lock lock(mutex_);
    prewarmed_bytes_ = 0;
  }
  return trim_slabs();
}

std::size_t SlabPinnedPool::trim_slabs() {
  collect_completed();
  std::vector<std::unique_ptr<Slab>> unused;
  {
    const Lock lock(mutex_);
    unused = remove_unused(SIZE_MAX);
  }
  std::size_t trimmed_bytes = 0;
  for (const auto& slab : unused) {
    trimmed_bytes += slab->bytes;
    destroy_slab(*slab);
  }
  return trimmed_bytes;
}

// --- accounts -----------------------------------------------------

std::size_t SlabPinnedPool::block_bytes(const void* block) const {
  const Lock lock(mutex_);
  const Range* range = find_block(block);
  return range == nullptr ? 0 : bytes_of(range);
}

PinnedPoolStatistics SlabPinnedPool::statistics() const {
  const Lock lock(mutex_);
  return statistics_;
}

void SlabPinnedPool::reset_peaks() {
  const Lock lock(mutex_);
  statistics_.peak_requested_bytes = statistics_.requested_bytes;
  statistics_.peak_held_bytes = statistics_.held_bytes;
}

// mutex_ held.
std::string SlabPinnedPool::memory_line() const {
  const std::size_t unused = statistics_.held_bytes - statistics_.live_bytes - statistics_.pending_bytes;
  return join_text("of ", format_bytes(statistics_.held_bytes), " held, ",
                   format_bytes(statistics_.live_bytes), " are in use, ",
                   format_bytes(statistics_.pending_bytes), " wait for streams, and ", format_bytes(unused),
                   " are free in pieces of at most ", format_bytes(bins_.largest_page_count() * page_bytes_));
}

std::string SlabPinnedPool::report() const {
  const Lock lock(mutex_);
  return join_text(
      "pinned host memory for ", backend_.capabilities().name, ": ", memory_line(), "\n  ",
      format_count(statistics_.slab_count, "slab"), ", ", format_bytes(statistics_.huge_page_bytes),
      " in reserved huge pages; live blocks asked for ", format_bytes(statistics_.requested_bytes),
      "; at most ", format_bytes(statistics_.peak_held_bytes), " held for ",
      format_bytes(statistics_.peak_requested_bytes), " asked for\n");
}

Status SlabPinnedPool::too_large(std::size_t bytes) const {
  return Status(StatusCode::kOutOfMemory, "cannot take ", format_bytes(bytes),
                " of pinned host memory at once: a slab has at most ",
                format_bytes(kPageCountMax * page_bytes_), "; ask for less");
}

}  // namespace

Result<std::unique_ptr<PinnedPool>> PinnedPool::create(Backend& backend, const PinnedPoolOptions& options) {
  if (options.slab_bytes == 0) {
    return invalid_argument(
        "cannot make a pool of pinned memory with slab_bytes 0; give the most to take from the "
        "system at once");
  }
  const auto page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return std::unique_ptr<PinnedPool>(new SlabPinnedPool(backend, options, page_bytes));
}

}  // namespace forebay
