#include <cstddef>
#include <cstdint>
#include <string_view>

#include "runtime/command/traces/text_trace.h"
#include "tests/fuzz/trace_invariants.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  static_cast<void>(forebay::is_text_trace(text));
  const forebay::Result<forebay::AllocationTrace> trace = forebay::parse_text_trace(text, "fuzz");
  if (trace.ok()) forebay::testing::check_trace(trace.value());
  return 0;
}
