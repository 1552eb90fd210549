/* A GPT-2 that learns the bytes of a file, in C: forward pass, backward pass and AdamW. gpt2.c is plain C,
 * and gpt2_forebay.c is the same program on forebay: any ZeRO stage, offload and number of ranks. The work of
 * a port is `diff gpt2.c gpt2_forebay.c`.
 *
 *   gcc -O2 gpt2.c -lm && ./a.out TEXT
 *   gcc -O2 gpt2_forebay.c $(pkg-config --cflags --libs forebay-c) -lm && ./a.out TEXT stage 3 offload
 * optimizer
 */
#include <forebay/forebay.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kLayers = 3, kHeads = 4, kWidth = 32, kTime = 24, kBatch = 4, kTokens = 256, kSteps = 40 };
enum { kRows = kBatch * kTime, kHeadWidth = kWidth / kHeads };

/* The parameters of the embedding, of each block and of the end, which uses the tokens' embedding again. */
enum { kUnits = kLayers + 2, kEnd = kLayers + 1, kMost = 12 };
enum { kWte, kWpe };
enum {
  kNorm1,
  kNorm1Bias,
  kQkv,
  kQkvBias,
  kProj,
  kProjBias,
  kNorm2,
  kNorm2Bias,
  kUp,
  kUpBias,
  kDown,
  kDownBias
};

typedef struct {
  const char* name;
  int count;
  float first, spread; /* Initial values: first, plus a random number below spread. */
} Parameter;
static const Parameter kEmbedding[kMost] = {{"wte", kTokens* kWidth, 0, 0.04F},
                                            {"wpe", kTime* kWidth, 0, 0.04F}};
static const Parameter kBlock[kMost] = {
    {"ln_1.weight", kWidth, 1, 0},
    {"ln_1.bias", kWidth, 0, 0},
    {"attn.c_attn.weight", 3 * kWidth* kWidth, 0, 0.2F},
    {"attn.c_attn.bias", 3 * kWidth, 0, 0},
    {"attn.c_proj.weight", kWidth* kWidth, 0, 0.1F},
    {"attn.c_proj.bias", kWidth, 0, 0},
    {"ln_2.weight", kWidth, 1, 0},
    {"ln_2.bias", kWidth, 0, 0},
    {"mlp.c_fc.weight", 4 * kWidth* kWidth, 0, 0.2F},
    {"mlp.c_fc.bias", 4 * kWidth, 0, 0},
    {"mlp.c_proj.weight", 4 * kWidth* kWidth, 0, 0.1F},
    {"mlp.c_proj.bias", kWidth, 0, 0},
};
static const Parameter kFinal[kMost] = {{"ln_f.weight", kWidth, 1, 0}, {"ln_f.bias", kWidth, 0, 0}};

static const Parameter* parameters_of(int unit) {
  return unit == 0 ? kEmbedding : unit == kEnd ? kFinal : kBlock;
}

static float *weights[kUnits][kMost], *gradients[kUnits][kMost];
static forebay_device* device;
static forebay_engine* engine;

/* Activations; the last row of `x` goes into the end. */
typedef struct {
  float norm1[kRows * kWidth], qkv[kRows * 3 * kWidth], weight[kBatch * kHeads * kTime * kTime];
  float mixed[kRows * kWidth], middle[kRows * kWidth], norm2[kRows * kWidth];
  float up[kRows * 4 * kWidth], gelu[kRows * 4 * kWidth];
} Activations;
static Activations layers[kLayers];
static float x[kLayers + 1][kRows * kWidth], last[kRows * kWidth], logits[kRows * kTokens];
static float slope[kRows * kWidth];
static int inputs[kRows], targets[kRows];

/* Layers. Backward passes add to the gradients of weights and to `in_slope`. */

static void linear(float* out, const float* in, const float* w, const float* bias, int width, int out_width) {
  for (int r = 0; r < kRows; ++r) {
    for (int o = 0; o < out_width; ++o) {
      float sum = bias == NULL ? 0 : bias[o];
      for (int i = 0; i < width; ++i) sum += in[r * width + i] * w[o * width + i];
      out[r * out_width + o] = sum;
    }
  }
}

static void linear_backward(const float* out_slope, const float* in, const float* w, int width, int out_width,
                            float* in_slope, float* w_slope, float* bias_slope) {
  for (int r = 0; r < kRows; ++r) {
    for (int o = 0; o < out_width; ++o) {
      const float s = out_slope[r * out_width + o];
      if (bias_slope != NULL) bias_slope[o] += s;
      for (int i = 0; i < width; ++i) {
        in_slope[r * width + i] += s * w[o * width + i];
        w_slope[o * width + i] += s * in[r * width + i];
      }
    }
  }
}

static void moments_of(const float* row, float* mean, float* scale) {
  float sum = 0, square = 0;
  for (int i = 0; i < kWidth; ++i) sum += row[i];
  *mean = sum / kWidth;
  for (int i = 0; i < kWidth; ++i) square += (row[i] - *mean) * (row[i] - *mean);
  *scale = 1 / sqrtf(square / kWidth + 1e-5F);
}

static void norm(float* out, const float* in, const float* gain, const float* bias) {
  for (int r = 0; r < kRows; ++r) {
    float mean, scale;
    moments_of(in + r * kWidth, &mean, &scale);
    for (int i = 0; i < kWidth; ++i)
      out[r * kWidth + i] = (in[r * kWidth + i] - mean) * scale * gain[i] + bias[i];
  }
}

static void norm_backward(const float* out_slope, const float* in, const float* gain, float* in_slope,
                          float* gain_slope, float* bias_slope) {
  for (int r = 0; r < kRows; ++r) {
    const float *s = out_slope + r * kWidth, *row = in + r * kWidth;
    float mean, scale, sum = 0, product = 0;
    moments_of(row, &mean, &scale);
    for (int i = 0; i < kWidth; ++i) {
      const float hat = (row[i] - mean) * scale;
      sum += s[i] * gain[i] / kWidth;
      product += s[i] * gain[i] * hat / kWidth;
      gain_slope[i] += s[i] * hat;
      bias_slope[i] += s[i];
    }
    for (int i = 0; i < kWidth; ++i)
      in_slope[r * kWidth + i] += (s[i] * gain[i] - sum - (row[i] - mean) * scale * product) * scale;
  }
}

/* The places of query, key and value of a position and a head in the rows of `qkv`. */
static int place(int b, int t, int h, int part) {
  return (b * kTime + t) * 3 * kWidth + part * kWidth + h * kHeadWidth;
}

static void attention(float* out, float* weight, const float* qkv) {
  const float scale = 1 / sqrtf(kHeadWidth);
  for (int b = 0; b < kBatch; ++b) {
    for (int h = 0; h < kHeads; ++h) {
      for (int t = 0; t < kTime; ++t) {
        float* w = weight + ((b * kHeads + h) * kTime + t) * kTime;
        float* o = out + (b * kTime + t) * kWidth + h * kHeadWidth;
        float most = -1e30F, sum = 0;
        for (int s = 0; s <= t; ++s) {
          w[s] = 0;
          for (int i = 0; i < kHeadWidth; ++i)
            w[s] += qkv[place(b, t, h, 0) + i] * qkv[place(b, s, h, 1) + i] * scale;
          if (w[s] > most) most = w[s];
        }
        for (int s = 0; s <= t; ++s) sum += w[s] = expf(w[s] - most);
        memset(o, 0, kHeadWidth * sizeof(float));
        for (int s = 0; s <= t; ++s) {
          w[s] /= sum;
          for (int i = 0; i < kHeadWidth; ++i) o[i] += w[s] * qkv[place(b, s, h, 2) + i];
        }
      }
    }
  }
}

static void attention_backward(const float* out_slope, const float* weight, const float* qkv,
                               float* qkv_slope) {
  const float scale = 1 / sqrtf(kHeadWidth);
  for (int b = 0; b < kBatch; ++b) {
    for (int h = 0; h < kHeads; ++h) {
      for (int t = 0; t < kTime; ++t) {
        const float* w = weight + ((b * kHeads + h) * kTime + t) * kTime;
        const float* o = out_slope + (b * kTime + t) * kWidth + h * kHeadWidth;
        float weight_slope[kTime], sum = 0;
        for (int s = 0; s <= t; ++s) {
          weight_slope[s] = 0;
          for (int i = 0; i < kHeadWidth; ++i) {
            weight_slope[s] += o[i] * qkv[place(b, s, h, 2) + i];
            qkv_slope[place(b, s, h, 2) + i] += o[i] * w[s];
          }
          sum += weight_slope[s] * w[s];
        }
        for (int s = 0; s <= t; ++s) {
          const float score_slope = (weight_slope[s] - sum) * w[s] * scale;
          for (int i = 0; i < kHeadWidth; ++i) {
            qkv_slope[place(b, t, h, 0) + i] += score_slope * qkv[place(b, s, h, 1) + i];
            qkv_slope[place(b, s, h, 1) + i] += score_slope * qkv[place(b, t, h, 0) + i];
          }
        }
      }
    }
  }
}

static const float kGelu = 0.7978845608F; /* The root of 2 / pi. */

static float gelu(float u) {
  return 0.5F * u * (1 + tanhf(kGelu * (u + 0.044715F * u * u * u)));
}

static float gelu_slope(float u) {
  const float t = tanhf(kGelu * (u + 0.044715F * u * u * u));
  return 0.5F * (1 + t) + 0.5F * u * (1 - t * t) * kGelu * (1 + 3 * 0.044715F * u * u);
}

/* Units. */

static void embed(void) {
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kWidth; ++i)
      x[0][r * kWidth + i] =
          weights[0][kWte][inputs[r] * kWidth + i] + weights[0][kWpe][r % kTime * kWidth + i];
  }
}

static void embed_backward(void) {
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kWidth; ++i) {
      gradients[0][kWte][inputs[r] * kWidth + i] += slope[r * kWidth + i];
      gradients[0][kWpe][r % kTime * kWidth + i] += slope[r * kWidth + i];
    }
  }
}

static void block(int l) {
  Activations* a = &layers[l];
  float** w = weights[1 + l];
  norm(a->norm1, x[l], w[kNorm1], w[kNorm1Bias]);
  linear(a->qkv, a->norm1, w[kQkv], w[kQkvBias], kWidth, 3 * kWidth);
  attention(a->mixed, a->weight, a->qkv);
  linear(a->middle, a->mixed, w[kProj], w[kProjBias], kWidth, kWidth);
  for (int i = 0; i < kRows * kWidth; ++i) a->middle[i] += x[l][i];
  norm(a->norm2, a->middle, w[kNorm2], w[kNorm2Bias]);
  linear(a->up, a->norm2, w[kUp], w[kUpBias], kWidth, 4 * kWidth);
  for (int i = 0; i < kRows * 4 * kWidth; ++i) a->gelu[i] = gelu(a->up[i]);
  linear(x[l + 1], a->gelu, w[kDown], w[kDownBias], 4 * kWidth, kWidth);
  for (int i = 0; i < kRows * kWidth; ++i) x[l + 1][i] += a->middle[i];
}

/* `slope` is of the block's output before, and of its input afterwards. */
static void block_backward(int l) {
  static float wide[kRows * 4 * kWidth], qkv[kRows * 3 * kWidth], narrow[kRows * kWidth];
  const Activations* a = &layers[l];
  float **w = weights[1 + l], **g = gradients[1 + l];
  memset(wide, 0, sizeof wide);
  linear_backward(slope, a->gelu, w[kDown], 4 * kWidth, kWidth, wide, g[kDown], g[kDownBias]);
  for (int i = 0; i < kRows * 4 * kWidth; ++i) wide[i] *= gelu_slope(a->up[i]);
  memset(narrow, 0, sizeof narrow);
  linear_backward(wide, a->norm2, w[kUp], kWidth, 4 * kWidth, narrow, g[kUp], g[kUpBias]);
  norm_backward(narrow, a->middle, w[kNorm2], slope, g[kNorm2], g[kNorm2Bias]);
  memset(narrow, 0, sizeof narrow);
  linear_backward(slope, a->mixed, w[kProj], kWidth, kWidth, narrow, g[kProj], g[kProjBias]);
  memset(qkv, 0, sizeof qkv);
  attention_backward(narrow, a->weight, a->qkv, qkv);
  memset(narrow, 0, sizeof narrow);
  linear_backward(qkv, a->norm1, w[kQkv], kWidth, 3 * kWidth, narrow, g[kQkv], g[kQkvBias]);
  norm_backward(narrow, x[l], w[kNorm1], slope, g[kNorm1], g[kNorm1Bias]);
}

/* Returns the mean loss; `logits` then holds its slope. */
static double end(void) {
  double loss = 0;
  norm(last, x[kLayers], weights[kEnd][0], weights[kEnd][1]);
  linear(logits, last, weights[0][kWte], NULL, kWidth, kTokens);
  for (int r = 0; r < kRows; ++r) {
    float *row = logits + r * kTokens, most = row[0], sum = 0;
    for (int i = 1; i < kTokens; ++i) most = row[i] > most ? row[i] : most;
    for (int i = 0; i < kTokens; ++i) sum += row[i] = expf(row[i] - most);
    loss -= log(row[targets[r]] / sum) / kRows;
    for (int i = 0; i < kTokens; ++i) row[i] = (row[i] / sum - (i == targets[r])) / kRows;
  }
  return loss;
}

static void end_backward(void) {
  static float narrow[kRows * kWidth];
  memset(narrow, 0, sizeof narrow);
  linear_backward(logits, last, weights[0][kWte], kWidth, kTokens, narrow, gradients[0][kWte], NULL);
  memset(slope, 0, sizeof slope);
  norm_backward(narrow, x[kLayers], weights[kEnd][0], slope, gradients[kEnd][0], gradients[kEnd][1]);
}

/* The passes. */

static void fail(const char* text) {
  fprintf(stderr, "%s\n", text);
  exit(1);
}

static void check(int32_t code) {
  if (code != FOREBAY_OK) fail(forebay_last_error());
}

static void acquire(int unit, int backward) {
  check(forebay_acquire(engine, unit, backward, NULL));
  for (int p = 0; backward && p < kMost && parameters_of(unit)[p].count > 0; ++p)
    check(forebay_zeroed_gradient(engine, unit, p, (void**)&gradients[unit][p]));
  if (backward && unit == kEnd) check(forebay_zeroed_gradient(engine, kEnd, 2, (void**)&gradients[0][kWte]));
  check(forebay_stream_synchronize(device, NULL));
}

static double forward(void) {
  double loss = 0;
  for (int u = 0; u < kUnits; ++u) {
    acquire(u, 0);
    if (u == 0) embed();
    if (u > 0 && u < kEnd) block(u - 1);
    if (u == kEnd) loss = end();
    check(forebay_release(engine, u, NULL));
  }
  return loss;
}

static void backward(void) {
  for (int u = kEnd; u >= 0; --u) {
    acquire(u, 1);
    if (u == kEnd) end_backward();
    if (u > 0 && u < kEnd) block_backward(u - 1);
    if (u == 0) embed_backward();
    check(forebay_release(engine, u, NULL));
  }
}

/* The text, of which batch `index` has kBatch pieces. */
static void make_batch(const unsigned char* text, long bytes, int index) {
  for (int r = 0; r < kRows; ++r) {
    const long first = (long)(index * kBatch + r / kTime) * 7919 % (bytes - kTime);
    inputs[r] = text[first + r % kTime];
    targets[r] = text[first + r % kTime + 1];
  }
}

static const float* initial(const Parameter* parameter) {
  static float values[kTokens * kWidth];
  static unsigned random = 1;
  for (int i = 0; i < parameter->count; ++i) {
    random = random * 1664525U + 1013904223U;
    values[i] = parameter->first + parameter->spread * ((float)(random >> 8) / 16777216 - 0.5F);
  }
  return values;
}

int main(int argc, char** argv) {
  static unsigned char text[1 << 20];
  FILE* file = argc > 1 ? fopen(argv[1], "rb") : NULL;
  const long bytes = file != NULL ? (long)fread(text, 1, sizeof text, file) : 0;
  if (bytes <= kTime) fail("give a text to learn, longer than a few words");
  fclose(file);

  forebay_options* options;
  forebay_communicator* ranks;
  int32_t rank, size, ignored;
  char name[32], digest[33];
  check(forebay_options_create(&options));
  for (int i = 2; i < argc; i += 2) check(forebay_options_set(options, argv[i], argv[i + 1]));
  check(forebay_device_open("host", options, &device));
  check(forebay_communicator_create(device, options, NULL, NULL, &ranks));
  check(forebay_communicator_rank(ranks, &rank, &size));
  check(forebay_engine_create(device, ranks, NULL, NULL, options, &engine));
  for (int u = 0; u < kUnits; ++u) {
    snprintf(name, sizeof name, "%d", u);
    check(forebay_engine_add_unit(engine, name, 0, &ignored));
    for (int p = 0; p < kMost && parameters_of(u)[p].count > 0; ++p) {
      const size_t count = (size_t)parameters_of(u)[p].count;
      snprintf(name, sizeof name, "%d.%s", u, parameters_of(u)[p].name);
      check(forebay_engine_add_parameter(engine, u, name, count, 0, 0, &ignored));
    }
  }
  check(forebay_engine_tie(engine, kEnd, 0, kWte, &ignored));
  check(forebay_engine_commit(engine));
  for (int u = 0; u < kUnits; ++u) {
    for (int p = 0; p < kMost && parameters_of(u)[p].count > 0; ++p) {
      const size_t count = (size_t)parameters_of(u)[p].count;
      check(forebay_engine_set(engine, u, p, FOREBAY_FP32, initial(&parameters_of(u)[p]), 0, count));
      check(forebay_engine_address(engine, u, p, (void**)&weights[u][p]));
    }
  }

  for (int step = 0; step < kSteps; ++step) {
    make_batch(text, bytes, step * size + rank);
    check(forebay_step_begin(engine));
    check(forebay_micro_step_begin(engine, 0));
    const double loss = forward();
    backward();
    check(forebay_step(engine, &(forebay_step_result){0}, sizeof(forebay_step_result)));
    printf("step %d: loss %.6f\n", step, loss);
  }
  check(forebay_engine_digest(engine, digest));
  if (rank == 0) printf("digest %s\n", digest);
  return 0;
}
