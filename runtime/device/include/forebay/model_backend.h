// ModelBackend: a device that keeps books and no bytes, for planning and replay. It refuses, charges and
// orders as the other backends do, but an address is only a number: a copy moves nothing and a kernel does
// not run. So a device of many terabytes fits into any machine, and a call costs a fraction of a microsecond.
//
// Time. Without ModelBackendOptions::timing nothing takes time: queued work runs in the call that queues it.
// With it, the backend is a discrete-event simulation of one device on a virtual clock: every copy, fill and
// work() takes the time that the timing gives it, streams overlap, and work on the same resource shares it.
// Virtual time passes only in calls in which the host waits or spends time. It runs on the calling threads,
// without threads of its own, so the same calls give the same times to the last digit.
//
// Addresses are 49-bit numbers above the addresses of any process, as on current GPUs: dereferencing one
// crashes at once.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "forebay/backend.h"
#include "forebay/host_clock.h"

namespace forebay {

// Virtual time comes to its end after 31 years: from then on nothing takes time. A simulation that comes here
// has figures that no machine has.
inline constexpr std::chrono::nanoseconds kModelTimeEnd{1'000'000'000'000'000'000};

// A resource that work shares, such as the multiprocessors of a device or one direction of a bus. The timing
// numbers its resources from zero.
inline constexpr int kModelResourcesMax = 16;

// One part of some work: the seconds that it takes if it has the resource to itself. If n parts use one
// resource at the same time, each of them goes at 1/n of that speed.
struct ModelWorkPart {
  int resource = 0;
  double seconds = 0;
};

// Work that takes virtual time: first the delay, which uses no resource, then all parts at the same time. It
// ends with its last part.
struct ModelWork {
  const char* name = "";  // Static storage. Accounts of time go by it.
  double delay_seconds = 0;
  std::array<ModelWorkPart, 4> parts{};
  std::size_t part_count = 0;

  void add(int resource, double seconds) { parts[part_count++] = {resource, seconds}; }
};

enum class ModelCopy : std::uint8_t { kToDevice, kToHost, kOnDevice, kOnHost };

// The time that work of a model backend takes.
// Threads: those that call the backend.
class ModelTiming {
 public:
  virtual ~ModelTiming() = default;
  virtual ModelWork copy(ModelCopy kind, std::uint64_t bytes) const = 0;
  virtual ModelWork fill(std::uint64_t bytes) const = 0;
  // A kernel that reads and writes `bytes` in all and computes little, such as those of Kernels. `name` has
  // static storage.
  virtual ModelWork kernel(const char* name, std::uint64_t bytes) const = 0;
  // A kernel that is the product of an m x k and a k x n matrix in fp32, `count` times, without tensor cores.
  virtual ModelWork fp32_products(const char* name, double m, double n, double k, double count) const = 0;
  // The host's time to queue one kernel, copy or fill.
  virtual std::chrono::nanoseconds queue_time() const { return std::chrono::nanoseconds(0); }
};

// The time that a watched stream spent in one way.
struct ModelStreamTime {
  std::string name;  // The work's name; "host" while neither the stream nor the host waited for work.
  bool own = false;  // The stream's own work. Otherwise the stream, or the host that feeds it, waited for it.
  std::chrono::nanoseconds time{0};
};

// A moment in virtual time that another thread on the same clock announces, such as the arrival of a message.
// Threads: any.
class ModelSignal {
 public:
  explicit ModelSignal(HostClock& clock) : clock_(clock) {}
  // Work that waits for it goes on. Requires: the calling thread does not hold the clock's mutex.
  void announce();
  bool is_announced() const noexcept { return announced_.load(std::memory_order_acquire); }

 private:
  HostClock& clock_;
  std::atomic<bool> announced_{false};  // Changes with the clock's mutex held.
};

struct ModelBackendOptions {
  std::string name = "model";                       // Appears in messages.
  std::size_t memory_bytes = std::size_t{1} << 40;  // The device budget.
  std::size_t granularity = 2u << 20;               // Bytes; a power of two of at least 512.
  std::size_t queue_limit = 4096;  // Operations kept on one stream; queueing more runs the oldest first.
  // Null: nothing takes time. Otherwise one thread at a time calls the backend, and `clock` is a virtual
  // clock. Several backends may share the clock, each on a registered thread of its own. Neither is owned;
  // both outlive the backend.
  const ModelTiming* timing = nullptr;
  HostClock* clock = nullptr;
};

class ModelBackend : public Backend {
 public:
  // Errors: kInvalidArgument (granularity, queue_limit, more memory than there are addresses, a timing
  // without a virtual clock).
  static Result<std::unique_ptr<ModelBackend>> create(ModelBackendOptions options);

  // Bytes charged against the budget, now and at most so far.
  virtual std::size_t charged_bytes() const = 0;
  virtual std::size_t peak_charged_bytes() const = 0;
  // Handles not yet given back; 0 when nothing leaks.
  virtual std::size_t live_handle_count() const = 0;

  // --- virtual time; these require a timing ---

  const ModelTiming* timing() const noexcept { return timing_; }
  // Queues work that takes its time and does nothing else: a kernel, or a transfer over a network.
  virtual Status work(const ModelWork& work, Stream stream) = 0;
  // The stream waits for the signal. `name` has static storage.
  virtual Status wait_for(std::shared_ptr<const ModelSignal> signal, const char* name, Stream stream) = 0;
  // The caller takes this time: in a host function, its stream; otherwise the host's thread, while streams go
  // on.
  virtual void spend(const ModelWork& work) = 0;
  // The same, until `time` has come.
  virtual void spend_until(std::chrono::nanoseconds time, const char* name) = 0;
  // Virtual time. In a host function: when it began, and the time that it has spent since, if it had the
  // resources to itself.
  virtual std::chrono::nanoseconds now() const = 0;
  // Accounts for every nanosecond of this stream from now on. One stream at a time.
  virtual void watch(Stream stream) = 0;
  // The account since watch(). The times add up to all of the time since then.
  virtual std::vector<ModelStreamTime> watched() const = 0;
  // The seconds in which each resource was in use, by its number, since watch().
  virtual std::array<double, kModelResourcesMax> busy_seconds() const = 0;

 protected:
  const ModelTiming* timing_ = nullptr;
};

}  // namespace forebay
