#include "trainer/evaluation.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "forebay/error.h"
#include "forebay/units.h"
#include "model/random.h"

namespace forebay::gpt {
namespace {

// Losses that ranks exchange at once. Fewer: more exchanges. More: larger messages than the control plane is
// made for.
constexpr std::size_t kExchangedLosses = 4096;

void add(Traffic& sum, const Traffic& more) {
  sum.sent_bytes += more.sent_bytes;
  sum.received_bytes += more.received_bytes;
}

// The values of all ranks, those of rank r from r * mine.size() on.
template <typename Value>
std::vector<Value> exchange(Communicator& ranks, std::span<const Value> mine) {
  std::vector<Value> all(mine.size() * static_cast<std::size_t>(ranks.size()));
  throw_if_error(ranks.exchange(std::as_bytes(mine), std::as_writable_bytes(std::span(all))));
  return all;
}

Traffic difference(const Traffic& now, const Traffic& before) {
  return {now.sent_bytes - before.sent_bytes, now.received_bytes - before.received_bytes};
}

// The index of the entry of `weights` in which `fraction` of their sum lies.
std::size_t draw_from(const std::vector<double>& weights, double fraction) {
  double sum = 0;
  for (const double weight : weights) sum += weight;
  double below = 0;
  for (std::size_t i = 0; i + 1 < weights.size(); ++i) {
    below += weights[i];
    if (fraction * sum < below) return i;
  }
  return weights.size() - 1;
}

}  // namespace

Traffic tensor_traffic(Grid& grid) {
  return grid.tensor() != nullptr ? grid.tensor()->traffic() : Traffic{};
}

Traffic pipeline_traffic(Grid& grid) {
  Traffic sum;
  if (grid.forward() == nullptr) return sum;
  add(sum, grid.forward()->traffic());
  add(sum, grid.backward()->traffic());
  return sum;
}

// While one lives, activations on the wire belong to no step. Transfers have ended at both ends.
class Evaluation::OutsideOfSteps {
 public:
  explicit OutsideOfSteps(Evaluation& evaluation) : evaluation_(evaluation) {
    evaluation.model_.pipeline.drain();
    tensor_ = gpt::tensor_traffic(evaluation.model_.grid);
    pipeline_ = gpt::pipeline_traffic(evaluation.model_.grid);
  }
  ~OutsideOfSteps() {
    evaluation_.model_.pipeline.drain();
    add(evaluation_.tensor_, difference(gpt::tensor_traffic(evaluation_.model_.grid), tensor_));
    add(evaluation_.pipeline_, difference(gpt::pipeline_traffic(evaluation_.model_.grid), pipeline_));
  }
  OutsideOfSteps(const OutsideOfSteps&) = delete;
  OutsideOfSteps& operator=(const OutsideOfSteps&) = delete;

 private:
  Evaluation& evaluation_;
  Traffic tensor_;
  Traffic pipeline_;
};

Evaluation::Evaluation(RankModel& model)
    : model_(model),
      pool_(value_or_throw(PinnedPool::create(*model.rank.backend, {.slab_bytes = 1}))),
      host_([&] {
        const std::size_t bytes =
            std::max(model.gpt.row_count() * sizeof(RowLoss), model.gpt.logit_count() * sizeof(float));
        return std::span(value_or_throw(pool_->allocate(bytes)), bytes);
      }()) {}

std::uint64_t Evaluation::sample_count() const {
  const std::uint64_t tokens = model_.evaluation_text.size();
  if (tokens == 0) return 0;
  const std::uint64_t all = (tokens - 1) / model_.options.model.sequence;
  const std::uint64_t most = model_.options.evaluation_samples;
  return most == 0 ? all : std::min(all, most);
}

std::uint64_t Evaluation::pass_count() const {
  const auto ranks = static_cast<std::uint64_t>(model_.grid.shape().data_parallel());
  return ceil_div(sample_count(), ranks * model_.options.batch);
}

double Evaluation::loss() {
  const OutsideOfSteps outside(*this);
  const std::size_t batch = model_.options.batch;
  const std::size_t sequence = model_.options.model.sequence;
  const RankGrid& grid = model_.grid.shape();
  const auto ranks = static_cast<std::uint64_t>(grid.data_parallel());
  const std::uint64_t samples = sample_count();
  const std::uint64_t passes = pass_count();

  double sum = 0;
  std::vector<double> mine;
  std::uint64_t first = 0;  // The sample of mine[0] on data-parallel rank 0.
  for (std::uint64_t pass_index = 0; pass_index < passes; ++pass_index) {
    const std::uint64_t begin =
        (pass_index * ranks + static_cast<std::uint64_t>(model_.grid.at().data)) * batch;
    const BatchFeed::Batch tokens = model_.feed.next();
    for (std::size_t b = 0; b < batch; ++b) {
      // The last pass may have too few samples. Its other places get the last sample, which does not count.
      const std::uint64_t sample = std::min(begin + b, samples - 1);
      model_.evaluation_text.copy(sample * sequence, tokens.tokens.subspan(b * sequence, sequence));
      model_.evaluation_text.copy(sample * sequence + 1, tokens.targets.subspan(b * sequence, sequence));
    }
    pass();
    append_losses(mine);
    if (pass_index + 1 < passes && mine.size() + batch <= kExchangedLosses) continue;
    const std::vector<double> all = exchange_with_all<double>(mine);
    for (std::size_t i = 0; i < mine.size() * ranks; ++i) {
      if (first + i >= samples) break;
      const auto data = static_cast<int>(i / batch % ranks);
      const int rank = grid.rank({.tensor = 0, .data = data, .pipeline = grid.pipeline_parallel() - 1});
      sum += all[static_cast<std::size_t>(rank) * mine.size() + i / (batch * ranks) * batch + i % batch];
    }
    first += mine.size() * ranks;
    mine.clear();
  }
  return sum / static_cast<double>(samples);
}

// Order: after a pass, when the engine moves nothing.
template <typename Value>
std::vector<Value> Evaluation::exchange_with_all(std::span<const Value> mine) {
  const Traffic before = model_.communicator.traffic();
  std::vector<Value> all = exchange<Value>(model_.communicator, mine);
  if (&model_.communicator == &model_.grid.data())
    add(exchanged_, difference(model_.communicator.traffic(), before));
  return all;
}

void Evaluation::append_losses(std::vector<double>& losses) {
  const std::size_t sequence = model_.options.model.sequence;
  if (!model_.grid.stage().is_last()) {  // Another rank has the losses.
    losses.resize(losses.size() + model_.options.batch);
    return;
  }
  model_.gpt.compute_losses();
  const std::size_t rows = model_.gpt.row_count();
  const auto* first =
      reinterpret_cast<const RowLoss*>(fetch(model_.gpt.row_losses(), rows * sizeof(RowLoss)).data());
  for (std::size_t b = 0; b < model_.options.batch; ++b)
    losses.push_back(mean_loss(std::span(first, rows).subspan(b * sequence, sequence)));
}

std::string Evaluation::generate(const std::function<void(std::string_view)>& show) {
  const OutsideOfSteps outside(*this);
  std::string text = model_.options.prompt;
  const BytePairs* const tokenizer = model_.options.tokenizer.get();
  std::vector<Token> tokens;
  if (tokenizer != nullptr) {
    tokens = tokenizer->encode(text);
  } else {
    for (const char byte : text) tokens.push_back(static_cast<std::uint8_t>(byte));
  }
  show(text);
  for (std::uint64_t i = 0; i < model_.options.generate; ++i) {
    tokens.push_back(next_token(tokens));
    const char byte = static_cast<char>(tokens.back());
    const std::string_view part =
        tokenizer != nullptr ? tokenizer->bytes_of(tokens.back()) : std::string_view(&byte, 1);
    text += part;
    show(part);
  }
  check_same_on_all_ranks(text);
  return text;
}

void Evaluation::logits(const std::function<void(std::span<const float>)>& take) {
  const OutsideOfSteps outside(*this);
  const std::size_t sequence = model_.options.model.sequence;
  const BatchFeed::Batch batch = model_.feed.next();
  for (std::size_t b = 0; b < model_.options.batch; ++b) {
    model_.evaluation_text.copy(0, batch.tokens.subspan(b * sequence, sequence));
    model_.evaluation_text.copy(1, batch.targets.subspan(b * sequence, sequence));
  }
  pass();
  if (!model_.grid.stage().is_last()) model_.compute.synchronize();
  Communicator* const stages = model_.grid.forward();
  for (std::size_t row = 0; row < sequence; ++row) {
    std::vector<float> mine(model_.gpt.vocabulary());
    if (model_.grid.stage().is_last()) mine = logits_of(row);
    if (stages == nullptr) {
      take(mine);
    } else {
      take(std::span<const float>(exchange<float>(*stages, mine)).last(mine.size()));
    }
  }
}

// The model sees the last tokens that fit into a sample. Tokens behind them do not matter, because attention
// is causal.
Token Evaluation::next_token(std::span<const Token> tokens) {
  const std::span<const Token> seen = tokens.last(std::min(tokens.size(), model_.options.model.sequence));
  const BatchFeed::Batch batch = model_.feed.next();
  std::fill(batch.tokens.begin(), batch.tokens.end(), Token{0});
  std::fill(batch.targets.begin(), batch.targets.end(), Token{0});
  std::copy(seen.begin(), seen.end(), batch.tokens.begin());
  pass();
  Token token = 0;
  if (model_.grid.stage().is_last()) {
    token = choose(logits_of(seen.size() - 1), tokens.size());
  } else {
    model_.compute.synchronize();
  }
  Communicator* const stages = model_.grid.forward();
  return stages != nullptr ? exchange<Token>(*stages, std::span(&token, 1)).back() : token;
}

std::vector<float> Evaluation::logits_of(std::size_t row) {
  const std::size_t count = model_.gpt.logit_count();
  const auto* values =
      reinterpret_cast<const float*>(fetch(model_.gpt.logits(row), count * sizeof(float)).data());
  std::vector<float> logits(values, values + count);
  if (Communicator* const tensor = model_.grid.tensor(); tensor != nullptr)
    logits = exchange<float>(*tensor, logits);
  logits.resize(model_.gpt.vocabulary());  // Padding is at the end.
  return logits;
}

Token Evaluation::choose(const std::vector<float>& logits, std::uint64_t position) const {
  const auto largest = std::max_element(logits.begin(), logits.end());
  const double temperature = model_.options.temperature;
  if (temperature == 0) return static_cast<Token>(largest - logits.begin());
  std::vector<double> weights;
  for (const float logit : logits)
    weights.push_back(std::exp((static_cast<double>(logit) - static_cast<double>(*largest)) / temperature));
  const std::uint64_t random = draw(model_.options.seed, kGenerationStream, position);
  return static_cast<Token>(draw_from(weights, static_cast<double>(random >> 11) * 0x1p-53));
}

void Evaluation::check_same_on_all_ranks(std::string_view text) {
  const std::uint64_t mine = Text(std::vector<std::uint8_t>(text.begin(), text.end())).hash();
  const std::vector<std::uint64_t> all = exchange_with_all<std::uint64_t>(std::span(&mine, 1));
  const auto other =
      std::find_if(all.begin(), all.end(), [&](std::uint64_t one) { return one != all.front(); });
  if (other == all.end()) return;
  throw Error(StatusCode::kInternal,
              "--generate: rank " + std::to_string(other - all.begin()) +
                  " generated another text than rank 0, so their processors compute different bits; use "
                  "machines of one kind, or --matmul plain");
}

void Evaluation::pass() {
  Gpt& gpt = model_.gpt;
  const EvaluationBytes& planned = model_.engine.plan().evaluation;
  const bool is_first = applied_steps_ != model_.engine.applied_steps();
  planned_sent_bytes_ += (is_first ? planned.first : planned.next).wire.sent;
  applied_steps_ = model_.engine.applied_steps();

  gpt.begin({.evaluates = true});
  model_.feed.send(gpt, model_.compute.stream());
  StageLink* const link = model_.pipeline.forward();
  if (link != nullptr) {
    link->receive(gpt.input(0), gpt.stage_bytes());
    link->wait_for_received();
    link->wait_for_place(0);
  }
  model_.engine_model.evaluation_pass();
  if (link != nullptr) link->send(gpt.output(0), gpt.stage_bytes(), 0);
}

std::span<const std::byte> Evaluation::fetch(DevicePtr source, std::size_t bytes) {
  throw_if_error(model_.rank.backend->copy_async(host_.data(), source, bytes, model_.compute.stream()));
  model_.compute.synchronize();
  return host_.first(bytes);
}

}  // namespace forebay::gpt
