#include "collectives/process/shm_segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstring>
#include <ctime>
#include <new>
#include <system_error>

namespace forebay::internal {
namespace {

constexpr std::uint64_t kMagic = 0x3279616265726f66;  // "forebay2"; another layout needs another one.
constexpr std::size_t kGenerationMax = 255;

struct Header {
  std::uint64_t magic;
  std::uint64_t size;
  char generation[kGenerationMax + 1];
  ShmFailure failure;
};

constexpr std::size_t kHeaderBytes = 8192;
constexpr std::size_t kRankBytes = 4096;
static_assert(sizeof(Header) <= kHeaderBytes && sizeof(ShmRank) <= kRankBytes);
static_assert(kShmRanksMax < 1 << 16);
// Between processes an atomic must be plain memory.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free &&
              std::atomic<ShmPresence>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);
static_assert(std::chrono::steady_clock::period::den == std::nano::den, "the futex's clock is in ns");

std::string error_text() {
  return std::strerror(errno);
}

std::int64_t steady_now() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

bool ShmBallot::cast(std::uint64_t step, std::span<const std::byte> decision) noexcept {
  Paper& paper = papers_[step % 2];
  paper.bytes = static_cast<std::uint32_t>(decision.size());
  std::copy(decision.begin(), decision.end(), paper.decision);
  std::uint64_t before = state_.load(std::memory_order_relaxed);
  if ((before & kClosed) != 0) return false;
  return state_.compare_exchange_strong(before, (step + 1) << 1, std::memory_order_acq_rel);
}

std::optional<std::vector<std::byte>> ShmBallot::close(std::uint64_t step) {
  const std::uint64_t state = state_.fetch_or(kClosed, std::memory_order_acq_rel) & ~kClosed;
  if (state != (step + 1) << 1) return std::nullopt;
  const Paper& paper = papers_[step % 2];
  const std::size_t bytes = std::min<std::size_t>(paper.bytes, kDecisionBytesMax);
  return std::vector<std::byte>(paper.decision, paper.decision + bytes);
}

void ShmWaitSign::say(const Wait& wait) noexcept {
  const std::int64_t now = steady_now();
  for (ShmWait& free : rank_.waits) {
    if (place_ != nullptr) break;
    std::int64_t nobody = 0;
    if (free.beat.compare_exchange_strong(nobody, now, std::memory_order_acq_rel)) place_ = &free;
  }
  if (place_ == nullptr) return;
  place_->version.fetch_add(1, std::memory_order_acq_rel);
  // Each store releases, because ThreadSanitizer knows no fences: a reader that has read one of these then
  // reads the odd version, or a later one.
  place_->begin.store(std::chrono::nanoseconds(begin_.time_since_epoch()).count(), std::memory_order_release);
  place_->came.store(wait.came ? 1 : 0, std::memory_order_release);
  std::uint64_t ranks[ShmWait::kRankWords] = {};
  for (const int rank : wait.ranks) ranks[rank / 64] |= std::uint64_t{1} << (rank % 64);
  for (std::size_t i = 0; i < ShmWait::kRankWords; ++i)
    place_->ranks[i].store(ranks[i], std::memory_order_release);
  std::uint64_t text[ShmWait::kTextWords] = {};
  std::memcpy(text, wait.what.data(), std::min(wait.what.size(), ShmWait::kTextMax));
  for (std::size_t i = 0; i < ShmWait::kTextWords; ++i)
    place_->text[i].store(text[i], std::memory_order_release);
  place_->version.fetch_add(1, std::memory_order_release);
  place_->beat.store(now, std::memory_order_release);
}

ShmWaitSign::~ShmWaitSign() {
  if (place_ != nullptr) place_->beat.store(0, std::memory_order_release);
}

std::vector<Wait> read_waits(const ShmRank& rank, std::chrono::nanoseconds validity) {
  std::vector<Wait> waits;
  const std::int64_t now = steady_now();
  for (const ShmWait& place : rank.waits) {
    const std::int64_t beat = place.beat.load(std::memory_order_acquire);
    if (beat == 0 || now - beat > validity.count()) continue;
    const std::uint64_t version = place.version.load(std::memory_order_acquire);
    Wait wait;
    wait.came = place.came.load(std::memory_order_acquire) != 0;
    wait.age = std::chrono::nanoseconds(now - place.begin.load(std::memory_order_acquire));
    for (int r = 0; r < kShmRanksMax; ++r) {
      if ((place.ranks[r / 64].load(std::memory_order_acquire) >> (r % 64) & 1) != 0) wait.ranks.push_back(r);
    }
    char text[ShmWait::kTextMax + 1] = {};
    for (std::size_t i = 0; i < ShmWait::kTextWords; ++i) {
      const std::uint64_t word = place.text[i].load(std::memory_order_acquire);
      std::memcpy(text + i * sizeof(word), &word, sizeof(word));
    }
    wait.what = text;
    const bool whole = version % 2 == 0 && place.version.load(std::memory_order_acquire) == version;
    if (whole && !wait.ranks.empty()) waits.push_back(std::move(wait));
  }
  std::sort(waits.begin(), waits.end(), [](const Wait& a, const Wait& b) { return a.age > b.age; });
  return waits;
}

void Bell::ring() noexcept {
  // The waiter sets `sleeping`, then reads `rings`: one of the two sees the other.
  rings.fetch_add(1, std::memory_order_seq_cst);
  if (sleeping.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, &rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Bell::sleep(std::uint32_t heard, std::chrono::steady_clock::time_point limit) noexcept {
  sleeping.store(1, std::memory_order_seq_cst);
  if (rings.load(std::memory_order_seq_cst) == heard) {
    const auto since = std::max<std::int64_t>(std::chrono::nanoseconds(limit.time_since_epoch()).count(), 0);
    const timespec until{.tv_sec = since / 1'000'000'000, .tv_nsec = since % 1'000'000'000};
    // An absolute time on CLOCK_MONOTONIC; not private to this process.
    syscall(SYS_futex, &rings, FUTEX_WAIT_BITSET, heard, &until, nullptr, FUTEX_BITSET_MATCH_ANY);
  }
  sleeping.store(0, std::memory_order_relaxed);
}

Result<std::byte*> ShmSegment::map(int descriptor, int size) {
  void* base = mmap(nullptr, shm_segment_bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (base == MAP_FAILED) {
    return Status(StatusCode::kOutOfMemory, "cannot map ", shm_segment_bytes(size),
                  " bytes of shared memory: ", error_text(),
                  "; raise the limit of address space (ulimit -v)");
  }
  return static_cast<std::byte*>(base);
}

Result<std::unique_ptr<ShmSegment>> ShmSegment::create(int size, const std::string& generation) {
  const std::size_t bytes = shm_segment_bytes(size);
  Descriptor file(memfd_create("forebay-shm", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.valid()) {
    return Status(StatusCode::kIoError, "cannot make an anonymous file to share memory: ", error_text(),
                  "; raise the limit of open files (ulimit -n)");
  }
  // The space is taken now, so that a lack of it is an error here and not a signal later; the seals keep it.
  int error = ftruncate(file.number(), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  if (error == 0) error = posix_fallocate(file.number(), 0, static_cast<off_t>(bytes));
  if (error == 0 && fcntl(file.number(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    error = errno;
  if (error != 0) {
    return Status(StatusCode::kOutOfMemory, "cannot get ", bytes, " bytes of shared memory for ", size,
                  " ranks: ", std::strerror(error),
                  error == EFBIG ? "; raise the limit of a file's size (ulimit -f)"
                                 : "; free some memory, or start fewer ranks");
  }
  FOREBAY_ASSIGN_OR_RETURN(std::byte* const base, map(file.number(), size));
  std::unique_ptr<ShmSegment> segment(new ShmSegment(std::move(file), base, size));
  auto* header = new (base) Header{};
  header->size = static_cast<std::uint64_t>(size);
  generation.copy(header->generation, kGenerationMax);
  for (int r = 0; r < size; ++r) new (&segment->rank(r)) ShmRank{};
  // The others hear of the segment, through a text or another segment, after this.
  header->magic = kMagic;
  return segment;
}

Result<std::unique_ptr<ShmSegment>> ShmSegment::open(const ProcessIdentity& owner, int descriptor, int size,
                                                     const std::string& generation) {
  const std::string path = "/proc/" + std::to_string(owner.id) + "/fd/" + std::to_string(descriptor);
  Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file.valid()) {
    const std::string reason = error_text();
    if (!is_running(owner)) {
      return Status(StatusCode::kPeerLost, "process ", owner.id,
                    ", which owned the memory to share, has ended; see why it ended");
    }
    return Status(StatusCode::kUnsupported, "cannot open ", path, ", the memory to share: ", reason,
                  "; run all ranks as one user with equal rights, or use another communicator");
  }
  struct stat facts {};
  const bool right_size = fstat(file.number(), &facts) == 0 && S_ISREG(facts.st_mode) &&
                          static_cast<std::size_t>(facts.st_size) == shm_segment_bytes(size);
  const Status wrong(StatusCode::kCorruption, path,
                     " is not the shared memory of this run; start all ranks with one build of forebay, "
                     "and give every run a store directory of its own");
  if (!right_size) return wrong;
  FOREBAY_ASSIGN_OR_RETURN(std::byte* const base, map(file.number(), size));
  std::unique_ptr<ShmSegment> segment(new ShmSegment(std::move(file), base, size));
  const auto* header = reinterpret_cast<const Header*>(base);
  if (header->magic != kMagic || header->size != static_cast<std::uint64_t>(size) ||
      generation.substr(0, kGenerationMax) !=
          std::string_view(header->generation, strnlen(header->generation, kGenerationMax))) {
    return wrong;
  }
  return segment;
}

ShmSegment::~ShmSegment() {
  munmap(base_, shm_segment_bytes(size_));
}

ShmFailure& ShmSegment::failure() noexcept {
  return reinterpret_cast<Header*>(base_)->failure;
}

ShmRank& ShmSegment::rank(int rank) noexcept {
  return *reinterpret_cast<ShmRank*>(base_ + kHeaderBytes + static_cast<std::size_t>(rank) * kRankBytes);
}

std::byte* ShmSegment::slot(ShmPlane plane, int rank, std::uint64_t round) noexcept {
  const auto ranks = static_cast<std::size_t>(size_);
  std::byte* slots = base_ + kHeaderBytes + ranks * kRankBytes;
  if (plane == kShmControlPlane) slots += ranks * rank_stride(kShmDataPlane);
  return slots + static_cast<std::size_t>(rank) * rank_stride(plane) +
         (round % kSlotCount) * slot_bytes(plane);
}

std::size_t shm_segment_bytes(int size) noexcept {
  const std::size_t per_rank =
      kRankBytes + ShmSegment::rank_stride(kShmDataPlane) + ShmSegment::rank_stride(kShmControlPlane);
  return kHeaderBytes + static_cast<std::size_t>(size) * per_rank;
}

namespace {

// A number and the character after it, off the front of `text`.
template <typename Number>
bool take(std::string_view* text, Number* number, char after) {
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), *number);
  if (error != std::errc() || end == text->data() + text->size() || *end != after) return false;
  text->remove_prefix(static_cast<std::size_t>(end - text->data()) + 1);
  return true;
}

}  // namespace

std::string encode(const ShmAnnouncement& announcement) {
  return announcement.host + "\n" + std::to_string(announcement.owner.id) + " " +
         std::to_string(announcement.owner.start_time) + " " + std::to_string(announcement.descriptor) + "\n";
}

std::optional<ShmAnnouncement> decode_shm_announcement(std::string_view text) {
  const std::size_t end = text.find('\n');
  if (end == std::string_view::npos) return std::nullopt;
  ShmAnnouncement announcement{.host = std::string(text.substr(0, end)), .owner = {}, .descriptor = -1};
  text.remove_prefix(end + 1);
  const bool whole = take(&text, &announcement.owner.id, ' ') &&
                     take(&text, &announcement.owner.start_time, ' ') &&
                     take(&text, &announcement.descriptor, '\n') && text.empty();
  // encode() never makes numbers that no process and no descriptor can have.
  if (!whole || announcement.owner.id <= 0 || announcement.descriptor < 0) return std::nullopt;
  return announcement;
}

}  // namespace forebay::internal
