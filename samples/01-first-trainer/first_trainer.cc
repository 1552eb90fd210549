// The smallest trainer: it fits y = W2 tanh(W1 x) on three ranks, which are threads, at ZeRO stages 0 and 3.
// Both stages print the same digest: their weights are bit for bit the same.
#include <cstdio>
#include <vector>

#include "forebay/trainer.h"
#include "model.h"
using namespace forebay;

static void train(Trainer& trainer) {
  // Describe. The first layer's backward pass reads no weights, so nothing is gathered for it.
  Engine& engine = trainer.engine();
  const UnitId first = engine.add_unit("first", /*backward_reads_parameters=*/false);
  const UnitId second = engine.add_unit("second");
  const ParameterId w1 = engine.add_parameter(first, "w1", kHidden * kInputs);
  const ParameterId w2 = engine.add_parameter(second, "w2", kHidden);
  engine.commit();

  // Initial values: whole, the same on every rank. Each rank keeps the shard that its ZeRO stage gives it.
  std::vector<float> values(kHidden * kInputs);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.3f * std::sin(7.0f * static_cast<float>(i));
  engine.set_parameter(w1, values);
  engine.set_parameter(w2, Span(values).first(kHidden));

  Work work;
  StepResult result;
  double first_loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    make_batch(work, trainer.rank(), step);
    trainer.begin();
    trainer.forward(first, [&](const Lease& lease) {
      trainer.run([&, w = lease.view<float>(w1).data] { first_layer_forward(work, w); });
    });
    trainer.forward(second, [&](const Lease& lease) {
      trainer.run([&, w = lease.view<float>(w2).data] { second_layer_forward(work, w); });
    });
    trainer.backward(second, [&](Lease& lease) {  // Each gradient is asked for once, so its mode is kWrite.
      trainer.run([&, w = lease.view<float>(w2).data, g = lease.gradient(w2).as<float>()] {
        second_layer_backward(work, w, g);
      });
    });
    trainer.backward(first, [&](Lease& lease) {
      trainer.run([&, g = lease.gradient(w1).as<float>()] { first_layer_backward(work, g); });
    });
    trainer.wait();  // Now the host may read the loss.
    result = trainer.step({.groups = {{.lr = 0.02}}, .clip = 1.0, .metric = work.loss / kRanks});
    if (step == 0) first_loss = result.metric_sum;
  }
  const std::string digest = engine.digest();
  const auto bytes = static_cast<unsigned long long>(engine.plan().bytes.model_states());
  if (trainer.rank() != 0) return;
  std::printf("stage %d: loss %.4f -> %.4f, %llu bytes of model states per rank, digest %s\n",
              engine.options().stage, first_loss, result.metric_sum, bytes, digest.c_str());
}

int main() {
  for (const int stage : {0, 3}) Trainer::on_threads(kRanks, {{{.stage = stage}}}, train);
}
