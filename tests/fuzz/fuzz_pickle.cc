#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/command/traces/torch_snapshot.h"
#include "tests/fuzz/picker.h"
#include "tests/fuzz/trace_invariants.h"

namespace {

using forebay::testing::Picker;

void append_number(std::string& text, std::uint64_t number, int bytes) {
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(number >> (8 * i));
}

// Operations of a pickle with operands of the right form, so that the stack machine gets far.
std::string structured(std::string_view bytes) {
  static constexpr const char* kNames[] = {
      "segments", "device_traces",    "address",  "total_size", "stream",         "blocks",
      "state",    "active_allocated", "inactive", "size",       "requested_size", "action",
      "alloc",    "free_completed",   "oom",      "addr",       "device",         "allocator_settings"};
  static constexpr char kPlain[] = {
      '(', '0', '1', '2',    'N',    'R',    'a',    'b',    'd',    '}',    'e',    'l',    ']',    's',
      't', ')', 'u', '\x85', '\x86', '\x87', '\x88', '\x89', '\x8f', '\x90', '\x91', '\x93', '\x94', '\x81'};
  Picker picker(bytes);
  std::string pickle = "\x80\x04";
  for (int i = 0; i < 2000 && !picker.is_empty(); ++i) {
    switch (picker.pick(8)) {
      case 0:
      case 1:
      case 2:
        pickle += picker.one_of(kPlain);
        break;
      case 3: {
        const std::string name = picker.one_of(kNames);
        pickle += '\x8c';
        append_number(pickle, name.size(), 1);
        pickle += name;
        break;
      }
      case 4:
        pickle += 'K';
        append_number(pickle, picker.pick(256), 1);
        break;
      case 5:
        pickle += "\x8a\x08";
        append_number(pickle, picker.number(), 8);
        break;
      case 6:
        pickle += picker.pick(2) == 0 ? 'q' : 'h';
        append_number(pickle, picker.pick(8), 1);
        break;
      default:
        pickle += "ccollections\nOrderedDict\n";
    }
  }
  return pickle + ".";
}

void check(std::string_view text) {
  static_cast<void>(forebay::is_torch_snapshot(text));
  const forebay::Result<std::vector<forebay::AllocationTrace>> traces =
      forebay::parse_torch_snapshot(text, "fuzz");
  if (!traces.ok()) return;
  for (const forebay::AllocationTrace& trace : traces.value()) forebay::testing::check_trace(trace);
}

}  // namespace

// A pickle; or, behind an S, which begins none that is read, choices that make one.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (text.starts_with('S')) {
    check(structured(text.substr(1)));
  } else {
    check(text);
  }
  return 0;
}
