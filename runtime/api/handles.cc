#include "runtime/api/handles.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <new>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <vector>

#include "forebay/text.h"
#include "runtime/api/words.h"

namespace forebay::api {
namespace {

// A handle: an address that no process has, so that reading it stops the program at once.
constexpr std::uint64_t kMark = 0xFBull << 56;
constexpr int kGenerationBits = 28;
constexpr int kIndexBits = 20;
constexpr std::uint64_t kGenerationMask = (1ull << kGenerationBits) - 1;
constexpr std::uint64_t kIndexMask = (1ull << kIndexBits) - 1;
static_assert(sizeof(void*) == sizeof(std::uint64_t), "handles need 64 bits");

// The state of a record: bits 0 to 22 count the owner and the calls, then busy, the kind, the generation,
// closed.
constexpr std::uint64_t kBusy = 1ull << 23;
constexpr std::uint64_t kReferences = kBusy - 1;
constexpr int kKindShift = 24;
constexpr int kGenerationShift = 32;
constexpr std::uint64_t kClosed = 1ull << 60;

struct Record {
  std::atomic<std::uint64_t> state{0};
  std::shared_ptr<Object> object;
};

constexpr std::size_t kRowSize = 1024;
using Row = std::array<Record, kRowSize>;
std::array<std::atomic<Row*>, (1u << kIndexBits) / kRowSize> rows;

struct Free {
  std::mutex mutex;
  std::vector<std::uint32_t> indices;
  std::uint32_t made = 0;
};

// Records below this one are of the process that forked this one.
std::atomic<std::uint32_t> inherited{0};

// Never destroyed: handles may be closed while the process ends.
Free& free_records() {
  static Free* const free = [] {
    pthread_atfork([] { free_records().mutex.lock(); }, [] { free_records().mutex.unlock(); },
                   [] {
                     Free& of_parent = free_records();
                     of_parent.indices.clear();
                     inherited.store(of_parent.made, std::memory_order_relaxed);
                     of_parent.mutex.unlock();
                   });
    return new Free;
  }();
  return *free;
}

struct Name {
  std::uint64_t generation;
  std::uint32_t index;
  Kind kind;
};

void* encode(const Name& name) {
  return reinterpret_cast<void*>(kMark | name.generation << 28 | std::uint64_t{name.index} << 8 |
                                 static_cast<std::uint64_t>(name.kind));
}

Name decode(const void* handle) {
  const auto value = reinterpret_cast<std::uint64_t>(handle);
  return {value >> 28 & kGenerationMask, static_cast<std::uint32_t>(value >> 8 & kIndexMask),
          static_cast<Kind>(value & 0xFF)};
}

// fork() copies no threads: these objects would wait for threads that are not there. The others are plain
// data.
bool needs_other_process(const Name& name) {
  return name.index < inherited.load(std::memory_order_relaxed) && name.kind != Kind::kOptions &&
         name.kind != Kind::kTimeline;
}

// Null for a number that was never a handle.
Record* find_record(const void* handle) {
  if ((reinterpret_cast<std::uint64_t>(handle) & (0xFFull << 56)) != kMark) return nullptr;
  const std::uint32_t index = decode(handle).index;
  Row* const row = rows[index / kRowSize].load(std::memory_order_acquire);
  return row == nullptr ? nullptr : &(*row)[index % kRowSize];
}

std::uint64_t identity(const Name& name) {
  return name.generation << kGenerationShift | static_cast<std::uint64_t>(name.kind) << kKindShift;
}
constexpr std::uint64_t kIdentity = kGenerationMask << kGenerationShift | 0xFFull << kKindShift | kClosed;

// The last holder ends the object and makes the record free.
void drop(Record& record, std::uint32_t index, std::uint64_t amount) noexcept {
  const std::uint64_t before = record.state.fetch_sub(amount, std::memory_order_acq_rel);
  if ((before & kReferences) != 1) return;
  record.object.reset();
  Free& free = free_records();
  const std::lock_guard lock(free.mutex);
  if (index >= inherited.load(std::memory_order_relaxed)) free.indices.push_back(index);
}

struct Misuse : std::exception {
  explicit Misuse(std::string text) : message(std::move(text)) {}
  const char* what() const noexcept override { return message.c_str(); }
  std::string message;
};

thread_local std::string last_error;

void set_last_error(const char* function, const char* text) noexcept {
  try {
    const std::string message = function == nullptr ? text : std::string(function) + ": " + text;
    last_error.clear();
    // The names of units and parameters are in messages. Line by line: some messages have several lines.
    for (std::size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
      end = message.find('\n', begin);
      if (begin > 0) last_error += '\n';
      last_error += shown_text(std::string_view(message).substr(begin, end - begin));
    }
  } catch (...) {
    last_error.clear();
  }
}

}  // namespace

const char* Object::give(std::string text) {
  const std::lock_guard lock(mutex_);
  text_ = std::move(text);
  return text_.c_str();
}

void misuse(const std::string& message) {
  throw Misuse(message);
}

void refuse_null(const char* names, std::initializer_list<const void*> pointers) {
  std::string_view rest = names;
  const auto* pointer = pointers.begin();
  for (; *pointer != nullptr; ++pointer) rest.remove_prefix(rest.find(',') + 2);
  misuse(std::string(rest.substr(0, rest.find(','))) + " is null; give an address");
}

namespace internal {

void* insert(std::shared_ptr<Object> object, Kind kind) {
  Free& free = free_records();
  std::uint32_t index = 0;
  {
    const std::lock_guard lock(free.mutex);
    if (!free.indices.empty()) {
      index = free.indices.back();
      free.indices.pop_back();
    } else {
      if (free.made > kIndexMask)
        throw Error(StatusCode::kUnavailable, "there are 1048576 handles; destroy those that are not used");
      index = free.made;
      if (index % kRowSize == 0) rows[index / kRowSize].store(new Row, std::memory_order_release);
      ++free.made;
      free.indices.reserve(free.made);  // So that drop() never fails.
    }
  }
  Record& record = (*rows[index / kRowSize].load(std::memory_order_acquire))[index % kRowSize];
  const std::uint64_t old =
      record.state.load(std::memory_order_relaxed) >> kGenerationShift & kGenerationMask;
  const Name name{(old + 1) & kGenerationMask, index, kind};
  record.object = std::move(object);
  record.state.store(identity(name) | 1, std::memory_order_release);
  return encode(name);
}

Object* claim(void* handle, Kind kind, Claim claim, const char* what) {
  if (handle == nullptr) misuse(std::string(what) + " is null; give a handle that was made before");
  Record* const record = find_record(handle);
  const Name name = decode(handle);
  if (record == nullptr)
    misuse(std::string(what) + " is not a handle of this library; give one that it made");
  if (name.kind != kind)
    misuse(std::string(what) + " is a handle of another kind; give a handle of this kind");
  if (needs_other_process(name))
    misuse(std::string(what) + " was made before fork(), by another process; make one in this process");
  const std::uint64_t busy = claim == Claim::kExclusive ? kBusy : 0;
  std::uint64_t state = record->state.load(std::memory_order_acquire);
  do {
    if ((state & kIdentity) != identity(name) || (state & kReferences) == 0)
      misuse(std::string(what) + " was destroyed; give a handle that lives");
    if ((state & busy) != 0)
      misuse(std::string(what) +
             " is in another call, of another thread or of a function that it called; use "
             "a handle in one call at a time");
  } while (!record->state.compare_exchange_weak(state, (state + 1) | busy, std::memory_order_acquire));
  return record->object.get();
}

std::shared_ptr<Object> shared(void* handle) {
  return find_record(handle)->object;
}

void unclaim(void* handle, Claim claim) noexcept {
  drop(*find_record(handle), decode(handle).index, claim == Claim::kExclusive ? kBusy + 1 : 1);
}

void close(void* handle, Kind kind, const char* function) noexcept {
  const NotCancelled not_cancelled;
  if (handle == nullptr) return;
  Record* const record = find_record(handle);
  const Name name = decode(handle);
  if (record == nullptr || name.kind != kind || needs_other_process(name)) {
    set_last_error(
        function,
        "the handle is of another kind, of another library, or was made before fork(); nothing was "
        "destroyed");
    return;
  }
  std::uint64_t state = record->state.load(std::memory_order_acquire);
  do {
    if ((state & kIdentity) != identity(name)) {
      set_last_error(function, "the handle was destroyed before; nothing was destroyed");
      return;
    }
  } while (!record->state.compare_exchange_weak(state, state | kClosed, std::memory_order_acq_rel));
  drop(*record, name.index, 1);
}

std::int32_t fail(const char* function, std::exception_ptr error) noexcept {
  const auto failed = [](const char* name, const char* text, StatusCode code) {
    set_last_error(name, text);
    return static_cast<std::int32_t>(code);
  };
  try {
    std::rethrow_exception(std::move(error));
  } catch (const Misuse& found) {
    return failed(function, found.what(), StatusCode::kInvalidArgument);
  } catch (const Error& found) {
    return failed(nullptr, in_words_of_c(found.status().message(), function).c_str(), found.code());
  } catch (const std::bad_alloc&) {
    return failed(function, "the host has no memory for it; free some", StatusCode::kOutOfMemory);
  } catch (const std::length_error&) {
    return failed(function, "a size is larger than any memory; give a smaller one", StatusCode::kOutOfMemory);
  } catch (const std::system_error& found) {
    if (found.code() != std::errc::resource_unavailable_try_again)
      return failed(function, found.what(), StatusCode::kInternal);
    return failed(  // A thread cannot be made.
        function,
        (found.what() + std::string("; the process may have too many threads (ulimit -u) or too few "
                                    "addresses (ulimit -v)"))
            .c_str(),
        StatusCode::kUnavailable);
  } catch (const std::exception& found) {
    return failed(function, found.what(), StatusCode::kInternal);
  } catch (...) {
    return failed(function, "an unknown exception was thrown", StatusCode::kInternal);
  }
}

}  // namespace internal
}  // namespace forebay::api

extern "C" const char* forebay_last_error() {
  return forebay::api::last_error.c_str();
}
