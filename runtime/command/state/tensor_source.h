// Weights and training state in files of other tools, read tensor by tensor in pieces of bounded size:
// safetensors, one file or several with an index; checkpoints of DeepSpeed's ZeRO and PyTorch's distributed
// checkpoints.
//
// Source: https://github.com/huggingface/safetensors, "Format".
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "forebay/saved_state.h"
#include "forebay/span.h"

namespace forebay {

class TensorSource {
 public:
  struct Tensor {
    std::string name;
    std::vector<std::uint64_t> shape;
    std::uint64_t count = 0;  // Elements.
    bool frozen = false;
    bool has_m = false;
    bool has_v = false;
  };
  // Steps of the training that the moments belong to.
  struct Steps {
    std::uint64_t attempted = 0;
    std::uint64_t applied = 0;
  };

  virtual ~TensorSource() = default;
  virtual const std::vector<Tensor>& tensors() const = 0;
  // Passes all elements of a tensor, or of its m or v, to `visit`, in order, widened to fp32.
  // Requires: the tensor has the field.
  // Errors: throws Error: kIoError, kCorruption.
  virtual void read(std::size_t tensor, SavedField field,
                    const std::function<void(Span<const float>)>& visit) = 0;
  virtual Steps steps() const { return {}; }
  // The optimizer that the moments are of, as far as their names say.
  virtual std::string optimizer() const { return "adamw"; }
  // The beginnings of names that each select one model, where there are several: "model.", "ema.". With one,
  // it is no part of the model's names.
  virtual std::vector<std::string> prefixes() const { return {}; }
  // Tensors that may be weights, of types that are not read.
  virtual const std::vector<std::string>& left_out() const;
  // Tensors of size 0, which are not among tensors().
  const std::vector<std::string>& without_elements() const { return without_elements_; }

 protected:
  std::vector<std::string> without_elements_;
};

// `path`: a .safetensors file, an index as Hugging Face writes it (.safetensors.index.json), or a directory
// with model.safetensors or its index.
// Errors: throws Error: kIoError, kCorruption for a file that is not of this form, kUnsupported for tensors
// of other types than F32, BF16 and F16, naming one.
std::unique_ptr<TensorSource> open_safetensors(const std::string& path);

// `path`: the directory of a checkpoint of DeepSpeed, stages 1 to 3, or the directory that has it and the
// file `latest`. The masters are the optimizer's in fp32. Errors: throws Error: kIoError, kCorruption,
// kUnsupported for parts of tensor- and pipeline-parallel ranks, experts, and states that were swapped to
// NVMe. With `weights_alone` moments and their steps are not looked at. Cost: memory for the names and places
// of all tensors, and the pickle of one file.
std::unique_ptr<TensorSource> open_deepspeed(const std::string& path, bool weights_alone);
bool is_deepspeed(const std::string& path);

// `path`: the directory of a distributed checkpoint of PyTorch (torch.distributed.checkpoint), or its file
// .metadata. Tensors of other types than fp32, bf16 and fp16 are left out.
// Errors: throws Error: kIoError, kCorruption, kUnsupported for compressed parts and for moments of
// parameters with numbers in place of names. With `weights_alone` moments are not looked at. Cost: memory for
// .metadata and its values, and for the places of all parts.
std::unique_ptr<TensorSource> open_distributed(const std::string& path, bool weights_alone);
bool is_distributed(const std::string& path);

}  // namespace forebay
