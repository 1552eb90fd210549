// Trainer: the training loop of one rank. rank_setup.h and rank_model.h make the things that it uses.
#pragma once

#include <cstdint>

#include "output/measure.h"
#include "output/progress.h"
#include "output/report.h"
#include "trainer/cursor.h"
#include "trainer/evaluation.h"
#include "trainer/rank_model.h"

namespace forebay::gpt {

class Trainer {
 public:
  // Sets up the model and its weights. Collective, as is train(); both arguments outlive this.
  // Requires: set_compute_threads() on the calling thread, which drives the engine.
  Trainer(const TrainerOptions& options, const Rank& rank);

  // Trains up to TrainerOptions::steps or a requested stop, and writes the files that the options ask for.
  // Every rank returns the same report. Errors: throws Error.
  TrainingReport train();

 private:
  void set_weights();
  void load();
  // Saves the training state. With --save-async this only begins; finish_save() does the rest.
  void save();
  void finish_save();
  void evaluate(TrainingReport& report, Progress& progress);
  std::string generate();
  void write_logits();
  void write_tokens();
  void write_timeline();

  StepResult step();
  void run_passes();
  void run_forward(int micro_step);
  void run_backward(int micro_step);
  void write_batch(const BatchPlace& place);
  Hyperparameters hyperparameters();
  BatchPlace batch_place(int micro_step) const;
  Pass pass_of(const BatchPlace& place) const;
  std::uint64_t steps_done() const { return model_.engine.attempted_steps(); }

  const TrainerOptions& options_;
  RankModel model_;
  Cursor cursor_;
  StepMeter meter_;
  Evaluation evaluation_;
  std::uint64_t saved_step_ = UINT64_MAX;  // None yet.
  bool is_saving_ = false;                 // save() began, and finish_save() was not called since.
  std::uint64_t most_passes_in_flight_ = 0;
};

}  // namespace forebay::gpt
