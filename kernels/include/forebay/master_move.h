// The move of masters by an update that is not one of single elements: adafactor.h, muon.h.
#pragma once

#include <cstdint>

#include "forebay/data_type.h"
#include "forebay/moments.h"

namespace forebay {

// p = fma(decay, p, p), p = fma(step, u, p), and what follows from p.
struct MasterMove {
  float decay = 0.0f;         // -(lr * weight_decay)
  float step = 0.0f;          // The factor of u.
  float* master = nullptr;    // Not read where `half` has elements.
  void* parameter = nullptr;  // Null when the master is the parameter.
  DataType parameter_type = DataType::kFloat32;
  HalfMaster half;  // As KeptUpdateArguments::half, rounded by dithering.
  std::uint64_t step_number = 0;
  float* average = nullptr;
  float average_weight = 0.0f;
};

}  // namespace forebay
