// A model without an engine, with parameters and gradients in its own buffers, for tests.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model/convert.h"
#include "model/gpt.h"
#include "model/host_operations.h"
#include "model/matmul.h"
#include "model/random.h"
#include "model/shape.h"

namespace forebay::gpt {

inline std::uint64_t test_seed() {
  const char* text = std::getenv("FOREBAY_SEED");
  const std::uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : 20240607;
  std::printf("FOREBAY_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

inline float* align(std::vector<float>& storage) {
  void* place = storage.data();
  std::size_t space = storage.size() * sizeof(float);
  return static_cast<float*>(std::align(256, 64, place, space));
}

// Memory with the engine's alignment.
class AlignedBytes {
 public:
  explicit AlignedBytes(std::size_t bytes) : storage_(bytes / sizeof(float) + 128) {}
  std::byte* data() { return reinterpret_cast<std::byte*>(align(storage_)); }

 private:
  std::vector<float> storage_;
};

// Runs work at once, for a model with no collectives in between.
class RunsAtOnce final : public WorkQueue {
 public:
  void run(std::function<void()> work) override { work(); }
};

// A model with parameters and gradients in its own buffers, without an engine.
class PlainModel {
 public:
  PlainModel(const GptShape& shape, std::size_t batch, DataType dtype, std::unique_ptr<MatMul> matmul,
             int threads = 1)
      : PlainModel({.shape = shape, .batch = batch, .dtype = dtype}, std::move(matmul), threads) {}
  PlainModel(const Gpt::Options& options, std::unique_ptr<MatMul> matmul, int threads = 1)
      : dtype_(options.dtype),
        units_(describe_units(options.shape)),
        operations_(create_host_operations(std::move(matmul), threads)),
        gpt_(options, *operations_, queue_, alone_),
        memory_(gpt_.memory_bytes()) {
    std::memset(memory_.data(), 0xCB, gpt_.memory_bytes());  // Makes a read before the first write visible.
    gpt_.use_memory(memory_.data());
    for (const GptUnit& unit : units_) {
      for (const GptParameter& parameter : unit.parameters) {
        values_[parameter.name].resize(parameter.count() * element_bytes(dtype_));
        gradients_[parameter.name].resize(parameter.count() * element_bytes(dtype_));
      }
    }
  }

  const std::vector<GptUnit>& units() const { return units_; }
  void begin(const Pass& pass) { gpt_.begin(pass); }

  void set(const std::string& name, const std::vector<float>& values) {
    narrow(dtype_, values.data(), values_.at(name).data(), values.size(), false);
  }
  std::vector<float> value(const std::string& name) const { return widened(values_.at(name)); }
  std::vector<float> gradient(const std::string& name) const { return widened(gradients_.at(name)); }

  // One forward and backward pass; `accumulate` adds to the gradients of the pass before.
  double run(const std::vector<std::uint8_t>& tokens, const std::vector<std::uint8_t>& targets,
             bool accumulate = false, double loss_scale = 1) {
    std::copy_n(reinterpret_cast<const std::byte*>(tokens.data()), tokens.size(), gpt_.tokens());
    std::copy_n(reinterpret_cast<const std::byte*>(targets.data()), targets.size(), gpt_.targets());
    for (int unit = 0; unit < gpt_.unit_count(); ++unit) gpt_.forward(unit, parameters_of(unit));
    for (int unit = gpt_.unit_count() - 1; unit >= 0; --unit) {
      const Parameters parameters = unit == 0 ? Parameters() : parameters_of(unit);
      gpt_.backward(unit, parameters, gradients_of(unit, accumulate), loss_scale);
    }
    return mean_loss({reinterpret_cast<const RowLoss*>(gpt_.row_losses()), gpt_.row_count()});
  }

 private:
  std::vector<float> widened(const std::vector<std::byte>& bytes) const {
    std::vector<float> values(bytes.size() / element_bytes(dtype_));
    widen(dtype_, bytes.data(), values.data(), values.size());
    return values;
  }

  bool uses_tokens(int unit) const { return units_[static_cast<std::size_t>(unit)].uses_tokens; }
  const std::string& token_embedding() const { return units_.front().parameters.front().name; }

  Parameters parameters_of(int unit) const {
    Parameters all;
    for (const GptParameter& parameter : units_[static_cast<std::size_t>(unit)].parameters) {
      all.push_back(values_.at(parameter.name).data());
    }
    if (uses_tokens(unit)) all.push_back(values_.at(token_embedding()).data());
    return all;
  }

  Gradients gradients_of(int unit, bool accumulate) {
    Gradients all;
    for (const GptParameter& parameter : units_[static_cast<std::size_t>(unit)].parameters) {
      // A tied head has already written the gradient of the tokens.
      const bool add = accumulate || (units_.back().uses_tokens && is_token_embedding(parameter.name));
      all.push_back({gradients_.at(parameter.name).data(), add});
    }
    if (uses_tokens(unit)) all.push_back({gradients_.at(token_embedding()).data(), accumulate});
    return all;
  }

  DataType dtype_;
  std::vector<GptUnit> units_;
  std::unique_ptr<Operations> operations_;
  RunsAtOnce queue_;
  TensorGroup alone_;
  Gpt gpt_;
  AlignedBytes memory_;
  std::map<std::string, std::vector<std::byte>> values_;
  std::map<std::string, std::vector<std::byte>> gradients_;
};

// Random parameters with no symmetry in them: gains near 1, biases not zero.
inline void randomise(PlainModel& model, std::uint64_t seed) {
  std::uint64_t stream = 0;
  for (const GptUnit& unit : model.units()) {
    for (const GptParameter& parameter : unit.parameters) {
      std::vector<float> values(parameter.count());
      const double centre = parameter.initial == Initial::kOne ? 1.0 : 0.0;
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(centre + 0.15 * draw_normal(seed, stream, i));
      }
      model.set(parameter.name, values);
      ++stream;
    }
  }
}

inline std::vector<std::uint8_t> random_bytes(std::size_t count, std::uint64_t seed, std::uint64_t stream) {
  std::vector<std::uint8_t> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::uint8_t>(draw(seed, stream, i));
  return bytes;
}

inline std::vector<std::string> matmul_names() {
  std::vector<std::string> names = {"plain"};
  if (library_matmul_available()) names.push_back("library");
  return names;
}

inline std::unique_ptr<MatMul> make_matmul(const std::string& name) {
  return name == "plain" ? create_plain_matmul() : create_library_matmul();
}

}  // namespace forebay::gpt
