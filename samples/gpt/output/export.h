// The weights of the whole model, in one safetensors file or in a directory as transformers reads it.
#pragma once

#include <string>

#include "trainer/rank_model.h"

namespace forebay::gpt {

// Gathers each parameter from the ranks that have a part of it, in the order of the model; rank 0 writes the
// files. Collective over all ranks, between steps. No rank holds more than one whole parameter at a time.
// Errors: throws Error(kIoError) on rank 0, kPeerLost on the others.
void export_weights(RankModel& model, const std::string& path);

// Whether --export names a directory: one that exists, or a name that ends in a slash.
bool names_directory(const std::string& path);

}  // namespace forebay::gpt
