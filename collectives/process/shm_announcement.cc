#include "collectives/process/shm_announcement.h"

#include <charconv>
#include <system_error>

namespace forebay::internal {
namespace {

// A number and the character after it, off the front of `text`.
template <typename Number>
bool take(std::string_view* text, Number* number, char after) {
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), *number);
  if (error != std::errc() || end == text->data() + text->size() || *end != after) return false;
  text->remove_prefix(static_cast<std::size_t>(end - text->data()) + 1);
  return true;
}

}  // namespace

std::string encode(const ShmAnnouncement& announcement) {
  return announcement.host + "\n" + std::to_string(announcement.owner.id) + " " +
         std::to_string(announcement.owner.start_time) + " " + std::to_string(announcement.descriptor) + "\n";
}

std::optional<ShmAnnouncement> decode_shm_announcement(std::string_view text) {
  const std::size_t end = text.find('\n');
  if (end == std::string_view::npos) return std::nullopt;
  ShmAnnouncement announcement{.host = std::string(text.substr(0, end)), .owner = {}, .descriptor = -1};
  text.remove_prefix(end + 1);
  const bool whole = take(&text, &announcement.owner.id, ' ') &&
                     take(&text, &announcement.owner.start_time, ' ') &&
                     take(&text, &announcement.descriptor, '\n') && text.empty();
  // encode() never makes numbers that no process and no descriptor can have.
  if (!whole || announcement.owner.id <= 0 || announcement.descriptor < 0) return std::nullopt;
  return announcement;
}

}  // namespace forebay::internal
