#include "runtime/command/state/zip_archive.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "forebay/error.h"
#include "forebay/text.h"

namespace forebay {
namespace {

constexpr std::uint64_t kLocalHeaderBytes = 30;
constexpr std::uint64_t kDirectoryEntryBytes = 46;
constexpr std::uint64_t kEndBytes = 22;
constexpr std::uint64_t kEnd64Bytes = 56;
constexpr std::uint64_t kLocator64Bytes = 20;
constexpr std::uint64_t kMostCommentBytes = 65535;
constexpr std::uint64_t kIsIn64 = 0xffffffff;  // A field of 4 bytes: see the field of 8 bytes.

// Little endian. Requires: the bytes are there.
std::uint64_t number_at(std::string_view text, std::size_t at, std::size_t bytes) {
  std::uint64_t number = 0;
  for (std::size_t i = bytes; i-- > 0;) number = number << 8 | static_cast<unsigned char>(text[at + i]);
  return number;
}

bool has_signature(std::string_view text, std::size_t at, std::string_view signature) {
  return text.size() - at >= signature.size() && text.substr(at, signature.size()) == signature;
}

[[noreturn]] void refuse_archive(const InputFile& file, const std::string& finding) {
  refuse_import(file.path(), finding);
}

// Where the record of the end begins in the last bytes of an archive; npos without one.
std::size_t find_end(std::string_view tail) {
  for (std::size_t at = tail.size() < kEndBytes ? 0 : tail.size() - kEndBytes + 1; at-- > 0;) {
    if (has_signature(tail, at, "PK\5\6") && number_at(tail, at + 20, 2) == tail.size() - at - kEndBytes)
      return at;
  }
  return std::string_view::npos;
}

// The fields of a directory's entry that may be in its extra field of zip64.
struct DirectoryFields {
  std::uint64_t bytes = 0;
  std::uint64_t compressed = 0;
  std::uint64_t header = 0;
};

// False if the extra fields have not the numbers that the entry refers to.
bool widen_fields(DirectoryFields& fields, std::string_view extra) {
  std::string_view wide;
  while (extra.size() >= 4) {
    const std::uint64_t size = number_at(extra, 2, 2);
    if (size > extra.size() - 4) return false;
    if (number_at(extra, 0, 2) == 1) wide = extra.substr(4, size);
    extra.remove_prefix(4 + size);
  }
  for (std::uint64_t* const field : {&fields.bytes, &fields.compressed, &fields.header}) {
    if (*field != kIsIn64) continue;
    if (wide.size() < 8) return false;
    *field = number_at(wide, 0, 8);
    wide.remove_prefix(8);
  }
  return true;
}

}  // namespace

ZipArchive::ZipArchive(const InputFile& file, std::uint64_t begin, std::uint64_t bytes) : begin_(begin) {
  if (begin > file.bytes() || bytes > file.bytes() - begin) refuse_archive(file, "it ends early");
  const std::uint64_t tail_bytes = std::min(bytes, kEndBytes + kMostCommentBytes);
  const std::uint64_t tail_at = bytes - tail_bytes;
  const std::string tail = file.text(begin + tail_at, tail_bytes);
  const std::size_t end = find_end(tail);
  if (end == std::string::npos) {
    refuse_archive(file,
                   "it is not a zip archive, the form of torch.save() since PyTorch 1.6, or it was cut off");
  }
  std::uint64_t count = number_at(tail, end + 10, 2);
  std::uint64_t directory_bytes = number_at(tail, end + 12, 4);
  directory_ = number_at(tail, end + 16, 4);
  if (count == 0xffff || directory_bytes == kIsIn64 || directory_ == kIsIn64) {
    const std::uint64_t end_at = tail_at + end;
    if (end_at < kLocator64Bytes + kEnd64Bytes) refuse_archive(file, "its zip directory cannot be found");
    const std::string locator = file.text(begin + end_at - kLocator64Bytes, kLocator64Bytes);
    const std::uint64_t record_at = number_at(locator, 8, 8);
    if (!has_signature(locator, 0, "PK\6\7") || record_at > end_at - kLocator64Bytes - kEnd64Bytes)
      refuse_archive(file, "its zip directory cannot be found");
    const std::string record = file.text(begin + record_at, kEnd64Bytes);
    if (!has_signature(record, 0, "PK\6\6")) refuse_archive(file, "its zip directory cannot be found");
    count = number_at(record, 32, 8);
    directory_bytes = number_at(record, 40, 8);
    directory_ = number_at(record, 48, 8);
  }
  if (directory_ > bytes || directory_bytes > bytes - directory_ || directory_bytes > kMostDirectoryBytes)
    refuse_archive(file, "its zip directory is not within it");
  read_directory(file, begin + directory_, directory_bytes, count);
}

void ZipArchive::read_directory(const InputFile& file, std::uint64_t at, std::uint64_t bytes,
                                std::uint64_t count) {
  const std::string directory = file.text(at, bytes);
  std::string_view rest = directory;
  for (std::uint64_t i = 0; i < count; ++i) {
    if (rest.size() < kDirectoryEntryBytes || !has_signature(rest, 0, "PK\1\2"))
      refuse_archive(file, "its zip directory is damaged");
    const std::uint64_t name_bytes = number_at(rest, 28, 2);
    const std::uint64_t extra_bytes = number_at(rest, 30, 2);
    const std::uint64_t comment_bytes = number_at(rest, 32, 2);
    if (name_bytes + extra_bytes + comment_bytes > rest.size() - kDirectoryEntryBytes)
      refuse_archive(file, "its zip directory is damaged");
    const std::string name(rest.substr(kDirectoryEntryBytes, name_bytes));
    DirectoryFields fields{number_at(rest, 24, 4), number_at(rest, 20, 4), number_at(rest, 42, 4)};
    const std::string_view extra = rest.substr(kDirectoryEntryBytes + name_bytes, extra_bytes);
    if (!widen_fields(fields, extra)) refuse_archive(file, "its zip directory is damaged");
    const bool is_encrypted = (number_at(rest, 8, 2) & 1) != 0;
    if (is_encrypted || number_at(rest, 10, 2) != 0 || fields.bytes != fields.compressed) {
      throw Error(StatusCode::kUnsupported,
                  shown_path(file.path()) + " has the entry " + shown_value(name) +
                      ", which is compressed or encrypted; write it with torch.save(), which stores entries");
    }
    if (fields.header > directory_ || fields.bytes > directory_ - fields.header)
      refuse_archive(file, "its entry " + shown_value(name) + " is not within it");
    if (!entries_.emplace(name, Entry{fields.header, fields.bytes}).second)
      refuse_archive(file, "it has the entry " + shown_value(name) + " twice");
    rest.remove_prefix(kDirectoryEntryBytes + name_bytes + extra_bytes + comment_bytes);
  }
}

ZipArchive::Place ZipArchive::find(const InputFile& file, std::string_view name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) refuse_archive(file, "it has no entry " + shown_value(name));
  const Entry& entry = found->second;
  const std::string finding = "its entry " + shown_value(name) + " is not within it";
  if (directory_ - entry.header < kLocalHeaderBytes) refuse_archive(file, finding);
  const std::string header = file.text(begin_ + entry.header, kLocalHeaderBytes);
  if (!has_signature(header, 0, "PK\3\4")) refuse_archive(file, finding);
  const std::uint64_t skipped = kLocalHeaderBytes + number_at(header, 26, 2) + number_at(header, 28, 2);
  if (skipped > directory_ - entry.header || entry.bytes > directory_ - entry.header - skipped)
    refuse_archive(file, finding);
  return {begin_ + entry.header + skipped, entry.bytes};
}

std::string ZipArchive::root(const InputFile& file) const {
  constexpr std::string_view kPickle = "/data.pkl";
  std::string root;
  for (const auto& [name, entry] : entries_) {
    if (!std::string_view(name).ends_with(kPickle)) continue;
    if (!root.empty()) refuse_archive(file, "it has several entries data.pkl");
    root = name.substr(0, name.size() - kPickle.size());
  }
  if (root.empty()) refuse_archive(file, "it has no entry data.pkl, so torch.save() did not write it");
  return root;
}

}  // namespace forebay
