#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "forebay/check.h"
#include "forebay/model_config.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/engine/plan/unit_order.h"

namespace {

using namespace forebay;

// A message shows a value in printable letters, and not much of it.
void check_message(const Status& status) {
  FOREBAY_CHECK(status.message().size() < 2000, "a message of %zu bytes", status.message().size());
  for (const char letter : status.message())
    FOREBAY_CHECK(static_cast<unsigned char>(letter) >= 0x20 && letter != 0x7f, "byte %d in a message",
                  letter);
}

}  // namespace

// The first byte selects the parser that gets the rest.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0]) {
    case 'b': {
      std::uint64_t bytes = 0;
      if (!parse_bytes(rest.c_str(), &bytes)) break;
      std::uint64_t again = 0;
      FOREBAY_CHECK(parse_bytes(std::to_string(bytes).c_str(), &again), "%llu is not read again",
                    static_cast<unsigned long long>(bytes));
      break;
    }
    case 'c':
      if (const auto shape = parse_model_config(rest, "config.json"); shape.ok()) {
        FOREBAY_CHECK(shape.value().layers > 0 && shape.value().hidden > 0, "a model of nothing");
      } else {
        check_message(shape.status());
      }
      break;
    case 'o':
      if (const auto order = parse_unit_order(rest, 5); order.ok()) {
        const std::string text = order.value().text();
        const auto again = parse_unit_order(text, 5);
        FOREBAY_CHECK(again.ok() && again.value().text() == text, "an order changed");
      }
      break;
    case 'v':
      FOREBAY_CHECK(shown_value(rest).size() <= 64 * 4 + 3, "a long value");
      FOREBAY_CHECK(shown_path(rest).size() <= 300 * 4 + 3, "a long path");
      break;
    default:
      break;
  }
  return 0;
}
