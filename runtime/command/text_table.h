// Tables for a terminal.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace forebay {

// No line of a table is longer, unless one cell is.
inline constexpr std::size_t kTableWidth = 100;

using TableRow = std::vector<std::string>;

// The rows, the header first, with columns as wide as their widest cell: the first one to the left, the
// others to the right. Columns that do not fit beside each other follow below, after the first column again.
// Requires: rows of one length.
std::string table_text(const std::vector<TableRow>& rows);

}  // namespace forebay
