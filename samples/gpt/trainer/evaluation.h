// Evaluation: uses the weights without training them, for the loss of a text and for generated text.
//
// Each pass is a forward pass without gradients (Engine::evaluation_begin()), so the training after it stays
// bit for bit the same. All ranks get the same results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "forebay/pinned_pool.h"
#include "trainer/rank_model.h"

namespace forebay::gpt {

// The payload of a rank's tensor-parallel and pipeline communicators so far.
Traffic tensor_traffic(Grid& grid);
Traffic pipeline_traffic(Grid& grid);

class Evaluation {
 public:
  explicit Evaluation(RankModel& model);

  // Samples of the evaluation text, and the passes that compute their losses.
  std::uint64_t sample_count() const;
  std::uint64_t pass_count() const;

  // The mean loss over all tokens. Sample i has the tokens from i * sequence on, and samples go to the ranks
  // in turn. Their losses are added in order, so the result does not depend on the number of ranks. Order:
  // between steps. Collective.
  double loss();

  // Continues the prompt token by token, with one pass each; `show` gets each part when it is there. Returns
  // the prompt and the text. Order: as loss(). Errors: throws Error(kInternal) if ranks have different texts.
  std::string generate(const std::function<void(std::string_view)>& show);

  // The logits of the text's first sample, in rows of the vocabulary; `take` gets each. Order: as loss().
  void logits(const std::function<void(std::span<const float>)>& take);

  // The caller changed the weights other than by a step.
  void weights_changed() { applied_steps_ = UINT64_MAX; }

  // Bytes of all passes so far: those that the plan says this rank sends to data-parallel ranks, and those
  // that were measured between tensor-parallel ranks and between pipeline stages.
  std::uint64_t planned_sent_bytes() const { return planned_sent_bytes_; }
  const Traffic& tensor_traffic() const { return tensor_; }
  const Traffic& pipeline_traffic() const { return pipeline_; }
  // Bytes of losses and checks that went over the engine's communicator, which counts them too. None where a
  // model in parts gives the engine a communicator of its own.
  const Traffic& exchanged_traffic() const { return exchanged_; }

 private:
  class OutsideOfSteps;

  // Queues a forward pass over the tokens that were written to the latest batch of the feed.
  void pass();
  // Copies device memory to the host and waits.
  std::span<const std::byte> fetch(DevicePtr source, std::size_t bytes);
  template <typename Value>
  std::vector<Value> exchange_with_all(std::span<const Value> mine);
  void append_losses(std::vector<double>& losses);
  Token next_token(std::span<const Token> tokens);
  std::vector<float> logits_of(std::size_t row);
  Token choose(const std::vector<float>& logits, std::uint64_t position) const;
  void check_same_on_all_ranks(std::string_view text);

  RankModel& model_;
  const std::unique_ptr<PinnedPool> pool_;
  const std::span<std::byte> host_;  // Row losses, or the logits of a row.
  std::uint64_t planned_sent_bytes_ = 0;
  std::uint64_t applied_steps_ = UINT64_MAX;  // At the last pass; UINT64_MAX: the weights changed since.
  Traffic tensor_;
  Traffic pipeline_;
  Traffic exchanged_;
};

}  // namespace forebay::gpt
