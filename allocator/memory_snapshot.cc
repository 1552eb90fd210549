#include "forebay/memory_snapshot.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <map>
#include <string_view>

#include "forebay/check.h"
#include "forebay/output_pipe.h"
#include "forebay/text.h"

namespace forebay {
namespace {

// Large enough that writing costs few system calls, small enough for the stack of any thread.
constexpr std::size_t kBufferBytes = 16u << 10;

// The indices of call stacks begin here; those of words, of which there are fewer, end before.
constexpr std::size_t kFirstStackIndex = 256;

constexpr std::string_view kActionWords[] = {
    "alloc",        "free_requested", "free_completed", "segment_alloc",
    "segment_free", "segment_map",    "segment_unmap",  "oom",
    "snapshot"};
constexpr std::string_view kStateWords[] = {"active_allocated", "active_pending_free", "inactive"};
static_assert(std::size(kActionWords) == static_cast<std::size_t>(SnapshotAction::kSnapshot) + 1);
static_assert(std::size(kStateWords) == static_cast<std::size_t>(SnapshotBlockState::kInactive) + 1);

std::string valid_utf8(std::string_view text) {
  std::string valid;
  while (!text.empty()) {
    std::uint32_t character = 0;
    const std::size_t length = utf8_length(text, &character);
    length == 0 ? valid += '?' : valid += text.substr(0, length);
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return valid;
}

// Writes the operations of a pickle, which build values on the reader's stack. After an error it writes
// nothing more.
class Pickle {
 public:
  Pickle(int file, std::size_t stack_count) : file_(file), stack_written_(stack_count) {
    byte(0x80);  // PROTO
    byte(2);
  }

  Status finish() {
    byte('.');  // STOP
    flush();
    return status_;
  }

  void begin_dict() { byte('}'); }  // EMPTY_DICT
  void set_item() { byte('s'); }    // SETITEM: the key and value on top into the dict below
  void begin_list() { byte(']'); }  // EMPTY_LIST
  void append() { byte('a'); }      // APPEND: the value on top to the list below

  void truth(bool value) { byte(value ? 0x88 : 0x89); }  // NEWTRUE, NEWFALSE

  void integer(std::int64_t value) {
    if (value >= 0) {
      number(static_cast<std::uint64_t>(value));
      return;
    }
    byte(0x8A);  // LONG1, two's complement
    byte(8);
    little_endian(static_cast<std::uint64_t>(value), 8);
  }

  void number(std::uint64_t value) {
    if (value < 0x100) {
      byte('K');  // BININT1
      little_endian(value, 1);
    } else if (value < 0x10000) {
      byte('M');  // BININT2
      little_endian(value, 2);
    } else if (value < 0x80000000u) {
      byte('J');  // BININT
      little_endian(value, 4);
    } else {
      // A leading zero bit says that the number is not negative.
      std::size_t bytes = 4;
      while (bytes < 8 && value >> (8 * bytes - 1) != 0) ++bytes;
      if (value >> 63 != 0) bytes = 9;
      byte(0x8A);  // LONG1
      byte(static_cast<unsigned char>(bytes));
      little_endian(value, std::min<std::size_t>(bytes, 8));
      if (bytes == 9) byte(0);
    }
  }

  void text(std::string_view raw) {
    const std::string valid = valid_utf8(raw);
    byte('X');  // BINUNICODE
    const std::size_t bytes = std::min<std::size_t>(valid.size(), INT32_MAX);
    little_endian(bytes, 4);
    for (std::size_t i = 0; i < bytes; ++i) byte(static_cast<unsigned char>(valid[i]));
  }

  // A string that occurs often. The first use writes the string, which the reader keeps under its index;
  // later uses write the index.
  void word(std::string_view word) {
    const auto [place, is_new] = words_.try_emplace(word, static_cast<unsigned char>(words_.size()));
    if (is_new) text(word);
    byte(is_new ? 'q' : 'h');  // BINPUT, BINGET
    byte(place->second);
  }

  void item(std::string_view key, std::uint64_t value) {
    word(key);
    number(value);
    set_item();
  }
  void item(std::string_view key, std::string_view value) {
    word(key);
    word(value);
    set_item();
  }

  // The list of frames of a stack: written at its first use, later named by its index.
  void frames(const std::vector<std::vector<SnapshotFrame>>& stacks, std::uint32_t stack) {
    word("frames");
    if (stack == kNoSnapshotStack) {
      begin_list();
    } else if (stack >= stacks.size()) {
      begin_list();
      fail(invalid_argument("cannot write a memory snapshot: it names stack ", stack, " of ", stacks.size(),
                            "; fill `stacks` first"));
    } else if (stack_written_[stack]) {
      byte('j');  // LONG_BINGET
      little_endian(kFirstStackIndex + stack, 4);
    } else {
      stack_written_[stack] = true;
      begin_list();
      for (const SnapshotFrame& frame : stacks[stack]) {
        begin_dict();
        word("name");
        text(frame.name);
        set_item();
        word("filename");
        text(frame.filename);
        set_item();
        item("line", frame.line);
        append();
      }
      byte('r');  // LONG_BINPUT
      little_endian(kFirstStackIndex + stack, 4);
    }
    set_item();
  }

  void tuple_of_two() { byte(0x86); }  // TUPLE2

 private:
  void byte(unsigned char value) {
    if (used_ == kBufferBytes) flush();
    buffer_[used_++] = value;
  }
  void little_endian(std::uint64_t value, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) byte(static_cast<unsigned char>(value >> (8 * i)));
  }
  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  void flush() {
    if (status_.ok() && write_all(file_, buffer_, used_) < used_) {
      fail(Status(StatusCode::kIoError, "cannot write a memory snapshot: ", std::strerror(errno),
                  "; free some space or give another file"));
    }
    used_ = 0;
  }

  const int file_;
  Status status_;
  std::vector<bool> stack_written_;
  std::map<std::string_view, unsigned char> words_;  // By word, its index.
  std::size_t used_ = 0;
  unsigned char buffer_[kBufferBytes];
};

void write_segment(Pickle& pickle, const MemorySnapshot& snapshot, const SnapshotSegment& segment) {
  pickle.begin_dict();
  pickle.word("device");
  pickle.integer(segment.device);
  pickle.set_item();
  pickle.item("address", segment.address);
  pickle.item("total_size", segment.total_size);
  pickle.item("allocated_size", segment.allocated_size);
  pickle.item("active_size", segment.active_size);
  pickle.item("requested_size", segment.requested_size);
  pickle.item("stream", segment.stream);
  pickle.item("segment_type", segment.segment_type == SnapshotSegmentType::kLarge ? "large" : "small");
  // The default pool, as PyTorch names it.
  pickle.word("segment_pool_id");
  pickle.number(0);
  pickle.number(0);
  pickle.tuple_of_two();
  pickle.set_item();
  pickle.word("is_expandable");
  pickle.truth(segment.is_expandable);
  pickle.set_item();
  pickle.frames(snapshot.stacks, segment.stack);
  pickle.word("blocks");
  pickle.begin_list();
  for (const SnapshotBlock& block : segment.blocks) {
    pickle.begin_dict();
    pickle.item("address", block.address);
    pickle.item("size", block.size);
    pickle.item("requested_size", block.requested_size);
    pickle.item("state", kStateWords[static_cast<std::size_t>(block.state)]);
    pickle.frames(snapshot.stacks, block.stack);
    pickle.append();
  }
  pickle.set_item();
}

void write_event(Pickle& pickle, const MemorySnapshot& snapshot, const SnapshotEvent& event) {
  pickle.begin_dict();
  pickle.item("action", kActionWords[static_cast<std::size_t>(event.action)]);
  pickle.item(event.action == SnapshotAction::kOutOfMemory ? "device_free" : "addr", event.address);
  pickle.item("size", event.size);
  pickle.item("stream", event.stream);
  pickle.item("time_us", event.time_us);
  pickle.frames(snapshot.stacks, event.stack);
}

void write_setting(Pickle& pickle, const SnapshotSetting& setting) {
  pickle.text(setting.name);
  if (const bool* truth = std::get_if<bool>(&setting.value)) {
    pickle.truth(*truth);
  } else if (const std::int64_t* integer = std::get_if<std::int64_t>(&setting.value)) {
    pickle.integer(*integer);
  } else {
    pickle.text(*std::get_if<std::string>(&setting.value));
  }
  pickle.set_item();
}

}  // namespace

Status write_memory_snapshot(const MemorySnapshot& snapshot, int file) {
  Pickle pickle(file, snapshot.stacks.size());
  pickle.begin_dict();

  pickle.text("segments");
  pickle.begin_list();
  for (const SnapshotSegment& segment : snapshot.segments) {
    write_segment(pickle, snapshot, segment);
    pickle.append();
  }
  pickle.set_item();

  pickle.text("device_traces");
  pickle.begin_list();
  for (const std::vector<SnapshotEvent>& trace : snapshot.device_traces) {
    pickle.begin_list();
    for (const SnapshotEvent& event : trace) {
      write_event(pickle, snapshot, event);
      pickle.append();
    }
    pickle.append();
  }
  pickle.set_item();

  pickle.text("allocator_settings");
  pickle.begin_dict();
  for (const SnapshotSetting& setting : snapshot.allocator_settings) write_setting(pickle, setting);
  pickle.set_item();

  return pickle.finish();
}

}  // namespace forebay
