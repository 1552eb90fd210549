#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "runtime/command/traces/torch_snapshot.h"
#include "tests/fuzz/trace_invariants.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  static_cast<void>(forebay::is_torch_snapshot(text));
  const forebay::Result<std::vector<forebay::AllocationTrace>> traces =
      forebay::parse_torch_snapshot(text, "fuzz");
  if (!traces.ok()) return 0;
  for (const forebay::AllocationTrace& trace : traces.value()) forebay::testing::check_trace(trace);
  return 0;
}
