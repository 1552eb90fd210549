#include "model/batch_feed.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "forebay/error.h"

namespace forebay::gpt {

namespace {

// Writes `tokens` as a TokenList.
void pack(std::span<const Token> tokens, std::span<std::byte> target) {
  if (target.size() == tokens.size_bytes()) {
    std::memcpy(target.data(), tokens.data(), target.size());
    return;
  }
  std::transform(tokens.begin(), tokens.end(), target.begin(),
                 [](Token token) { return static_cast<std::byte>(token); });
}

}  // namespace

BatchFeed::BatchFeed(Backend& backend, const Gpt& gpt)
    : backend_(backend),
      pool_(value_or_throw(PinnedPool::create(backend, {.slab_bytes = 1}))),
      batch_tokens_(gpt.row_count()),
      batch_targets_(gpt.row_count()) {
  const std::size_t rows = gpt.row_count(), token_bytes = gpt.token_bytes();
  auto* losses = reinterpret_cast<RowLoss*>(
      value_or_throw(pool_->allocate(kBufferCount * (rows * sizeof(RowLoss) + 2 * token_bytes))));
  auto* bytes = reinterpret_cast<std::byte*>(losses + kBufferCount * rows);
  for (std::size_t i = 0; i < kBufferCount; ++i) {
    tokens_.push_back({.tokens = {bytes + 2 * i * token_bytes, token_bytes},
                       .targets = {bytes + (2 * i + 1) * token_bytes, token_bytes},
                       .sent = OwnedEvent(backend)});
    losses_.push_back({.losses = {losses + i * rows, rows}, .received = OwnedEvent(backend)});
  }
}

void BatchFeed::send(const Gpt& gpt, Stream stream) {
  const Tokens& buffer = tokens_[token_count_++ % kBufferCount];
  throw_if_error(backend_.event_synchronize(buffer.sent.get()));
  pack(batch_tokens_, buffer.tokens);
  pack(batch_targets_, buffer.targets);
  throw_if_error(backend_.copy_async(gpt.tokens(), buffer.tokens.data(), buffer.tokens.size_bytes(), stream));
  throw_if_error(
      backend_.copy_async(gpt.targets(), buffer.targets.data(), buffer.targets.size_bytes(), stream));
  throw_if_error(backend_.event_record(buffer.sent.get(), stream));
}

void BatchFeed::receive(const Gpt& gpt, Stream stream) {
  Losses& buffer = losses_[loss_count_++ % kBufferCount];
  if (buffer.under_way) collect(buffer);
  throw_if_error(
      backend_.copy_async(buffer.losses.data(), gpt.row_losses(), buffer.losses.size_bytes(), stream));
  throw_if_error(backend_.event_record(buffer.received.get(), stream));
  buffer.under_way = true;
}

std::vector<double> BatchFeed::take_losses() {
  for (std::size_t i = 0; i < kBufferCount; ++i) {
    Losses& oldest = losses_[(loss_count_ + i) % kBufferCount];
    if (oldest.under_way) collect(oldest);
  }
  return std::exchange(means_, {});
}

void BatchFeed::collect(Losses& buffer) {
  throw_if_error(backend_.event_synchronize(buffer.received.get()));
  means_.push_back(mean_loss(buffer.losses));
  buffer.under_way = false;
}

}  // namespace forebay::gpt
