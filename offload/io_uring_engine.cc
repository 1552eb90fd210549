// The engine of io_uring. Each operation is handed to the kernel by itself, which drives answer better than
// to batches that the block layer merges into larger requests.
#include <liburing.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include "offload/io_engine.h"
#include "offload/say_once.h"
#include "offload/scratch_file.h"

namespace forebay {

bool has_io_uring() noexcept {
  return true;
}

namespace internal {
namespace {

// The kernel takes no larger piece of memory at once.
constexpr std::size_t kRegisteredPieceMax = std::size_t{1} << 30;
// Where registering is refused, halves are tried down to this. Smaller: pieces that no operation fits into.
constexpr std::size_t kRegisteredPieceMin = std::size_t{1} << 20;
// Pieces, each an entry of the kernel's table. Smaller: less memory under a low limit.
constexpr unsigned kRegisteredPiecesMax = 1024;
// Tries at handing an operation to a kernel that has no room for it at the moment.
constexpr int kSubmitTriesMax = 100;

struct Piece {
  std::byte* begin;
  std::size_t bytes;
};

class IoUringEngine final : public IoEngine {
 public:
  explicit IoUringEngine(std::vector<int> files) : files_(std::move(files)) {}
  ~IoUringEngine() override {
    if (made_) io_uring_queue_exit(&ring_);
  }

  Status start(unsigned depth, bool registered) {
    io_uring_params parameters{};
    const int error = -io_uring_queue_init_params(depth, &ring_, &parameters);
    if (error != 0) return refused(errno_text(error));
    made_ = true;
    // Kernel 5.11: waiting with a deadline beside a thread that submits.
    if ((parameters.features & IORING_FEAT_EXT_ARG) == 0) return refused("the kernel is older than 5.11");
    if (registered) {
      fixed_files_ =
          io_uring_register_files(&ring_, files_.data(), static_cast<unsigned>(files_.size())) == 0;
      fixed_memory_ = io_uring_register_buffers_sparse(&ring_, kRegisteredPiecesMax) == 0;
    }
    return {};
  }

  int submit(const IoRequest& request) override {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    if (entry == nullptr) return EBUSY;  // Full of entries that the kernel would not take.
    const int file = fixed_files_ ? static_cast<int>(request.file) : files_[request.file];
    const int piece = piece_of(request.memory, request.bytes);
    if (piece >= 0 && request.write) {
      io_uring_prep_write_fixed(entry, file, request.memory, request.bytes, request.offset, piece);
    } else if (piece >= 0) {
      io_uring_prep_read_fixed(entry, file, request.memory, request.bytes, request.offset, piece);
    } else if (request.write) {
      io_uring_prep_write(entry, file, request.memory, request.bytes, request.offset);
    } else {
      io_uring_prep_read(entry, file, request.memory, request.bytes, request.offset);
    }
    if (fixed_files_) entry->flags |= IOSQE_FIXED_FILE;
    entry->user_data = request.tag;
    int error = 0;
    for (int i = 0; i < kSubmitTriesMax; ++i) {
      error = std::max(0, -io_uring_submit(&ring_));
      if (io_uring_sq_ready(&ring_) == 0) return 0;
      if (error != 0 && error != EINTR && error != EAGAIN && error != EBUSY) break;
      std::this_thread::yield();
    }
    // The kernel has not taken the entry, but would at the next submit: it becomes one that does nothing.
    io_uring_prep_nop(entry);
    entry->user_data = kDropped;
    return error != 0 ? error : EAGAIN;
  }

  std::size_t reap(std::span<IoResult> results, std::chrono::nanoseconds timeout) override {
    std::size_t count = take(results);
    if (count > 0 || timeout.count() <= 0) return count;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
    __kernel_timespec limit{seconds.count(), (timeout - seconds).count()};
    io_uring_cqe* entry = nullptr;
    // After any answer (a result, the deadline, a signal) all results are taken, and the caller knows the
    // time.
    static_cast<void>(io_uring_wait_cqe_timeout(&ring_, &entry, &limit));
    return take(results);
  }

  std::uint64_t register_memory(std::byte* memory, std::size_t bytes) override {
    if (!fixed_memory_) return 0;
    std::uint64_t done = 0;
    std::size_t piece_bytes = kRegisteredPieceMax;
    int error = 0;
    while (done < bytes && pieces_.size() < kRegisteredPiecesMax) {
      const std::size_t size = std::min<std::size_t>(piece_bytes, bytes - done);
      const iovec vector{memory + done, size};
      const __u64 tag = 0;
      const auto index = static_cast<unsigned>(pieces_.size());
      const int result = io_uring_register_buffers_update_tag(&ring_, index, &vector, &tag, 1);
      if (result < 0) {
        error = -result;
        if (error != ENOMEM || size / 2 < kRegisteredPieceMin) break;
        piece_bytes = size / 2;
        continue;
      }
      pieces_.push_back({memory + done, size});
      done += size;
    }
    if (done < bytes) {
      say_once(
          "io_uring could not register all memory (" + (error != 0 ? errno_text(error) : "too many pieces") +
          "): the rest is looked up for each transfer; raising the limit on locked memory (ulimit -l) helps");
    }
    return done;
  }

  std::string description() const override { return "io_uring"; }

 private:
  // No operation of the store has this tag.
  static constexpr std::uint64_t kDropped = UINT64_MAX;

  static Status refused(const std::string& why) {
    return {StatusCode::kUnavailable, "cannot use io_uring: " + why +
                                          "; a container or kernel.io_uring_disabled may forbid it; the "
                                          "thread engine needs nothing of that"};
  }

  std::size_t take(std::span<IoResult> results) {
    std::size_t count = 0;
    io_uring_cqe* entry = nullptr;
    while (count < results.size() && io_uring_peek_cqe(&ring_, &entry) == 0 && entry != nullptr) {
      if (entry->user_data != kDropped) results[count++] = {entry->user_data, entry->res};
      io_uring_cqe_seen(&ring_, entry);
    }
    return count;
  }

  // The registered piece that the memory lies in, or -1.
  int piece_of(const std::byte* memory, std::size_t bytes) const {
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const Piece& piece = pieces_[i];
      if (memory >= piece.begin && bytes <= piece.bytes &&
          static_cast<std::size_t>(memory - piece.begin) <= piece.bytes - bytes) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  const std::vector<int> files_;
  io_uring ring_{};
  bool made_ = false;
  bool fixed_files_ = false;
  bool fixed_memory_ = false;
  std::vector<Piece> pieces_;
};

}  // namespace

Result<std::unique_ptr<IoEngine>> make_io_uring_engine(std::vector<int> files, unsigned depth,
                                                       bool registered) {
  auto engine = std::make_unique<IoUringEngine>(std::move(files));
  FOREBAY_RETURN_IF_ERROR(engine->start(depth, registered));
  return std::unique_ptr<IoEngine>(std::move(engine));
}

}  // namespace internal
}  // namespace forebay
