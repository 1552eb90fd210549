#include "forebay/staging_buffers.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "forebay/check.h"
#include "forebay/log.h"
#include "forebay/units.h"

namespace forebay {
namespace {

using Clock = std::chrono::steady_clock;

class PooledBuffers final : public StagingBuffers {
 public:
  PooledBuffers(PinnedPool& pool, std::byte* memory, const StagingBuffersOptions& options)
      : pool_(pool), memory_(memory), options_(options) {
    free_.reserve(options.buffer_count);
    // The first is handed out first.
    for (std::size_t i = options.buffer_count; i-- > 0;) free_.push_back(memory + i * options.buffer_bytes);
  }

  ~PooledBuffers() override {
    FOREBAY_CHECK(free_.size() == options_.buffer_count, "%zu staging buffers were not given back",
                  options_.buffer_count - free_.size());
    if (const Status status = pool_.free(memory_, Stream()); !status.ok()) {
      log(LogLevel::kWarning, "staging buffers stay pinned: %s", status.message().c_str());
    }
  }

  std::optional<StagingBuffer> try_take() override {
    const std::lock_guard lock(mutex_);
    if (free_.empty() || !waiting_.empty()) {
      ++statistics_.refused_count;
      return std::nullopt;
    }
    return take_locked();
  }

  Result<StagingBuffer> take(std::chrono::milliseconds deadline) override {
    std::unique_lock lock(mutex_);
    if (!free_.empty() && waiting_.empty()) return take_locked();
    ++statistics_.wait_count;
    const Clock::time_point begin = Clock::now();
    const auto longest =
        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::time_point::max() - begin);
    const Clock::time_point end = deadline < longest ? begin + deadline : Clock::time_point::max();
    Waiting me;
    waiting_.push_back(&me);
    const bool served =
        me.woken.wait_until(lock, end, [&] { return !free_.empty() && waiting_.front() == &me; });
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &me));
    statistics_.wait_ns += static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count());
    if (!served) {
      return Status(StatusCode::kTimeout,
                    "no staging buffer within " + std::to_string(deadline.count()) + " ms: all " +
                        std::to_string(options_.buffer_count) + " of " + format_bytes(options_.buffer_bytes) +
                        " are taken; see whether the drive still answers, or make more of them");
    }
    StagingBuffer taken = take_locked();
    wake_first();
    return taken;
  }

  Span<std::byte> memory() const noexcept override {
    return {memory_, options_.buffer_bytes * options_.buffer_count};
  }
  const StagingBuffersOptions& options() const noexcept override { return options_; }
  StagingBuffersStatistics statistics() const override {
    const std::lock_guard lock(mutex_);
    return statistics_;
  }

 private:
  struct Waiting {
    std::condition_variable woken;
  };

  // mutex_ is held, and there is one.
  StagingBuffer take_locked() {
    std::byte* const data = free_.back();
    free_.pop_back();
    ++statistics_.take_count;
    ++statistics_.taken_count;
    statistics_.most_taken_count = std::max(statistics_.most_taken_count, statistics_.taken_count);
    return make_buffer(data, options_.buffer_bytes);
  }

  void wake_first() {
    if (!waiting_.empty() && !free_.empty()) waiting_.front()->woken.notify_one();
  }

  void give(std::byte* data) noexcept override {
    const std::lock_guard lock(mutex_);
    free_.push_back(data);  // Never more than there was room made for.
    --statistics_.taken_count;
    wake_first();
  }

  PinnedPool& pool_;
  std::byte* const memory_;
  const StagingBuffersOptions options_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<std::byte*> free_;   // The last is taken first: it is the warmest.
  std::vector<Waiting*> waiting_;  // In the order they came.
  StagingBuffersStatistics statistics_;
};

}  // namespace

StagingBuffer::StagingBuffer(StagingBuffer&& other) noexcept
    : owner_(std::exchange(other.owner_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

StagingBuffer& StagingBuffer::operator=(StagingBuffer&& other) noexcept {
  if (this != &other) {
    give();
    owner_ = std::exchange(other.owner_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

StagingBuffer::~StagingBuffer() {
  give();
}

void StagingBuffer::give() noexcept {
  if (owner_ == nullptr) return;
  owner_->give(data_);
  owner_ = nullptr;
  data_ = nullptr;
  bytes_ = 0;
}

Result<std::unique_ptr<StagingBuffers>> StagingBuffers::create(PinnedPool& pool,
                                                               const StagingBuffersOptions& options) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto refuse = [&](const std::string& why) {
    return Status(StatusCode::kInvalidArgument, "cannot make " + std::to_string(options.buffer_count) +
                                                    " staging buffers of " +
                                                    std::to_string(options.buffer_bytes) + " bytes: " + why);
  };
  if (options.buffer_count == 0) return refuse("there must be at least one");
  if (options.buffer_bytes == 0 || options.buffer_bytes % page != 0) {
    return refuse("the size must be a multiple of the page, " + std::to_string(page) + " bytes");
  }
  if (options.buffer_bytes > SIZE_MAX / options.buffer_count)
    return refuse("that is more than any memory has");
  auto memory = pool.allocate(options.buffer_bytes * options.buffer_count);
  if (!memory.ok()) {
    return memory.status().with_context("cannot make " + std::to_string(options.buffer_count) +
                                        " staging buffers of " + format_bytes(options.buffer_bytes));
  }
  return std::unique_ptr<StagingBuffers>(std::make_unique<PooledBuffers>(pool, memory.value(), options));
}

}  // namespace forebay
