#include "forebay/thread_binding.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "forebay/log.h"
#include "forebay/topology.h"
#include "runtime/topology/processor_mask.h"

namespace forebay {
namespace internal {
namespace {

constexpr std::size_t kBits = 8 * sizeof(unsigned long);

// Far more processors than there are anywhere; a number beyond is a defect and not a machine.
constexpr std::size_t kMaskWordsMax = 1 << 12;

cpu_set_t* as_set(ProcessorMask& mask) {
  return reinterpret_cast<cpu_set_t*>(mask.data());
}

}  // namespace

ProcessorMask read_processor_mask() {
  // The system refuses a mask that is shorter than its own.
  for (std::size_t words = 16; words <= kMaskWordsMax; words *= 2) {
    ProcessorMask mask(words, 0);
    if (::sched_getaffinity(0, words * sizeof(unsigned long), as_set(mask)) == 0) return mask;
    if (errno != EINVAL) break;
  }
  return {};
}

bool write_processor_mask(const ProcessorMask& mask) {
  ProcessorMask copy = mask;  // The call's set is const; the type of its words is not.
  return ::sched_setaffinity(0, copy.size() * sizeof(unsigned long), as_set(copy)) == 0;
}

ProcessorMask make_processor_mask(std::span<const int> processors) {
  ProcessorMask mask;
  for (const int processor : processors) {
    const auto word = static_cast<std::size_t>(processor) / kBits;
    if (word >= kMaskWordsMax) continue;
    if (word >= mask.size()) mask.resize(word + 1, 0);
    mask[word] |= 1ul << (static_cast<std::size_t>(processor) % kBits);
  }
  return mask;
}

std::vector<int> processors_of(const ProcessorMask& mask) {
  std::vector<int> processors;
  for (std::size_t bit = 0; bit < mask.size() * kBits; ++bit) {
    if ((mask[bit / kBits] >> (bit % kBits) & 1) != 0) processors.push_back(static_cast<int>(bit));
  }
  return processors;
}

}  // namespace internal

Result<ThreadBinding> ThreadBinding::create(Span<const int> processors) {
  if (processors.empty()) {
    return Status(StatusCode::kInvalidArgument,
                  "cannot keep a thread to processors: none is named; name at least one");
  }
  if (*std::min_element(processors.begin(), processors.end()) < 0) {
    return Status(StatusCode::kInvalidArgument,
                  "cannot keep a thread to processors: one has a negative number; they are counted from 0");
  }
  internal::ProcessorMask previous = internal::read_processor_mask();
  if (previous.empty() || !internal::write_processor_mask(internal::make_processor_mask(processors))) {
    const int error = errno;
    return Status(StatusCode::kUnsupported, "cannot keep a thread to the processors " +
                                                processors_text(processors) + ": " + std::strerror(error) +
                                                "; see with 'taskset -p' which this process may use");
  }
  return ThreadBinding(std::move(previous));
}

ThreadBinding::ThreadBinding(ThreadBinding&& other) noexcept
    : previous_(std::exchange(other.previous_, {})) {}

ThreadBinding::~ThreadBinding() {
  if (previous_.empty() || internal::write_processor_mask(previous_)) return;
  static std::atomic<bool> said = false;
  if (!said.exchange(true)) {
    log(LogLevel::kWarning, "a thread stays on the processors it was bound to: %s", std::strerror(errno));
  }
}

std::vector<int> usable_processors_of_thread() {
  return internal::processors_of(internal::read_processor_mask());
}

}  // namespace forebay
