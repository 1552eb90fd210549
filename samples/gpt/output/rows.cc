#include "output/rows.h"

#include <cstdio>

#include "forebay/text.h"
#include "forebay/units.h"

namespace forebay::gpt {
namespace {

constexpr int kColumns = 100;      // Narrow terminals and quoted logs still show a row as one.
constexpr int kLabelColumns = 14;  // With the indentation before the label and the space after it.

}  // namespace

void show_row(const char* label, const std::string& text) {
  std::fprintf(stderr, "  %-*s%s\n", kLabelColumns - 2, label,
               wrap_text(text, kColumns, kLabelColumns).c_str());
}

std::string tiers_text(std::uint64_t device_bytes, std::uint64_t host_bytes, std::uint64_t file_bytes) {
  return format_bytes(device_bytes) + " device, " + format_bytes(host_bytes) + " host, " +
         format_bytes(file_bytes) + " files";
}

}  // namespace forebay::gpt
