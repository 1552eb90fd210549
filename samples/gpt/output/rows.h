// Rows of the texts that a run shows on stderr before and after its steps: a label, then a text.
#pragma once

#include <cstdint>
#include <string>

namespace forebay::gpt {

// Prints one row on stderr. The text is wrapped between words at 100 columns, behind the label.
void show_row(const char* label, const std::string& text);

// "7.99 MiB device, 6.05 MiB host, 0 B files".
std::string tiers_text(std::uint64_t device_bytes, std::uint64_t host_bytes, std::uint64_t file_bytes);

}  // namespace forebay::gpt
