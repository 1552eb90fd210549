#include "collectives/rendezvous/introduction.h"

#include <unistd.h>

#include <cstdint>

#include "collectives/rendezvous/byte_text.h"

namespace forebay::internal {
namespace {

std::string fitting(std::string text, std::size_t bytes_max) {
  // A long text keeps its beginning for a reader, and its hash so that no two become the same.
  if (text.size() <= bytes_max) return text;
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  const std::string end = "...#" + std::to_string(hash);
  text.resize(bytes_max - end.size());
  return text + end;
}

std::string rank_name(const Introduction& introduction) {
  return "rank " + std::to_string(introduction.who.rank);
}

}  // namespace

Introduction introduce(const Participant& who) {
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  Introduction introduction{who, fitting(FOREBAY_VERSION, kVersionBytesMax), fitting(host, kHostBytesMax)};
  introduction.who.configuration = fitting(who.configuration, kConfigurationBytesMax);
  return introduction;
}

Status compare(const Introduction& a, const Introduction& b) {
  if (b.who.rank < a.who.rank) return compare(b, a);
  const std::string first = rank_name(a);
  const std::string second = rank_name(b);
  if (a.who.size != b.who.size) {
    return invalid_argument(first, " was started as one of ", a.who.size, " ranks, ", second, " as one of ",
                            b.who.size, "; start all ranks with the same number");
  }
  if (a.version != b.version) {
    return invalid_argument(first, " runs forebay ", a.version, ", ", second, " runs forebay ", b.version,
                            "; install the same version everywhere");
  }
  if (a.who.configuration != b.who.configuration) {
    return invalid_argument(first, " was configured as \"", a.who.configuration, "\", ", second, " as \"",
                            b.who.configuration, "\"; start all ranks with the same options");
  }
  return {};
}

std::string encode(const Introduction& introduction) {
  std::string bytes;
  append_number(bytes, static_cast<std::uint32_t>(introduction.who.rank));
  append_number(bytes, static_cast<std::uint32_t>(introduction.who.size));
  append_text(bytes, introduction.version);
  append_text(bytes, introduction.host);
  append_text(bytes, introduction.who.configuration);
  return bytes;
}

bool decode(std::string_view* text, Introduction* introduction) {
  std::uint32_t rank = 0;
  std::uint32_t size = 0;
  if (!take_number(text, &rank) || !take_number(text, &size)) return false;
  if (size == 0 || size > kRanksMax || rank >= size) return false;
  introduction->who.rank = static_cast<int>(rank);
  introduction->who.size = static_cast<int>(size);
  return take_text(text, kVersionBytesMax, &introduction->version) &&
         take_text(text, kHostBytesMax, &introduction->host) &&
         take_text(text, kConfigurationBytesMax, &introduction->who.configuration);
}

}  // namespace forebay::internal
