/* The trainer of 01-first-trainer in C99: y = W2 tanh(W1 x) on three ranks, at ZeRO stages 0 and 3.
 *
 *   build/release/bin/from-c
 *   gcc -std=c99 from_c.c $(pkg-config --cflags --libs forebay-c) -lm && ./a.out
 *
 * The ranks are processes here, which meet in a directory. Each acquires a unit, waits for the stream,
 * computes, and releases the unit. Both stages print the digest that first-trainer prints. With
 * FOREBAY_HOST_GUARD=1 a gradient that was not written, or a use of a released unit, is found.
 */
#define _POSIX_C_SOURCE 200809L /* For fork and mkdtemp; the interface itself needs C99 alone. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "forebay/forebay.h"

enum { kRanks = 3, kSteps = 200, kInputs = 8, kHidden = 32, kBatch = 16 };

static float x[kBatch][kInputs], y[kBatch], hidden[kBatch][kHidden], error[kBatch],
    hidden_gradient[kBatch][kHidden];

static void check(int32_t code) {
  if (code == FOREBAY_OK) return;
  fprintf(stderr, "%s: %s\n", forebay_code_name(code), forebay_last_error());
  exit(1);
}

static void set(forebay_options* options, const char* name, long value) {
  char text[32];
  snprintf(text, sizeof(text), "%ld", value);
  check(forebay_options_set(options, name, text));
}

/* Makes inputs from a formula, different for each rank and step. */
static void make_batch(int rank, int step) {
  for (int b = 0; b < kBatch; ++b) {
    y[b] = 0;
    for (int i = 0; i < kInputs; ++i) {
      x[b][i] = sinf((float)(((step * kRanks + rank) * kBatch + b) * kInputs + i));
      y[b] += x[b][i] * (float)(i - 3) / 4;
    }
  }
}

static void first_forward(const float* w1) {
  for (int b = 0; b < kBatch; ++b) {
    for (int h = 0; h < kHidden; ++h) {
      float sum = 0;
      for (int i = 0; i < kInputs; ++i) sum += w1[h * kInputs + i] * x[b][i];
      hidden[b][h] = tanhf(sum);
    }
  }
}

static double second_forward(const float* w2) {
  double loss = 0;
  for (int b = 0; b < kBatch; ++b) {
    float sum = 0;
    for (int h = 0; h < kHidden; ++h) sum += w2[h] * hidden[b][h];
    error[b] = sum - y[b];
    loss += error[b] * error[b] / kBatch;
  }
  return loss;
}

static void second_backward(const float* w2, float* gradient) {
  for (int h = 0; h < kHidden; ++h) {
    gradient[h] = 0;
    for (int b = 0; b < kBatch; ++b) {
      const float slope = 2 * error[b] / kBatch;
      gradient[h] += slope * hidden[b][h];
      hidden_gradient[b][h] = slope * w2[h] * (1 - hidden[b][h] * hidden[b][h]);
    }
  }
}

static void first_backward(float* gradient) {
  for (int h = 0; h < kHidden; ++h) {
    for (int i = 0; i < kInputs; ++i) {
      float sum = 0;
      for (int b = 0; b < kBatch; ++b) sum += hidden_gradient[b][h] * x[b][i];
      gradient[h * kInputs + i] = sum;
    }
  }
}

/* Gathers a unit and waits for it. Gives its only parameter and, for the backward pass, the place of its
 * gradient. */
static void acquire(forebay_device* device, forebay_engine* engine, int32_t unit, float** weights,
                    float** gradient) {
  int32_t accumulate = 0; /* Not 0: add to the gradient. Each is written whole, once a step, so it stays 0. */
  void* address = NULL;
  check(forebay_acquire(engine, unit, gradient != NULL, NULL));
  check(forebay_stream_synchronize(device, NULL));
  if (weights != NULL) {
    check(forebay_parameter(engine, unit, 0, &address));
    *weights = address;
  }
  if (gradient != NULL) {
    check(forebay_gradient(engine, unit, 0, &address, &accumulate));
    *gradient = address;
  }
}

static void train(int rank, int stage, const char* store) {
  forebay_options* options;
  forebay_device* device;
  forebay_communicator* communicator;
  forebay_engine* engine;
  check(forebay_options_create(&options));
  set(options, "rank", rank);
  set(options, "size", kRanks);
  set(options, "stage", stage);
  check(forebay_options_set(options, "store", store));
  check(forebay_device_open("host", options, &device));
  check(forebay_communicator_create(device, options, NULL, NULL, &communicator));
  check(forebay_engine_create(device, communicator, NULL, NULL, options, &engine));

  /* Describe. The first layer's backward pass reads no weights, so nothing is gathered for it. */
  int32_t first, second, w1, w2;
  check(forebay_engine_add_unit(engine, "first", FOREBAY_BACKWARD_READS_NOTHING, &first));
  check(forebay_engine_add_unit(engine, "second", 0, &second));
  check(forebay_engine_add_parameter(engine, first, "w1", kHidden * kInputs, 0, 0, &w1));
  check(forebay_engine_add_parameter(engine, second, "w2", kHidden, 0, 0, &w2));
  check(forebay_engine_commit(engine));

  float values[kHidden * kInputs];
  for (int i = 0; i < kHidden * kInputs; ++i) values[i] = 0.3f * sinf(7.0f * (float)i);
  check(forebay_engine_set(engine, first, w1, FOREBAY_FP32, values, 0, kHidden * kInputs));
  check(forebay_engine_set(engine, second, w2, FOREBAY_FP32, values, 0, kHidden));
  check(forebay_hyperparameter(engine, 0, "lr", 0.02));
  check(forebay_hyperparameter(engine, FOREBAY_WHOLE_STEP, "clip", 1.0));

  forebay_step_result result;
  double first_loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    float *weights, *gradient;
    check(forebay_step_begin(engine));
    check(forebay_micro_step_begin(engine, 0));
    acquire(device, engine, first, &weights, NULL);
    make_batch(rank, step);
    first_forward(weights);
    check(forebay_release(engine, first, NULL));
    acquire(device, engine, second, &weights, NULL);
    const double loss = second_forward(weights);
    check(forebay_release(engine, second, NULL));
    acquire(device, engine, second, &weights, &gradient);
    second_backward(weights, gradient);
    check(forebay_release(engine, second, NULL));
    acquire(device, engine, first, NULL, &gradient);
    first_backward(gradient);
    check(forebay_release(engine, first, NULL));
    check(forebay_hyperparameter(engine, FOREBAY_WHOLE_STEP, "metric", loss / kRanks));
    check(forebay_step(engine, &result, sizeof(result)));
    if (step == 0) first_loss = result.metric_sum;
  }
  char digest[33];
  uint64_t bytes;
  check(forebay_engine_digest(engine, digest));
  check(forebay_engine_number(engine, "plan.bytes.model_states", &bytes));
  if (rank == 0) {
    printf("stage %d: loss %.4f -> %.4f, %llu bytes of model states per rank, digest %s\n", stage, first_loss,
           result.metric_sum, (unsigned long long)bytes, digest);
  }
  /* In any order: each handle keeps the handles that it was made from. */
  forebay_options_destroy(options);
  forebay_device_close(device);
  forebay_communicator_destroy(communicator);
  forebay_engine_destroy(engine);
}

int main(void) {
  int failed = 0;
  for (int stage = 0; stage <= 3; stage += 3) {
    char store[] = "/tmp/from-c.XXXXXX";
    if (mkdtemp(store) == NULL) return 1;
    for (int rank = 0; rank < kRanks; ++rank) {
      if (fork() == 0) {
        train(rank, stage, store);
        return 0;
      }
    }
    for (int status = 0; wait(&status) > 0;) failed |= status != 0;
    rmdir(store);
  }
  return failed;
}
