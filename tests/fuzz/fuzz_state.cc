#include <stdlib.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "forebay/check.h"
#include "forebay/error.h"
#include "forebay/saved_state.h"
#include "runtime/engine/state/saved_state.h"
#include "tests/fuzz/picker.h"

namespace {

namespace fs = std::filesystem;
using forebay::SavedParameter;
using forebay::SavedStateReader;
using forebay::internal::SavedState;
using forebay::testing::Picker;
using Json = nlohmann::json;

constexpr const char* kState = "step-000000000001";

// A directory with one state, gone at the end of the process.
struct Directory {
  Directory() {
    path = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm/forebay-fuzz-XXXXXX" : "/tmp/forebay-fuzz-XXXXXX";
    FOREBAY_CHECK(::mkdtemp(path.data()) != nullptr, "no directory for files to read");
    fs::create_directory(path + "/" + kState);
  }
  ~Directory() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path + "/" + name, std::ios::binary | std::ios::trunc) << text;
  }
  void write_manifest(const std::string& text) const {
    write(std::string(kState) + "/manifest.json",
          Json{{"checksum", XXH3_64bits(text.data(), text.size())}, {"manifest", text}}.dump(
              -1, ' ', false, Json::error_handler_t::replace));
  }
  std::string path;
};

Directory& directory() {
  static Directory made;
  return made;
}

std::string number_bytes(std::uint64_t number) {
  std::string bytes(sizeof number, '\0');
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}

// The file of rank 0, with a manifest that agrees with its length and its last bytes.
void write_rank_file(const std::string& file) {
  std::uint64_t checksum = 0;
  if (file.size() >= sizeof checksum)
    std::memcpy(&checksum, file.data() + file.size() - sizeof checksum, sizeof checksum);
  directory().write(std::string(kState) + "/rank-0-of-1", file);
  directory().write_manifest(
      Json{{"format", 1},
           {"attempted_steps", 3},
           {"applied_steps", 2},
           {"loss_scale", 1.0},
           {"ranks", 1},
           {"stage", 2},
           {"dtype", "bf16"},
           {"trainer_state", "x"},
           {"files", {{{"name", "rank-0-of-1"}, {"bytes", file.size()}, {"index_checksum", checksum}}}}}
          .dump());
}

std::string with_index(const std::string& data, const std::string& index) {
  return "FBSTATE1" + data + index + number_bytes(index.size()) +
         number_bytes(XXH3_64bits(index.data(), index.size()));
}

// Runs of a few parameters with right checksums; now and then a value is another one.
std::string structured(std::string_view bytes) {
  Picker picker(bytes);
  std::string data;
  Json index = Json::array();
  std::uint64_t offsets[3][3] = {};
  for (std::uint32_t i = 0, runs = picker.pick(12); i < runs; ++i) {
    const std::uint32_t parameter = picker.pick(3), field = picker.pick(3), count = picker.pick(20);
    std::string values(count * sizeof(float), static_cast<char>(picker.pick(256)));
    Json run{{"parameter", "p" + std::to_string(parameter)},
             {"field", forebay::internal::kStateFields[field]},
             {"offset", offsets[parameter][field]},
             {"count", count},
             {"at", 8 + data.size()},
             {"checksum", XXH3_64bits(values.data(), values.size())}};
    offsets[parameter][field] += count;
    data += values;
    static constexpr const char* kKeys[] = {"parameter", "field", "offset", "count", "at", "checksum"};
    switch (picker.pick(12)) {
      case 0:
        run[picker.one_of(kKeys)] = picker.number();
        break;
      case 1:
        run[picker.one_of(kKeys)] = Json::parse(picker.text(12), nullptr, false);
        break;
      case 2:
        run.erase(picker.one_of(kKeys));
        break;
      default:
        break;
    }
    index.push_back(std::move(run));
  }
  return with_index(data, index.dump(-1, ' ', false, Json::error_handler_t::replace));
}

// Format 2: a file with right checksums, and a manifest with pieces in it and outside of it.
void write_pieces(std::string_view bytes) {
  using forebay::internal::StateDirectory;
  Picker picker(bytes);
  const std::string name = "rank-0-of-1.safetensors";
  const StateDirectory state = StateDirectory(directory().path).subdirectory(kState);
  const std::uint64_t count = 1 + picker.pick(200);
  forebay::internal::StateFileWriter file(
      state.create(name), std::vector<forebay::internal::StateParameter>{{.name = "p", .count = count}},
      {{.parameter = 0, .field = 0, .offset = 0, .count = count}});
  file.write(std::vector<float>(count, 1.0f));
  file.finish();
  const forebay::internal::StateFileIndex index(state.open(name));
  const auto number = [&](std::uint64_t most) -> std::uint64_t {
    return picker.pick(8) == 0 ? picker.number() : picker.pick(static_cast<std::uint32_t>(most) + 1);
  };
  Json parameters = Json::array();
  for (std::uint32_t p = 0, last = picker.pick(4); p < last; ++p) {
    Json parameter{{"name", "p" + std::to_string(p)}, {"frozen", false}, {"pieces", Json::array()}};
    const std::uint64_t rows = number(6), columns = number(40);
    parameter["shape"] = {rows, columns};
    parameter["count"] = picker.pick(8) == 0 ? number(200) : rows * columns;
    if (picker.pick(2) == 0) {
      parameter["split"] = {{"dimension", number(2)}, {"sections", number(3)}, {"parts", number(4)}};
    }
    for (std::uint32_t i = 0, pieces = picker.pick(4); i < pieces; ++i) {
      Json piece{{"file", number(0)}, {"part", number(3)}, {"offset", number(100)}, {"count", number(100)}};
      for (const char* field : forebay::internal::kStateFields) {
        if (picker.pick(4) > 0) piece[field] = {index.data_at + number(100) * 4, number(0)};
      }
      parameter["pieces"].push_back(std::move(piece));
    }
    parameters.push_back(std::move(parameter));
  }
  directory().write_manifest(Json{
      {"format", 2},
      {"attempted_steps", 3},
      {"applied_steps", 2},
      {"loss_scale", 1.0},
      {"ranks", 1},
      {"stage", 2},
      {"dtype", "bf16"},
      {"trainer_state", "x"},
      {"files",
       {{{"name", name},
         {"bytes", index.bytes},
         {"blocks", index.checksums.size()},
         {"index_checksum", index.checksum}}}},
      {"parameters", parameters}}.dump());
}

// Opens the state and reads all of it.
void read_all() {
  constexpr std::uint64_t kMostValues = 1u << 20;
  SavedState saved(directory().path, kState);
  for (const auto& [name, tensor] : saved.tensors()) {
    for (const char* field : forebay::internal::kStateFields) {
      std::vector<float> values(std::min(tensor.places.count(), kMostValues));
      try {
        saved.read(name, field, 0, values);
        saved.read(name, field, values.size() / 2, std::span(values).subspan(values.size() / 2));
      } catch (const forebay::Error&) {
      }
    }
  }
}

// The same without an engine, as `forebay state` does.
void verify_all() {
  SavedStateReader reader(directory().path);
  std::uint64_t elements = 0;
  for (const SavedParameter& parameter : reader.facts().parameters) elements += parameter.count;
  std::uint64_t seen = 0;
  reader.verify([&](std::uint64_t done, std::uint64_t) { seen = done; });
  FOREBAY_CHECK(seen / (3 * sizeof(float)) <= elements, "more was read than there is");
}

}  // namespace

// The first byte selects the file that gets the rest: `latest`, the manifest with or without its envelope,
// a rank's file, its index, choices that make a rank's file, or pieces of format 2.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  static const std::string plain = with_index(std::string(8, '\1'), "[]");
  switch (data[0]) {
    case 'l':
      write_rank_file(plain);
      directory().write("latest", rest);
      break;
    case 'e':
      directory().write(std::string(kState) + "/manifest.json", rest);
      break;
    case 'm':
      write_rank_file(plain);
      directory().write_manifest(rest);
      break;
    case 'r':
      write_rank_file(rest);
      break;
    case 'i': {
      const std::size_t end = std::min(rest.find('\0'), rest.size());
      write_rank_file(with_index(rest.substr(end), rest.substr(0, end)));
      break;
    }
    case 's':
      write_rank_file(structured(rest));
      break;
    case 'p':
      write_pieces(rest);
      break;
    default:
      return 0;
  }
  try {
    static_cast<void>(forebay::internal::find_state(forebay::internal::StateDirectory(directory().path)));
    read_all();
  } catch (const forebay::Error&) {
  }
  try {
    verify_all();
  } catch (const forebay::Error&) {
  }
  return 0;
}
