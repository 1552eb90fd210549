#include "runtime/command/text_table.h"

#include <algorithm>

namespace forebay {
namespace {

constexpr std::size_t kGap = 2;

}  // namespace

std::string table_text(const std::vector<TableRow>& rows) {
  std::vector<std::size_t> widths(rows.front().size(), 0);
  for (const TableRow& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  std::size_t begin = 1;
  do {
    std::size_t end = begin;
    std::size_t width = widths[0];
    while (end < widths.size() && (end == begin || width + kGap + widths[end] <= kTableWidth))
      width += kGap + widths[end++];
    if (begin > 1) text += '\n';
    for (const TableRow& row : rows) {
      text += row[0];
      std::size_t spaces = widths[0] - row[0].size();
      for (std::size_t i = begin; i < end; ++i) {
        text += std::string(spaces + kGap + widths[i] - row[i].size(), ' ') + row[i];
        spaces = 0;
      }
      text += '\n';
    }
    begin = end;
  } while (begin < widths.size());
  return text;
}

}  // namespace forebay
