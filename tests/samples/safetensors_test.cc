// The safetensors reader and writer: written values come back, and invalid files are refused.

#include "output/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "model/random.h"
#include "output/huggingface.h"
#include "output/output_file.h"
#include "output/weight_files.h"
#include "tests/support/temporary_directory.h"
#include "trainer/initial.h"

namespace {

// The number of the next fsync() of this thread that fails, or 0. The library's calls come here.
thread_local int failing_fsync = 0;

}  // namespace

extern "C" int fsync(int file) {
  if (failing_fsync > 0 && --failing_fsync == 0) {
    errno = EIO;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_fsync, file));
}

namespace {

// The same for close(): it closes and reports a failure, as a file system over a network does.
thread_local int failing_close = 0;

}  // namespace

extern "C" int close(int file) {
  const auto result = static_cast<int>(::syscall(SYS_close, file));
  if (failing_close == 0 || --failing_close > 0) return result;
  errno = EIO;
  return -1;
}

namespace forebay::gpt {
namespace {

namespace fs = std::filesystem;

class Safetensors : public ::testing::Test {
 protected:
  Safetensors() { directory_ = forebay::testing::make_temporary_directory("safetensors"); }
  ~Safetensors() override { fs::remove_all(directory_); }

  std::string path(const std::string& name = "file.safetensors") const {
    return (directory_ / name).string();
  }

  // A file with this header and this many bytes of data.
  std::string write(const std::string& header, std::size_t data_bytes) const {
    std::string content(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) content[i] = static_cast<char>(header.size() >> (8 * i));
    return write_raw(content + header + std::string(data_bytes, '\0'));
  }
  std::string write_raw(const std::string& content) const {
    std::ofstream(path(), std::ios::binary) << content;
    return path();
  }

  // The error of reading `file`; fails when there is none.
  static Status error_of(const std::string& file) {
    try {
      const SafetensorsReader reader(file);
    } catch (const Error& error) {
      return error.status();
    }
    ADD_FAILURE() << "accepted";
    return {};
  }

  void expect_corrupt(const std::string& header, std::size_t data_bytes, const std::string& found) const {
    const Status status = error_of(write(header, data_bytes));
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << header;
    EXPECT_NE(status.message().find(found), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(path()), std::string::npos) << status.message();
  }

  fs::path directory_;
};

TEST_F(Safetensors, WhatIsWrittenComesBack) {
  const std::vector<float> a = {1.5F, -2.0F, 3.25F, 0.0F, -0.0F, 1e-40F};
  const std::vector<float> b = {7.0F};
  SafetensorsWriter writer(path(), {{"z", {2, 3}}, {"a", {1}}, {"nothing", {0, 4}}});
  writer.write(a);
  writer.write(b);
  writer.write({});
  writer.finish();

  SafetensorsReader reader(path());

  ASSERT_EQ(reader.tensors().size(), 3u);
  EXPECT_EQ(reader.tensors().at("z").shape, (std::vector<std::uint64_t>{2, 3}));
  EXPECT_EQ(reader.read("z"), a);
  EXPECT_EQ(reader.read("a"), b);
  EXPECT_TRUE(reader.read("nothing").empty());
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()), 1)
      << "temporary left";
}

TEST_F(Safetensors, OnlyAFileForTransformersNamesItsFormat) {
  for (const bool for_transformers : {false, true}) {
    SafetensorsWriter(path(), {{"nothing", {0}}}, for_transformers).finish();
    std::ifstream stream(path(), std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    EXPECT_EQ(text.find(R"("format":"pt"})") != std::string::npos, for_transformers) << text;
    EXPECT_NE(text.find(R"("__metadata__":{"exported_by":"forebay-gpt")"), std::string::npos) << text;
  }
}

TEST_F(Safetensors, ATensorThatCannotBeReadLeavesTheOthers) {
  SafetensorsWriter writer(path(), {{"a", {1}}, {"b", {1}}});
  writer.write(std::vector<float>{1, 2});
  writer.finish();
  SafetensorsReader reader(path());
  fs::resize_file(path(), fs::file_size(path()) - 1);
  EXPECT_THROW(reader.read("b"), Error);
  EXPECT_EQ(reader.read("a"), std::vector<float>{1});
}

TEST_F(Safetensors, MoreValuesThanTheHeaderHasAreADefect) {
  SafetensorsWriter writer(path(), {{"a", {1}}});
  EXPECT_DEATH(writer.write(std::vector<float>{1, 2}), "more than the header");
}

TEST_F(Safetensors, AnUnfinishedExportLeavesNothing) {
  { SafetensorsWriter writer(path(), {{"a", {4}}}); }

  EXPECT_TRUE(fs::is_empty(directory_));
}

TEST_F(Safetensors, HalvesAreWidened) {
  std::string content =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},"h":{"dtype":"F16","shape":[1],"data_offsets":[2,4]}})";
  std::string length(8, '\0');
  length[0] = static_cast<char>(content.size());
  write_raw(length + content + std::string("\xC0\x3F\x00\xBE", 4));

  SafetensorsReader reader(path());

  EXPECT_EQ(reader.read("b"), std::vector<float>{1.5F});
  EXPECT_EQ(reader.read("h"), std::vector<float>{-1.5F});
}

TEST_F(Safetensors, BrokenFilesAreRefusedWithWhatIsWrong) {
  const auto entry = [](const std::string& shape, const std::string& offsets,
                        const std::string& dtype = "F32") {
    return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
  };
  expect_corrupt("{", 0, "not a JSON object");
  expect_corrupt("[]", 0, "not a JSON object");
  expect_corrupt(R"({"a":3})", 0, "tensor a");
  expect_corrupt(R"({"a":{}})", 0, "tensor a");
  expect_corrupt("{\"a\":" + entry("[1]", "[0]") + "}", 4, "tensor a");
  expect_corrupt("{\"a\":" + entry("[-1]", "[0,4]") + "}", 4, "tensor a");
  expect_corrupt("{\"a\":" + entry("[1.5]", "[0,4]") + "}", 4, "tensor a");
  expect_corrupt("{\"a\":" + entry("[2]", "[0,4]") + "}", 4, "shape");
  expect_corrupt("{\"a\":" + entry("[1]", "[4,0]") + "}", 4, "not within");
  expect_corrupt("{\"a\":" + entry("[2]", "[0,8]") + "}", 4, "truncated");
  expect_corrupt("{\"a\":" + entry("[1]", "[0,18446744073709551615]") + "}", 4, "not within");
  expect_corrupt("{\"a\":" + entry("[4294967296,4294967296]", "[0,0]") + "}", 0, "shape");
  expect_corrupt("{\"a\":" + entry("[4611686018427387905]", "[0,4]") + "}", 4, "shape");
  expect_corrupt("{\"a\":" + entry("[1]", "[0,4]") + ",\"b\":" + entry("[1]", "[0,4]") + "}", 4, "overlap");
  expect_corrupt("{\"a\":" + entry("[1]", "[0,4]") + ",\"b\":" + entry("[1]", "[8,12]") + "}", 12, "hole");
  expect_corrupt("{\"a\":" + entry("[1]", "[0,4]") + "}", 8, "belong to no tensor");
  expect_corrupt("{\"a\":" + entry("[1]", "[0,4]") + ",\"a\":" + entry("[1]", "[0,4]") + "}", 4, "twice");
  EXPECT_EQ(error_of(write("{\"a\":" + entry("[1]", "[0,8]", "F64") + "}", 8)).code(),
            StatusCode::kUnsupported);
  EXPECT_EQ(error_of(write_raw("")).code(), StatusCode::kCorruption);
  EXPECT_EQ(error_of(write_raw("1234567")).code(), StatusCode::kCorruption);
  EXPECT_EQ(error_of(write_raw(std::string("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 8))).code(),
            StatusCode::kCorruption);
  EXPECT_EQ(error_of(path("missing")).code(), StatusCode::kIoError);
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_NE(error_of(path("pipe")).message().find("it is not a regular file"), std::string::npos);
  // An empty tensor takes no place.
  SafetensorsReader empty(
      write("{\"a\":" + entry("[1]", "[0,4]") + ",\"b\":" + entry("[0]", "[0,0]") + "}", 4));
  EXPECT_EQ(empty.tensors().size(), 2u);
  EXPECT_EQ(error_of(directory_.string()).code(), StatusCode::kIoError);
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
  SafetensorsWriter writer(path(), {{"a", {3}}, {"b", {2, 2}}});
  writer.write(std::vector<float>(3, 1.0F));
  writer.write(std::vector<float>(4, 2.0F));
  writer.finish();
  std::ifstream stream(path(), std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());

  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_EQ(error_of(write_raw(whole.substr(0, length))).code(), StatusCode::kCorruption) << length;
  }
}

// After a few changed bytes in the header, the reader refuses the file or can read every tensor that it
// names.
TEST_F(Safetensors, ChangedHeadersAreRefusedOrConsistent) {
  const char* text = std::getenv("FOREBAY_SEED");
  const std::uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : 97;
  std::printf("FOREBAY_SEED=%llu\n", static_cast<unsigned long long>(seed));
  SafetensorsWriter writer(path(), {{"a", {3}}, {"b", {2, 2}}, {"c", {1}}});
  writer.write(std::vector<float>(3, 1.0F));
  writer.write(std::vector<float>(4, 2.0F));
  writer.write(std::vector<float>(1, 3.0F));
  writer.finish();
  std::ifstream stream(path(), std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  const std::size_t header_end = whole.size() - 8 * sizeof(float);
  const std::string alphabet = "0123456789{}[]\",:abF3216- ";

  int refused = 0;
  constexpr int kRounds = 400;
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    std::string changed = whole;
    const std::uint64_t changes = 1 + draw(seed, round, 0) % 3;
    for (std::uint64_t i = 0; i < changes; ++i) {
      const std::size_t place = draw(seed, round, 3 * i + 1) % header_end;
      const std::uint64_t value = draw(seed, round, 3 * i + 2);
      changed[place] =
          value % 4 == 0 ? static_cast<char>(value >> 8) : alphabet[(value >> 8) % alphabet.size()];
    }
    write_raw(changed);
    try {
      SafetensorsReader reader(path());
      for (const auto& [name, tensor] : reader.tensors()) EXPECT_EQ(reader.read(name).size(), tensor.count);
    } catch (const Error&) {
      ++refused;
    }
  }

  EXPECT_GT(refused, kRounds / 2);
  EXPECT_LT(refused, kRounds);
}

TEST_F(Safetensors, InitialWeightsMustBeThoseOfTheModel) {
  const std::vector<GptUnit> units = {{"u", {{.name = "x", .shape = {2, 2}}, {.name = "y", .shape = {3}}}}};
  const auto message_with = [&](const std::vector<TensorHeader>& tensors) {
    SafetensorsWriter writer(path(), tensors);
    for (const TensorHeader& tensor : tensors) {
      std::size_t count = 1;
      for (const std::size_t extent : tensor.shape) count *= extent;
      writer.write(std::vector<float>(count, 1.0F));
    }
    writer.finish();
    try {
      set_from_file(units, path(), [](std::size_t, std::size_t, std::span<const float>) {});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kCorruption);
      return error.status().message();
    }
    return std::string("accepted");
  };

  EXPECT_EQ(message_with({{"y", {3}}, {"x", {2, 2}}}), "accepted");
  // Old files of GPT-2 have the mask of attention too.
  EXPECT_EQ(message_with({{"y", {3}}, {"x", {2, 2}}, {"h.0.attn.bias", {1, 1, 4, 4}}}), "accepted");
  EXPECT_NE(message_with({{"x", {2, 2}}}).find("tensor y is missing"), std::string::npos);
  EXPECT_NE(message_with({{"x", {4}}, {"y", {3}}}).find("tensor x has the shape [4], not [2, 2]"),
            std::string::npos);
  EXPECT_NE(message_with({{"x", {2, 2}}, {"y", {3}}, {"w", {1}}}).find("tensor w is not one of this model"),
            std::string::npos);
}

// transformers ties them only where the file has the same values for both.
TEST_F(Safetensors, AHeadThatIsNotTheEmbeddingIsRefusedWhereTheyAreTied) {
  const auto message_with = [&](const char* table, float last, bool has_head) {
    std::vector<GptUnit> units = {{"u", {{.name = table, .shape = {2, 2}}}}};
    if (has_head) units[0].parameters.push_back({.name = "lm_head.weight", .shape = {2, 2}});
    SafetensorsWriter writer(path(), {{published_name(table), {2, 2}}, {"lm_head.weight", {2, 2}}});
    writer.write(std::vector<float>{1, 2, 3, 4});
    writer.write(std::vector<float>{1, 2, 3, last});
    writer.finish();
    try {
      set_from_file(units, path(), [](std::size_t, std::size_t, std::span<const float>) {});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kUnsupported);
      return error.status().message();
    }
    return std::string("accepted");
  };
  for (const char* const table : {"wte.weight", "model.embed_tokens.weight"}) {
    EXPECT_EQ(message_with(table, 4, false), "accepted");
    EXPECT_EQ(message_with(table, 5, true), "accepted");
    const std::string refusal = message_with(table, 5, false);
    EXPECT_NE(refusal.find(std::string("its lm_head.weight has other values than its ") + table),
              std::string::npos)
        << refusal;
  }
}

TEST_F(Safetensors, ADeepOrHugeHeaderIsRefusedAtOnce) {
  expect_corrupt(std::string(10 << 20, '['), 0, "nested deeper than 3");
  expect_corrupt(R"({"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", 4, "nested deeper than 3");
  expect_corrupt(std::string((16 << 20) + 1, ' '), 0, "more than the 16777216 that are read");
  // Brackets in names are no levels.
  const SafetensorsReader reader(write(R"({"[[[\"{[":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4));
}

TEST_F(Safetensors, TextOfTheFileIsShownShortAndHarmless) {
  const std::string header = R"({"\u001b]0;title\u0007":{"dtype":")" + std::string(1000, 'x') +
                             R"(\u001b","shape":[1],"data_offsets":[0,4]}})";
  const std::string message = error_of(write(header, 4)).message();
  EXPECT_EQ(message.find('\x1b'), std::string::npos) << message;
  EXPECT_NE(message.find("\\x1b]0;title\\x07"), std::string::npos) << message;
  EXPECT_LT(message.size(), 400 + path().size()) << message;
}

TEST_F(Safetensors, AnIndexThatLeadsElsewhereIsRefused) {
  const auto refused = [&](const std::string& index, const std::string& part) {
    std::ofstream(path("model.safetensors.index.json")) << index;
    try {
      const WeightFiles files(directory_.string());
      ADD_FAILURE() << index << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  write(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})", 4);
  refused("[", "not an object");
  refused(std::string(100, '[') + std::string(100, ']'), "nested deeper");
  refused("{}", "no weight_map");
  refused(R"({"weight_map": {"a": 3}})", "has no file");
  refused(R"({"weight_map": {"a": "../file.safetensors"}})", "no file name");
  refused(R"({"weight_map": {"a": ".."}})", "no file name");
  refused(R"({"weight_map": {"b": "file.safetensors"}})", "is not in file.safetensors");
  refused(R"({"weight_map": {"a": "none.safetensors"}})", "No such file");
  fs::copy_file(path("file.safetensors"), path("copy.safetensors"));
  refused(R"({"weight_map": {"a": "file.safetensors", "b": "copy.safetensors"}})",
          "which another file of the model has too");
  fs::remove(path("model.safetensors.index.json"));
  EXPECT_THROW(WeightFiles(directory_.string()), Error);
}

TEST_F(Safetensors, ShardsComeBack) {
  const std::vector<TensorHeader> headers = {{"a", {3}}, {"b", {2, 2}}, {"c", {1}}};
  const std::vector<float> values = {1, 2, 3, 4, 5, 6, 7, 8};
  for (const std::uint64_t shard_bytes : {0, 1, 16, 20, 28}) {
    const std::string directory = path("model" + std::to_string(shard_bytes));
    prepare_model_directory(directory);
    ModelDirectoryWriter writer(directory, headers, shard_bytes);
    writer.write(std::span(values).first(3));
    writer.write(std::span(values).subspan(3, 4));
    writer.write(std::span(values).last(1));
    writer.finish();

    WeightFiles files(directory);
    EXPECT_EQ(files.names(), (std::vector<std::string>{"a", "b", "c"}));
    EXPECT_EQ(files.read("b"), (std::vector<float>{4, 5, 6, 7}));
    EXPECT_EQ(files.read("c"), (std::vector<float>{8}));
    EXPECT_THROW(prepare_model_directory(directory), Error);
  }
}

TEST_F(Safetensors, EachShardHoldsAsMuchAsTheFirst) {
  const std::string directory = path("model");
  prepare_model_directory(directory);
  ModelDirectoryWriter writer(directory, {{"a", {1}}, {"b", {1}}, {"c", {1}}, {"d", {1}}, {"e", {1}}}, 8);
  for (const float value : {1.0f, 2.0f, 3.0f, 4.0f, 5.0f}) writer.write(std::span(&value, 1));
  writer.finish();
  EXPECT_EQ(std::distance(fs::directory_iterator(directory), {}), 4) << "three shards and their index";
  EXPECT_EQ(WeightFiles(directory).read("d"), std::vector<float>{4});
}

// Some drives report only at the sync that they lost the bytes.
TEST_F(Safetensors, AFileThatCannotBeSyncedIsAFailureAndTheOldOneStays) {
  write_raw("old");
  SafetensorsWriter writer(path(), {{"a", {1}}});
  writer.write(std::vector<float>{1});
  failing_fsync = 1;
  try {
    writer.finish();
    ADD_FAILURE() << "it is written";
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), StatusCode::kIoError);
    EXPECT_NE(std::string(error.what()).find("syncing failed: Input/output error"), std::string::npos)
        << error.what();
  }
  failing_fsync = 0;

  EXPECT_EQ(fs::file_size(path()), 3u);
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), {}), 1);
}

// A file system over a network may report at the close that it lost the bytes.
TEST_F(Safetensors, AFileThatCannotBeClosedIsAFailure) {
  OutputFile file(path());
  file.write("text", 4);
  failing_close = 1;
  try {
    file.finish();
    ADD_FAILURE() << "it is written";
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), StatusCode::kIoError);
    EXPECT_EQ(error.status().message(),
              "cannot write " + path() +
                  ": closing failed: Input/output error; give a path in a directory that exists, may be "
                  "written and has room");
  }
  failing_close = 0;
}

// The system writes the part that fits, and then refuses the rest.
TEST_F(Safetensors, AFileBeyondTheLimitOfTheProcessIsAFailureWithItsBytes) {
  OutputFile file(path());
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small{.rlim_cur = 5, .rlim_max = limit.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  std::string message;
  ::setrlimit(RLIMIT_FSIZE, &small);
  try {
    file.write("abc", 3);
    file.write("defgh", 5);
  } catch (const Error& error) {
    message = error.status().message();
  }
  ::setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(message, "cannot write " + path() +
                         ": writing failed: File too large after 5 bytes; raise the limit of a file's size "
                         "(ulimit -f)");
  EXPECT_TRUE(fs::is_empty(directory_)) << "the temporary file stayed";
}

TEST_F(Safetensors, TheConfigOfAModelComesBack) {
  // No two figures are equal.
  GptShape gpt2{.layers = 3, .hidden = 40, .heads = 5, .sequence = 6, .vocabulary = 700, .positions = 8};
  GptShape llama{.layers = 3,
                 .hidden = 48,
                 .heads = 6,
                 .sequence = 7,
                 .vocabulary = 700,
                 .positions = 9,
                 .inner = 64,
                 .kind = ModelKind::kLlama,
                 .kv_heads = 2,
                 .rope_theta = 500,
                 .norm_epsilon = 1e-4,
                 .tied_head = true};
  EXPECT_EQ(model_config(gpt2), R"({
  "architectures": [
    "GPT2LMHeadModel"
  ],
  "model_type": "gpt2",
  "activation_function": "gelu_new",
  "bos_token_id": null,
  "dtype": "float32",
  "eos_token_id": null,
  "layer_norm_epsilon": 1e-05,
  "n_embd": 40,
  "n_head": 5,
  "n_inner": null,
  "n_layer": 3,
  "n_positions": 8,
  "tie_word_embeddings": true,
  "vocab_size": 700
}
)");
  EXPECT_EQ(model_config(llama), R"({
  "architectures": [
    "LlamaForCausalLM"
  ],
  "model_type": "llama",
  "attention_bias": false,
  "bos_token_id": null,
  "dtype": "float32",
  "eos_token_id": null,
  "head_dim": 8,
  "hidden_act": "silu",
  "hidden_size": 48,
  "intermediate_size": 64,
  "max_position_embeddings": 9,
  "mlp_bias": false,
  "num_attention_heads": 6,
  "num_hidden_layers": 3,
  "num_key_value_heads": 2,
  "rms_norm_eps": 0.0001,
  "rope_parameters": {
    "rope_theta": 500.0,
    "rope_type": "default"
  },
  "rope_theta": 500.0,
  "tie_word_embeddings": true,
  "vocab_size": 700
}
)");
  for (const GptShape& shape : {gpt2, llama}) {
    std::ofstream(path("config.json")) << model_config(shape);
    const GptShape read = shape_of_model(directory_.string(), {.sequence = shape.sequence});
    EXPECT_EQ(read.layers, shape.layers);
    EXPECT_EQ(read.hidden, shape.hidden);
    EXPECT_EQ(read.heads, shape.heads);
    EXPECT_EQ(read.sequence, shape.sequence);
    EXPECT_EQ(read.vocabulary, shape.vocabulary);
    EXPECT_EQ(read.positions, shape.positions);
    EXPECT_EQ(read.inner, shape.inner);
    EXPECT_EQ(read.kind, shape.kind);
    EXPECT_EQ(read.kv_head_count(), shape.kv_head_count());
    EXPECT_EQ(read.rope_theta, shape.rope_theta);
    EXPECT_EQ(read.norm_epsilon, shape.norm_epsilon);
    EXPECT_EQ(read.tied_head, shape.tied_head);
  }
  gpt2.inner = 100;
  std::ofstream(path("config.json")) << model_config(gpt2);
  EXPECT_EQ(shape_of_model(directory_.string(), {}).inner, 100u);
}

TEST_F(Safetensors, AConfigOfWhatThereIsNotIsRefusedByItsKey) {
  const auto found = [&](const GptShape& shape, const char* key, const nlohmann::json& value) {
    nlohmann::json config = nlohmann::json::parse(model_config(shape));
    if (value == "absent") {
      config.erase(key);
    } else {
      config[key] = value;
    }
    std::ofstream(path("config.json")) << config;
    try {
      static_cast<void>(shape_of_model(directory_.string(), {}));
      return std::string("taken");
    } catch (const Error& error) {
      const std::string begin = path("config.json") + ": " + key + " is ";
      const std::string message = error.status().message();
      EXPECT_EQ(message.find(begin), 0u) << message;
      return message.substr(begin.size(), message.find(';') - begin.size());
    }
  };
  const GptShape gpt2;
  const GptShape llama{.kind = ModelKind::kLlama};
  const auto no_number = [](std::string_view key) {
    return std::string(", not a number from 1 to ") +
           (key.ends_with("_layer") || key.ends_with("_layers") ? "65536" : "16777216");
  };
  for (const char* const key : {"n_layer", "n_embd", "n_head", "n_positions", "vocab_size"}) {
    EXPECT_EQ(found(gpt2, key, 0), "0" + no_number(key)) << key;
    EXPECT_EQ(found(gpt2, key, nullptr), "missing" + no_number(key)) << key;
    EXPECT_EQ(found(gpt2, key, "absent"), "missing" + no_number(key)) << key;
    EXPECT_EQ(found(gpt2, key, 16777217), "16777217" + no_number(key)) << key;
    EXPECT_EQ(found(gpt2, key, 1.5), "1.5" + no_number(key)) << key;
  }
  EXPECT_EQ(found(gpt2, "n_layer", 65537), "65537" + no_number("n_layer"));
  EXPECT_EQ(found(gpt2, "n_layer", 65536), "taken");
  EXPECT_EQ(found(gpt2, "vocab_size", 16777216), "taken");
  EXPECT_EQ(found(gpt2, "n_inner", "absent"), "taken");
  EXPECT_EQ(found(gpt2, "n_inner", 0), "0" + no_number("n_inner"));
  for (const char* const key : {"num_hidden_layers", "hidden_size", "num_attention_heads",
                                "intermediate_size", "max_position_embeddings", "vocab_size"})
    EXPECT_EQ(found(llama, key, 0), "0" + no_number(key)) << key;
  EXPECT_EQ(found(llama, "num_key_value_heads", nullptr), "taken");

  const auto only = [](const std::string& value, const std::string& known) {
    return value + ", and forebay-gpt has models with " + known + " only";
  };
  EXPECT_EQ(found(gpt2, "activation_function", "gelu_pytorch_tanh"), "taken");
  EXPECT_EQ(found(gpt2, "activation_function", "relu"),
            only("\"relu\"", "\"gelu_new\" or \"gelu_pytorch_tanh\""));
  EXPECT_EQ(found(gpt2, "layer_norm_epsilon", 1e-6), only("1e-06", "1e-05"));
  EXPECT_EQ(found(gpt2, "scale_attn_weights", false), only("false", "true"));
  EXPECT_EQ(found(gpt2, "scale_attn_by_inverse_layer_idx", true), only("true", "false"));
  EXPECT_EQ(found(gpt2, "add_cross_attention", true), only("true", "false"));
  EXPECT_EQ(found(gpt2, "tie_word_embeddings", false), only("false", "true"));
  for (const GptShape& shape : {gpt2, llama}) {
    EXPECT_EQ(found(shape, "is_causal", false), only("false", "true"));
    EXPECT_EQ(found(shape, "is_causal", "absent"), "taken");
  }
  EXPECT_EQ(found(llama, "hidden_act", "gelu"), only("\"gelu\"", "\"silu\""));
  EXPECT_EQ(found(llama, "attention_bias", true), only("true", "false"));
  EXPECT_EQ(found(llama, "mlp_bias", true), only("true", "false"));
  EXPECT_EQ(found(llama, "pretraining_tp", 2), only("2", "1"));
  EXPECT_EQ(found(llama, "head_dim", 33), only("33", "none or 32"));
  EXPECT_EQ(found(llama, "head_dim", nullptr), "taken");

  const std::string positive = ", not a number above 0";
  EXPECT_EQ(found(llama, "rms_norm_eps", 0), "0" + positive);
  EXPECT_EQ(found(llama, "rms_norm_eps", 1.5), "1.5" + positive);
  EXPECT_EQ(found(llama, "rms_norm_eps", 1), "taken");
  EXPECT_EQ(found(llama, "rope_theta", -1), "-1" + positive);
  EXPECT_EQ(found(llama, "rope_scaling", {{"rope_type", "linear"}}).substr(0, 22),
            "{\"rope_type\":\"linear\"}");
  EXPECT_EQ(found(llama, "rope_scaling", {{"type", "default"}}), "taken");
}

TEST_F(Safetensors, NamesArePublishedAsTransformersHasThem) {
  EXPECT_EQ(published_name("wte.weight"), "transformer.wte.weight");
  EXPECT_EQ(published_name("h.0.attn.c_attn.bias"), "transformer.h.0.attn.c_attn.bias");
  EXPECT_EQ(published_name("model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(published_name("lm_head.weight"), "lm_head.weight");
  for (const char* const derived : {"transformer.h.0.attn.bias", "h.3.attn.masked_bias",
                                    "model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"})
    EXPECT_TRUE(is_derived_tensor(derived)) << derived;
  for (const char* const own :
       {"h.0.attn.c_attn.bias", "lm_head.bias", "attn.bias.weight", "transformer.lm_head.weight"})
    EXPECT_FALSE(is_derived_tensor(own)) << own;
}

// A directory with one shard has no index; with several, it names the file of each tensor.
TEST_F(Safetensors, TensorsAreDividedOverFilesOfTheirLargestSize) {
  const auto files = [&](std::uint64_t shard_bytes) {
    const fs::path model = directory_ / ("model-" + std::to_string(shard_bytes));
    fs::create_directory(model);
    ModelDirectoryWriter writer(model.string(), {{"a", {2}}, {"b", {1}}, {"c", {3}}}, shard_bytes);
    writer.write(std::vector<float>{1, 2});
    writer.write(std::vector<float>{3});
    writer.write(std::vector<float>{4, 5, 6});
    writer.finish();
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(model)) names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(files(0), Names{"model.safetensors"});
  EXPECT_EQ(files(24), Names{"model.safetensors"}) << "all 24 bytes fit";
  const Names two = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                     "model.safetensors.index.json"};
  EXPECT_EQ(files(23), two);
  EXPECT_EQ(files(12), two);
  EXPECT_EQ(files(11).size(), 4u);
  EXPECT_EQ(files(1).size(), 4u) << "each tensor has a file of its own";
  std::ifstream index(directory_ / "model-12" / "model.safetensors.index.json");
  EXPECT_EQ(nlohmann::json::parse(index).dump(),
            R"({"metadata":{"total_size":24},"weight_map":{"a":"model-00001-of-00002.safetensors",)"
            R"("b":"model-00001-of-00002.safetensors","c":"model-00002-of-00002.safetensors"}})");
}

TEST_F(Safetensors, AModelOfAnotherKindIsRefusedWithTheKindsThatThereAre) {
  std::ofstream(path("config.json")) << R"({"model_type": "mamba"})";
  try {
    shape_of_model(directory_.string(), {});
    ADD_FAILURE() << "it is taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(R"("mamba", and forebay-gpt has models with "gpt2" or "llama")"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace forebay::gpt
