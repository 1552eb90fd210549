#include "runtime/engine/state/saved_state.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "forebay/checksum.h"
#include "forebay/error.h"
#include "forebay/text.h"
#include "forebay/units.h"

namespace forebay::internal {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kOldFormat = 1;
constexpr std::uint64_t kFormat = 2;
constexpr char kOldMagic[8] = {'F', 'B', 'S', 'T', 'A', 'T', 'E', '1'};
// Blocks that are kept, at most. Smaller: rows of a tensor in more parts are read again and again. Larger:
// more memory.
constexpr std::uint64_t kMostBlocks = 64;
constexpr std::size_t kMostHeldFiles = 256;  // In many places a process may have 1024 open.
constexpr std::uint64_t kOldTrailerBytes = 2 * sizeof(std::uint64_t);

[[noreturn]] void corrupt(const std::string& path, const std::string& finding) {
  throw Error(StatusCode::kCorruption,
              "saved state " + shown_path(path) + " is damaged: " + finding + "; load another saved state");
}

int field_number(const std::string& field) {
  for (std::size_t f = 0; f < std::size(kStateFields); ++f) {
    if (field == kStateFields[f]) return static_cast<int>(f);
  }
  return -1;
}

}  // namespace

SavedState::SavedState(const std::string& directory, const std::string& name)
    : files_(StateDirectory(directory).subdirectory(name)) {
  read_manifest();
  try {
    list_files();
    if (format_ == kOldFormat) {
      for (std::size_t file = 0; file < list_.size(); ++file) read_old_index(file);
    } else {
      list_tensors();
    }
    // They throw if the value is there and has another type.
    static_cast<void>(manifest_.value("optimizer", std::string()));
    static_cast<void>(manifest_.value("weights_only", false));
  } catch (const Json::exception&) {
    corrupt(path(), "its manifest does not list its files and parameters, or names no optimizer");
  }
  for (auto& [parameter, tensor] : tensors_) {
    if (format_ == kOldFormat) names_.push_back(parameter);
    for (auto& parts : tensor.pieces) {
      for (auto& [part, pieces] : parts) {
        std::sort(pieces.begin(), pieces.end(),
                  [](const Tensor::Piece& a, const Tensor::Piece& b) { return a.offset < b.offset; });
      }
    }
  }
}

void SavedState::read_manifest() {
  const std::string path = files_.path() + "/" + kManifest;
  try {
    const Json envelope = Json::parse(files_.read(kManifest, kMostIndexBytes));
    const std::string text = envelope.at("manifest").get<std::string>();
    if (checksum_of(text.data(), text.size()) != whole_number(envelope, "checksum"))
      corrupt(path, "its checksum differs");
    manifest_ = Json::parse(text);
    format_ = whole_number(manifest_, "format");
  } catch (const Json::exception&) {
    corrupt(path, "it is not a manifest");
  }
  if (format_ != kOldFormat && format_ != kFormat) {
    throw Error(StatusCode::kUnsupported, shown_path(path) + " has format " + std::to_string(format_) +
                                              ", and this version reads 1 and 2; use the version of forebay "
                                              "that wrote it");
  }
}

void SavedState::list_files() {
  for (const Json& entry : manifest_.at("files")) {
    File file{.name = entry.at("name").get<std::string>(),
              .bytes = whole_number(entry, "bytes"),
              .index_checksum = whole_number(entry, "index_checksum")};
    if (file.name.find('/') != std::string::npos) corrupt(path(), "its manifest names a file outside of it");
    if (format_ == kFormat) file.blocks = whole_number(entry, "blocks");
    list_.push_back(std::move(file));
  }
}

void SavedState::list_tensors() {
  for (const Json& entry : manifest_.at("parameters")) {
    const auto name = entry.at("name").get<std::string>();
    const auto [found, is_new] = tensors_.try_emplace(name);
    if (!is_new) corrupt(path(), "its manifest lists " + shown_value(name) + " twice");
    names_.push_back(name);
    Tensor& tensor = found->second;
    tensor.places = TensorPlaces(whole_number(entry, "count"));
    tensor.is_factors = entry.contains("factors");
    for (const Json& extent : entry.at("shape"))
      tensor.shape.push_back(extent.get_ref<const Json::number_unsigned_t&>());
    if (entry.contains("split")) {
      const Json& split = entry.at("split");
      Result<TensorPlaces> places = TensorPlaces::of(
          {.shape = tensor.shape,
           .dimension = static_cast<int>(std::min<std::uint64_t>(whole_number(split, "dimension"), 1000)),
           .sections = whole_number(split, "sections"),
           .parts = whole_number(split, "parts")});
      if (!places.ok() || places.value().count() != tensor.places.count())
        corrupt(path(), "the split of " + shown_value(name) + " is not one of its shape");
      tensor.places = places.value();
      tensor.is_split = true;
    }
    for (const Json& piece : entry.at("pieces")) list_piece(tensor, piece);
  }
}

void SavedState::list_piece(Tensor& tensor, const Json& entry) {
  Tensor::Piece piece;
  piece.file = whole_number(entry, "file");
  piece.offset = whole_number(entry, "offset");
  piece.count = whole_number(entry, "count");
  piece.block_count = kBlockCount;
  const std::uint64_t part = whole_number(entry, "part");
  const std::uint64_t whole = tensor.places.part_count();
  if (piece.file >= list_.size() || part >= tensor.places.parts() || piece.count == 0 ||
      piece.offset > whole || piece.count > whole - piece.offset)
    corrupt(path(), "its manifest has a piece outside of its tensor");
  const File& file = list_[piece.file];
  for (std::size_t f = 0; f < std::size(kStateFields); ++f) {
    if (!entry.contains(kStateFields[f])) continue;
    const Json& place = entry.at(kStateFields[f]);
    piece.at = place.at(0).get_ref<const Json::number_unsigned_t&>();
    piece.first_block = place.at(1).get_ref<const Json::number_unsigned_t&>();
    if (piece.at > file.bytes || piece.count > (file.bytes - piece.at) / sizeof(float) ||
        piece.first_block > file.blocks ||
        ceil_div(piece.count, kBlockCount) > file.blocks - piece.first_block)
      corrupt(path(), "its manifest has a piece outside of its file");
    tensor.pieces[f][part].push_back(piece);
  }
}

// Format 1: an index of runs at the end of each file, with a checksum for each run.
void SavedState::read_old_index(std::size_t number) {
  File& of = list_[number];
  const StateFile file = files_.open(of.name);
  const std::string& path = file.path();
  const std::uint64_t bytes = file.bytes();
  if (bytes != of.bytes) {
    corrupt(path,
            "it has " + std::to_string(bytes) + " bytes, " + std::to_string(of.bytes) + " were written");
  }
  constexpr std::uint64_t kFrameBytes = sizeof(kOldMagic) + kOldTrailerBytes;
  char magic[sizeof(kOldMagic)];
  std::uint64_t trailer[2];  // Length and checksum of the index.
  if (bytes < kFrameBytes) corrupt(path, "it is shorter than an empty one");
  file.read_at(0, magic, sizeof(magic));
  file.read_at(bytes - kOldTrailerBytes, trailer, sizeof(trailer));
  if (std::memcmp(magic, kOldMagic, sizeof(magic)) != 0) corrupt(path, "it does not begin as one");
  if (trailer[0] > std::min(bytes - kFrameBytes, kMostIndexBytes)) corrupt(path, "its index is too long");
  std::string text(trailer[0], '\0');
  file.read_at(bytes - kOldTrailerBytes - text.size(), text.data(), text.size());
  if (checksum_of(text.data(), text.size()) != trailer[1] || trailer[1] != of.index_checksum)
    corrupt(path, "the checksum of its index differs");
  try {
    for (const Json& entry : Json::parse(text)) enter_old_run(number, entry);
  } catch (const Json::exception&) {
    corrupt(path, "its index cannot be read");
  }
  of.is_open = true;
}

void SavedState::enter_old_run(std::size_t number, const Json& entry) {
  File& file = list_[number];
  const auto parameter = entry.at("parameter").get<std::string>();
  const int field = field_number(entry.at("field").get<std::string>());
  const Tensor::Piece piece{.file = number,
                            .offset = whole_number(entry, "offset"),
                            .count = whole_number(entry, "count"),
                            .at = whole_number(entry, "at"),
                            .first_block = file.checksums.size(),
                            .block_count = whole_number(entry, "count")};
  file.checksums.push_back(whole_number(entry, "checksum"));
  if (piece.count > file.bytes / sizeof(float) || piece.at > file.bytes)
    corrupt(files_.path() + "/" + file.name, "a run lies outside of it");
  Tensor& tensor = tensors_[parameter];
  if (field < 0 || piece.count == 0) return;
  if (field == 0) tensor.places = TensorPlaces(tensor.places.count() + piece.count);
  tensor.pieces[static_cast<std::size_t>(field)][0].push_back(piece);
}

bool SavedState::hold_files() {
  if (list_.size() > kMostHeldFiles) return true;
  try {
    for (File& file : list_) file.held.emplace(files_.open(file.name));
    return true;
  } catch (const Error&) {
    return false;
  }
}

StateFile& SavedState::file_of(std::size_t number, std::optional<StateFile>& fresh) {
  File& of = list_[number];
  return of.held ? *of.held : fresh.emplace(files_.open(of.name));
}

void SavedState::open(std::size_t number) {
  File& of = list_[number];
  if (of.is_open) return;
  std::optional<StateFile> fresh;
  const StateFile& file = file_of(number, fresh);
  if (file.bytes() != of.bytes) {
    corrupt(file.path(), "it has " + std::to_string(file.bytes()) + " bytes, " + std::to_string(of.bytes) +
                             " were written");
  }
  StateFileIndex index(file);
  if (index.checksum != of.index_checksum || index.checksums.size() != of.blocks)
    corrupt(file.path(), "the checksum of its header differs");
  bytes_read_ += index.data_at + index.checksums.size() * sizeof(std::uint64_t);
  of.checksums = std::move(index.checksums);
  of.is_open = true;
}

void SavedState::check_files() {
  for (std::size_t file = 0; file < list_.size(); ++file) open(file);
}

void SavedState::check_tensor_index() const {
  if (format_ == kOldFormat) return;
  TensorIndex expected;
  for (const File& file : list_) expected.add(StateFileIndex(files_.open(file.name)), file.name);
  const std::string path = files_.path() + "/" + TensorIndex::kName;
  if (!files_.has(TensorIndex::kName)) corrupt(path, "it is not there");
  if (files_.read(TensorIndex::kName, kMostIndexBytes) != expected.text())
    corrupt(path, "it does not name the tensors of the files");
}

bool SavedState::has(const std::string& parameter, const std::string& field) const {
  const auto found = tensors_.find(parameter);
  const int number = field_number(field);
  return found != tensors_.end() && number >= 0 &&
         !found->second.pieces[static_cast<std::size_t>(number)].empty();
}

std::span<const float> SavedState::block_of(const Tensor& tensor, const Tensor::Piece& piece, int field,
                                            std::uint64_t block, const std::string& parameter) {
  const std::uint64_t number = piece.first_block + block;
  const std::uint64_t begin = block * piece.block_count;
  const std::uint64_t count = std::min(piece.block_count, piece.count - begin);
  const std::uint64_t at = piece.at + begin * sizeof(float);
  for (Block& kept : blocks_) {
    // Two pieces of a damaged manifest may name one block.
    if (kept.file != piece.file || kept.number != number || kept.at != at || kept.values.size() != count)
      continue;
    kept.last_use = ++uses_;
    return kept.values;
  }
  open(piece.file);
  // One for each part, and one for the part that comes to its next block.
  const std::uint64_t parts = tensor.places.parts();
  const std::uint64_t wanted = parts == 1 ? 1 : std::min(parts + 1, kMostBlocks);
  while (blocks_.size() > wanted) blocks_.pop_back();
  if (blocks_.size() < wanted) blocks_.emplace_back();
  Block& place = *std::min_element(blocks_.begin(), blocks_.end(),
                                   [](const Block& a, const Block& b) { return a.last_use < b.last_use; });
  place.last_use = 0;
  place.number = UINT64_MAX;  // Until it is whole.
  place.values.resize(count);
  std::optional<StateFile> fresh;
  const StateFile& file = file_of(piece.file, fresh);
  const std::uint64_t bytes = place.values.size() * sizeof(float);
  file.read_at(at, place.values.data(), bytes);
  bytes_read_ += bytes;
  if (checksum_of(place.values.data(), bytes) != list_[piece.file].checksums[number]) {
    corrupt(file.path(), std::string("the checksum of ") + kStateFields[field] + " of " +
                             shown_value(parameter) + " differs");
  }
  place.file = piece.file;
  place.number = number;
  place.at = at;
  place.last_use = ++uses_;
  return place.values;
}

void SavedState::read(const std::string& parameter, const std::string& field, std::uint64_t begin,
                      std::span<float> target) {
  const auto found = tensors_.find(parameter);
  const int number = field_number(field);
  const auto not_whole = [&] { corrupt(path(), field + " of " + shown_value(parameter) + " is not whole"); };
  if (found == tensors_.end() || number < 0) {
    if (!target.empty()) not_whole();
    return;
  }
  const Tensor& tensor = found->second;
  const auto& parts = tensor.pieces[static_cast<std::size_t>(number)];
  if (begin > tensor.places.count() || target.size() > tensor.places.count() - begin) not_whole();
  while (!target.empty()) {
    const TensorPlaces::InPart run = tensor.places.find(begin);
    const auto pieces = parts.find(run.part);
    if (pieces == parts.end()) not_whole();
    auto piece = std::upper_bound(pieces->second.begin(), pieces->second.end(), run.at,
                                  [](std::uint64_t at, const Tensor::Piece& p) { return at < p.offset; });
    if (piece == pieces->second.begin()) not_whole();
    --piece;
    const std::uint64_t in_piece = run.at - piece->offset;
    if (in_piece >= piece->count) not_whole();
    const std::span<const float> block =
        block_of(tensor, *piece, number, in_piece / piece->block_count, parameter);
    const std::uint64_t in_block = in_piece % piece->block_count;
    const std::uint64_t count = std::min({run.count, block.size() - in_block, target.size()});
    std::copy_n(block.data() + in_block, count, target.data());
    target = target.subspan(count);
    begin += count;
  }
}

void SavedState::visit(const std::string& parameter, const std::string& field, std::uint64_t piece_count,
                       const std::function<void(std::span<const float>)>& visit) {
  const auto found = tensors_.find(parameter);
  if (found == tensors_.end()) return;
  const std::uint64_t all = found->second.places.count();
  std::vector<float> piece(std::min(all, piece_count));
  for (std::uint64_t done = 0; done < all; done += piece.size()) {
    piece.resize(std::min(all - done, piece_count));
    read(parameter, field, done, piece);
    visit(piece);
  }
}

}  // namespace forebay::internal
