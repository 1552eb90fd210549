// BatchFeed: carries the tokens of each micro-step to the device and its losses back, through a few pinned
// host buffers in turn, so that the host prepares a micro-step while the device is busy with those before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "forebay/backend.h"
#include "forebay/pinned_pool.h"
#include "model/device_handles.h"
#include "model/gpt.h"

namespace forebay::gpt {

class BatchFeed {
 public:
  struct Batch {
    std::span<Token> tokens;
    std::span<Token> targets;
  };

  // A pass has the rows of `gpt`. `backend` outlives this. The stream does too, or is drained before.
  BatchFeed(Backend& backend, const Gpt& gpt);
  // Where to write the next micro-step's tokens.
  Batch next() { return {batch_tokens_, batch_targets_}; }
  // Queues the copy of the latest next() to the device, before a forward pass. Waits while all buffers are in
  // transfer.
  void send(const Gpt& gpt, Stream stream);
  // Queues the copy of the losses to the host, after a backward pass.
  void receive(const Gpt& gpt, Stream stream);
  // Waits for all copies. Returns the mean loss of each micro-step since the last call, in order.
  std::vector<double> take_losses();

 private:
  // Fewer: the host waits for the device in every micro-step. More: memory without a use.
  static constexpr std::size_t kBufferCount = 4;

  struct Tokens {
    std::span<std::byte> tokens;
    std::span<std::byte> targets;
    OwnedEvent sent;
  };
  struct Losses {
    std::span<RowLoss> losses;
    OwnedEvent received;
    bool under_way = false;
  };

  void collect(Losses& buffer);

  Backend& backend_;
  const std::unique_ptr<PinnedPool> pool_;  // One block: all losses, then all tokens and targets.
  std::vector<Token> batch_tokens_, batch_targets_;
  std::vector<Tokens> tokens_;
  std::vector<Losses> losses_;
  std::size_t token_count_ = 0;  // Calls of send() and of receive() so far.
  std::size_t loss_count_ = 0;
  std::vector<double> means_;
};

}  // namespace forebay::gpt
