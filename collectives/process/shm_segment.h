// The memory that the ranks of a shm communicator share: its layout, and the system calls around it, which
// make an anonymous file and a bell to sleep at.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/fingerprint.h"
#include "collectives/process/process_identity.h"
#include "collectives/wait_graph.h"
#include "forebay/communicator.h"
#include "forebay/descriptor.h"
#include "forebay/shm_communicator.h"
#include "forebay/status.h"

namespace forebay::internal {

// A word in shared memory at which one thread sleeps and that any process rings.
struct alignas(64) Bell {
  std::atomic<std::uint32_t> rings{0};
  std::atomic<std::uint32_t> sleeping{0};

  void ring() noexcept;
  // Returns after a ring that is not counted in `heard`, at `limit`, or spuriously.
  void sleep(std::uint32_t heard, std::chrono::steady_clock::time_point limit) noexcept;
};

enum ShmPlane : int { kShmDataPlane, kShmControlPlane, kShmPlaneCount };

// The progress of one rank on one plane. That rank writes, all ranks read. A count is published after the
// data that it counts.
struct ShmPlaneState {
  // Collectives announced. The fingerprint of the n-th is fingerprints[n % 2]: a rank that announces the next
  // but one knows that all ranks have read this one.
  alignas(64) std::atomic<std::uint64_t> announced{0};
  Fingerprint fingerprints[2];
  alignas(64) std::atomic<std::uint64_t> written{0};  // Rounds that this rank has written into its slots.
  alignas(64) std::atomic<std::uint64_t> read{0};     // Rounds that this rank has taken from every peer.
  Bell bell;                                          // Rung for this rank.
};

// The message that one rank is sending, one at a time.
struct ShmMessage {
  // The number of the message in the upper 48 bits; in the lower 16 the receiver plus 1 while it is open, 0
  // after. The sender opens it, the receiver closes it. While it is open the other fields do not change, and
  // the receiver reads them.
  alignas(64) std::atomic<std::uint64_t> open{0};
  std::uint64_t bytes = 0;
  std::uint32_t tag = 0;
  alignas(64) std::atomic<std::uint64_t> written{0};  // Pieces.
  alignas(64) std::atomic<std::uint64_t> taken{0};
};

// The last vote of one rank, which writes it. A rank that has to know the final vote closes the ballot first.
class ShmBallot {
 public:
  // False when the ballot is closed.
  bool cast(std::uint64_t step, std::span<const std::byte> decision) noexcept;
  // Takes no further vote. Returns the decision if the last vote was for `step`.
  std::optional<std::vector<std::byte>> close(std::uint64_t step);

 private:
  static constexpr std::uint64_t kClosed = 1;
  struct Paper {
    std::uint32_t bytes = 0;
    std::byte decision[kDecisionBytesMax];
  };

  // 0: none yet. Else twice the step's successor; and kClosed.
  alignas(64) std::atomic<std::uint64_t> state_{0};
  Paper papers_[2];  // By step % 2: the last vote can be read while the next is written.
};

// A wait of one thread of a rank, shown to the other ranks (wait_graph.h). One thread of the rank writes, all
// ranks read. A reader that finds `version` odd or changed has read nothing.
struct ShmWait {
  static constexpr std::size_t kTextMax = 176;  // A longer description is shortened.
  static constexpr std::size_t kTextWords = kTextMax / sizeof(std::uint64_t);
  static constexpr std::size_t kRankWords = kShmRanksMax / 64;

  // On the steady clock, in ns: when the thread last reported that it waits; 0: the place is free.
  std::atomic<std::int64_t> beat{0};
  std::atomic<std::uint64_t> version{0};
  // Written between two changes of `version`.
  std::atomic<std::int64_t> begin{0};
  std::atomic<std::uint64_t> came{0};
  std::atomic<std::uint64_t> ranks[kRankWords] = {};  // A bit for each rank that is waited for.
  std::atomic<std::uint64_t> text[kTextWords] = {};   // Zeros after its end.
};

// When more threads of a rank wait at once, the others are not shown.
inline constexpr std::size_t kShmWaitCount = 8;

enum class ShmPresence : std::uint32_t { kAbsent, kJoined, kLeft };

struct ShmRank {
  std::atomic<ShmPresence> presence{ShmPresence::kAbsent};
  ProcessIdentity process;  // Written before the rank joins.
  ShmPlaneState planes[kShmPlaneCount];
  ShmMessage message;
  ShmBallot ballot;
  ShmWait waits[kShmWaitCount];  // Used in the segment of all ranks, for operations of groups too.
};

// The first failure of all ranks.
struct ShmFailure {
  static constexpr std::size_t kTextMax = 3072;  // A longer message is shortened.
  static constexpr std::uint32_t kNone = 0;
  static constexpr std::uint32_t kThere = 1;
  static constexpr std::uint32_t kWriting = 2;  // Plus the rank that writes it.

  std::atomic<std::uint32_t> state{kNone};
  std::uint32_t bytes = 0;
  char text[kTextMax];
};

// Shows the other ranks the wait of one thread of `rank`, until destroyed.
class ShmWaitSign {
 public:
  // `begin`: when the wait began. Nothing is shown before the first say().
  ShmWaitSign(ShmRank& rank, std::chrono::steady_clock::time_point begin) : rank_(rank), begin_(begin) {}
  ~ShmWaitSign();
  ShmWaitSign(const ShmWaitSign&) = delete;
  ShmWaitSign& operator=(const ShmWaitSign&) = delete;

  void say(const Wait& wait) noexcept;

 private:
  ShmRank& rank_;
  const std::chrono::steady_clock::time_point begin_;
  ShmWait* place_ = nullptr;
};

// The waits that threads of `rank` have reported within the last `validity`, the oldest first.
std::vector<Wait> read_waits(const ShmRank& rank, std::chrono::nanoseconds validity);

// How often a rank looks whether its peers' processes still run. Shorter: it reads /proc more often. Longer:
// a killed rank is named later.
inline constexpr std::chrono::milliseconds kShmLivenessPeriod{100};

// The shared memory of a communicator of `size` ranks, for all of them together.
std::size_t shm_segment_bytes(int size) noexcept;

class ShmSegment {
 public:
  static constexpr std::size_t kSlotCount = 4;  // For each rank and plane.
  static constexpr std::size_t slot_bytes(ShmPlane plane) noexcept {
    return plane == kShmDataPlane ? std::size_t{512} << 10 : std::size_t{8} << 10;
  }

  // `generation` names the communicator, so that a rank that opens the memory of another one notices.
  // Errors: kOutOfMemory, kIoError.
  static Result<std::unique_ptr<ShmSegment>> create(int size, const std::string& generation);
  // Opens the memory that the process `owner` created and holds as `descriptor`. Errors: kPeerLost when that
  // process has ended; kUnsupported when the system does not permit it; kCorruption when create() did not
  // make it with these arguments.
  static Result<std::unique_ptr<ShmSegment>> open(const ProcessIdentity& owner, int descriptor, int size,
                                                  const std::string& generation);
  ~ShmSegment();
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  // For the other ranks to open; -1 once closed.
  int descriptor() const noexcept { return file_.number(); }
  // Called once all ranks have opened it.
  void close_descriptor() noexcept { file_.reset(); }

  ShmFailure& failure() noexcept;
  ShmRank& rank(int rank) noexcept;
  std::byte* slot(ShmPlane plane, int rank, std::uint64_t round) noexcept;
  // From a slot of one rank to that of the next.
  static constexpr std::size_t rank_stride(ShmPlane plane) noexcept { return kSlotCount * slot_bytes(plane); }

 private:
  ShmSegment(Descriptor file, std::byte* base, int size) : file_(std::move(file)), base_(base), size_(size) {}
  static Result<std::byte*> map(int descriptor, int size);

  Descriptor file_;
  std::byte* const base_;
  const int size_;
};

// How rank 0 tells the others where the memory is, as a text of the rendezvous store.
struct ShmAnnouncement {
  std::string host;  // As host_identity() gives it.
  ProcessIdentity owner;
  int descriptor = -1;
};

std::string encode(const ShmAnnouncement& announcement);
// Nothing for a text that encode() did not make.
std::optional<ShmAnnouncement> decode_shm_announcement(std::string_view text);

}  // namespace forebay::internal
