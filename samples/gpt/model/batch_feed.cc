#include "model/batch_feed.h"

#include <utility>

#include "forebay/error.h"

namespace forebay::gpt {

BatchFeed::BatchFeed(Backend& backend, std::size_t rows)
    : backend_(backend), pool_(value_or_throw(PinnedPool::create(backend, {.slab_bytes = 1}))) {
  const std::size_t bytes_of_row = sizeof(RowLoss) + 2;
  auto* losses =
      reinterpret_cast<RowLoss*>(value_or_throw(pool_->allocate(kBufferCount * rows * bytes_of_row)));
  auto* bytes = reinterpret_cast<std::uint8_t*>(losses + kBufferCount * rows);
  for (std::size_t i = 0; i < kBufferCount; ++i) {
    tokens_.push_back({.tokens = {bytes + 2 * i * rows, rows},
                       .targets = {bytes + (2 * i + 1) * rows, rows},
                       .sent = OwnedEvent(backend)});
    losses_.push_back({.losses = {losses + i * rows, rows}, .received = OwnedEvent(backend)});
  }
}

BatchFeed::Batch BatchFeed::next() {
  const Tokens& buffer = tokens_[token_count_++ % kBufferCount];
  throw_if_error(backend_.event_synchronize(buffer.sent.get()));
  return {buffer.tokens, buffer.targets};
}

void BatchFeed::send(const Gpt& gpt, Stream stream) {
  const Tokens& buffer = tokens_[(token_count_ - 1) % kBufferCount];
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
