#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>

#include "forebay/check.h"
#include "forebay/error.h"
#include "runtime/command/state/tensor_source.h"

namespace {

namespace fs = std::filesystem;
using forebay::SavedField;
using forebay::Span;
using forebay::TensorSource;

// A directory of files to read, gone at the end of the process.
struct Directory {
  Directory() {
    path = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm/forebay-fuzz-XXXXXX" : "/tmp/forebay-fuzz-XXXXXX";
    FOREBAY_CHECK(::mkdtemp(path.data()) != nullptr, "no directory for files to read");
  }
  ~Directory() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  std::string path;
};

// A form of checkpoint: the names of its files, of which the last gets the rest of the input.
struct Form {
  char letter;
  const char* directory;
  const char* files[3];
};
constexpr Form kForms[] = {
    {'z', "zero2", {"zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"}},
    {'Z',
     "zero3",
     {"zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"}},
    {'d', "distributed", {".metadata", "__0_0.distcp", "__1_0.distcp"}},
    {'s', "safetensors", {"model.safetensors"}}};

// Each file but the last has its length before it, in 2 bytes.
void write_files(const Form& form, const std::string& directory, std::string_view rest) {
  fs::create_directories(directory);
  for (std::size_t i = 0; i < std::size(form.files) && form.files[i] != nullptr; ++i) {
    std::size_t length = rest.size();
    if (i + 1 < std::size(form.files) && form.files[i + 1] != nullptr) {
      if (length < 2) return;
      length = static_cast<unsigned char>(rest[0]) + 256u * static_cast<unsigned char>(rest[1]);
      rest.remove_prefix(2);
    }
    std::ofstream(directory + "/" + form.files[i], std::ios::binary | std::ios::trunc)
        << rest.substr(0, length);
    rest.remove_prefix(std::min(length, rest.size()));
  }
}

// Each tensor that is listed can be read, in pieces that make the whole.
void read_all(TensorSource& source) {
  constexpr std::uint64_t kMostElements = 1u << 20;
  for (std::size_t i = 0; i < source.tensors().size(); ++i) {
    const TensorSource::Tensor& tensor = source.tensors()[i];
    if (tensor.count > kMostElements) continue;
    for (const SavedField field : {SavedField::kMaster, SavedField::kM, SavedField::kV}) {
      if ((field == SavedField::kM && !tensor.has_m) || (field == SavedField::kV && !tensor.has_v)) continue;
      std::uint64_t seen = 0;
      try {
        source.read(i, field, [&](Span<const float> piece) { seen += piece.size(); });
      } catch (const forebay::Error&) {
        continue;
      }
      FOREBAY_CHECK(seen == tensor.count, "%zu elements", static_cast<std::size_t>(seen));
    }
  }
}

std::unique_ptr<TensorSource> open(const Form& form, const std::string& directory) {
  if (form.letter == 's') return forebay::open_safetensors(directory);
  if (form.letter == 'd') return forebay::open_distributed(directory, false);
  return forebay::open_deepspeed(directory, false);
}

}  // namespace

// The first byte selects the form of checkpoint; its files follow.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Directory root;
  if (size == 0) return 0;
  const auto form = std::find_if(std::begin(kForms), std::end(kForms),
                                 [&](const Form& one) { return one.letter == static_cast<char>(data[0]); });
  if (form == std::end(kForms)) return 0;
  const std::string directory = root.path + "/" + form->directory;
  write_files(*form, directory, {reinterpret_cast<const char*>(data) + 1, size - 1});
  try {
    read_all(*open(*form, directory));
  } catch (const forebay::Error&) {
  }
  return 0;
}
