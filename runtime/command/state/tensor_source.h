// Weights in files of other tools, read tensor by tensor in pieces of bounded size: safetensors, one file or
// several with an index.
//
// Source: https://github.com/huggingface/safetensors, "Format".
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "forebay/span.h"

namespace forebay {

class TensorSource {
 public:
  struct Tensor {
    std::string name;
    std::vector<std::uint64_t> shape;
    std::uint64_t count = 0;  // Elements.
  };

  virtual ~TensorSource() = default;
  // By name.
  virtual const std::vector<Tensor>& tensors() const = 0;
  // Passes all elements of a tensor to `visit`, in order, widened to fp32.
  // Errors: throws Error(kIoError).
  virtual void read(std::size_t tensor, const std::function<void(Span<const float>)>& visit) = 0;
};

// `path`: a .safetensors file, an index as Hugging Face writes it (.safetensors.index.json), or a directory
// with model.safetensors or its index.
// Errors: throws Error: kIoError, kCorruption for a file that is not of this form, kUnsupported for tensors
// of other types than F32, BF16 and F16, naming one.
std::unique_ptr<TensorSource> open_safetensors(const std::string& path);

}  // namespace forebay
