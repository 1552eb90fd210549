// Exports the weights of saved training state to safetensors files, in pieces of bounded size.
//
// One file, or several with an index, as Hugging Face's save_pretrained() writes them:
//   model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, model.safetensors.index.json
// Source: https://github.com/huggingface/safetensors, "Format".
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "forebay/data_type.h"
#include "forebay/saved_state.h"

namespace forebay {

struct StateExport {
  std::string to;  // "model.safetensors"
  DataType dtype = DataType::kFloat32;
  bool average = false;               // The moving average of the weights, where the state has one.
  std::uint64_t max_shard_bytes = 0;  // Tensors of one file; a larger tensor has a file alone. 0: one file.
};

// Writes the files under temporary names, syncs and renames them when all are complete, the index last.
// Returns their paths. `progress` gets the bytes so far and in all.
// Errors: throws Error: kInvalidArgument for a name that is no .safetensors file and where an export of the
// other form (one file, or several with an index) has that name, kIoError, and those of SavedStateReader. No
// new file is left then.
// Cost: memory for two pieces of SavedStateReader::kPieceCount elements.
std::vector<std::string> export_state(
    SavedStateReader& state, const StateExport& options,
    const std::function<void(std::uint64_t done, std::uint64_t all)>& progress);

}  // namespace forebay
