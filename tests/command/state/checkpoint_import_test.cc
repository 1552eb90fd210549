// Checkpoints of DeepSpeed's ZeRO and of torch.distributed.checkpoint as states: values, steps and names;
// what is not supported; and damaged and hostile files.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "forebay/conversions.h"
#include "forebay/engine.h"
#include "forebay/error.h"
#include "forebay/saved_state.h"
#include "runtime/command/state/stored_tensor.h"
#include "runtime/command/state/tensor_source.h"
#include "runtime/command/state/torch_file.h"
#include "runtime/command/state/zip_archive.h"
#include "tests/support/local_world.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/torch_writer.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;
using testing::PickleWriter;
using testing::Rank;
using testing::run_ranks;
using testing::TorchWriter;
using testing::ZipWriter;
using Shape = std::vector<std::uint64_t>;
using Values = std::vector<float>;

std::uint64_t count_of(const Shape& shape) {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : shape) count *= extent;
  return count;
}

struct Parameter {
  std::string name;
  Shape shape;
  int number = 0;
};
// Two groups of the optimizer.
const std::vector<std::vector<Parameter>> kGroups = {{{"a", {3, 5}, 0}, {"b", {7}, 1}},
                                                     {{"c.weight", {2, 1, 2}, 2}}};
const Parameter kFrozen = {"f", {6}, 3};

// All different, and most with all bits of a float in use.
float value_of(int parameter, int field, std::uint64_t i) {
  return static_cast<float>(100 * parameter + 10 * field + 1) / 7.0f + static_cast<float>(i) / 3.0f;
}
Values values_of(const Parameter& parameter, int field) {
  Values values;
  for (std::uint64_t i = 0; i < count_of(parameter.shape); ++i)
    values.push_back(value_of(parameter.number, field, i));
  return values;
}

class CheckpointImport : public ::testing::Test {
 protected:
  CheckpointImport() : root_(forebay::testing::make_temporary_directory("import")) {}
  ~CheckpointImport() override { fs::remove_all(root_); }

  static void write(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }
  static std::string text_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }

  // --- DeepSpeed ---

  struct Zero {
    int stage = 2;
    int ranks = 3;
    bool has_moments = true;
    std::uint64_t padding = 0;  // After each parameter, at stages 1 and 2.
    std::string prefix = "zero_pp_rank_";
    double step = 40;
    bool is_amsgrad = false;
    bool has_m = true;
    const char* other = nullptr;  // A tensor that Adam does not keep.
    bool is_plain_sgd = false;    // A momentum that is None.
    bool has_short_moments = false;
    bool has_short_frozen = false;
    bool has_empty_frozen = false;  // In the module, too.
    int resized_rank = -1;          // Its weights of the first group have `extra` elements more, or less.
    std::ptrdiff_t extra = 0;
    bool has_step = true;
    bool lacks_name = false;  // The model's file does not have b among its parameters.
    std::optional<std::int64_t> engine_steps = 42;
  };

  void write_zero(const std::string& directory, const Zero& zero) {
    fs::create_directories(directory);
    for (int rank = 0; rank < zero.ranks; ++rank) {
      write(directory + "/" + zero.prefix + std::to_string(rank) + "_mp_rank_00_optim_states.pt",
            optimizer_file(zero, rank).archive().finish());
      if (zero.stage == 3 || rank == 0) {
        const std::string name = zero.stage == 3 ? "zero_pp_rank_" + std::to_string(rank) + "_" : "";
        write(directory + "/" + name + "mp_rank_00_model_states.pt",
              model_file(zero, rank).archive().finish(/*wide=*/true));
      }
    }
  }

  // The elements of a group that a rank has; with `padded`, those after the last element, too.
  static Values part_of_group(const Zero& zero, std::size_t group, int field, int rank, bool padded) {
    const auto ranks = static_cast<std::size_t>(zero.ranks);
    const auto place = static_cast<std::size_t>(rank);
    Values part;
    if (zero.stage == 3) {
      for (const Parameter& parameter : kGroups[group]) {
        Values all = values_of(parameter, field);
        const std::size_t each = (all.size() + ranks - 1) / ranks;
        all.resize(each * ranks, -1.0f);
        part.insert(part.end(), all.begin() + static_cast<std::ptrdiff_t>(place * each),
                    all.begin() + static_cast<std::ptrdiff_t>((place + 1) * each));
      }
      return part;
    }
    Values all;
    for (const Parameter& parameter : kGroups[group]) {
      const Values values = values_of(parameter, field);
      all.insert(all.end(), values.begin(), values.end());
      all.resize(all.size() + zero.padding, -2.0f);
    }
    const std::size_t each = (all.size() + ranks - 1) / ranks;
    if (padded) all.resize(each * ranks, -1.0f);
    const std::size_t end = std::min(all.size(), (place + 1) * each);
    const std::size_t begin = std::min(end, place * each);
    part.assign(all.begin() + static_cast<std::ptrdiff_t>(begin),
                all.begin() + static_cast<std::ptrdiff_t>(end));
    return part;
  }

  static TorchWriter optimizer_file(const Zero& zero, int rank) {
    TorchWriter file;
    const auto vector = [&](std::size_t group, int field, bool padded) {
      Values values = part_of_group(zero, group, field, rank, padded);
      if (zero.has_short_moments && field > 0) values.pop_back();
      if (rank == zero.resized_rank && group == 0 && field == 0)
        values.resize(values.size() + static_cast<std::size_t>(zero.extra));
      file.tensor(values, {values.size()});
    };
    file.begin_dict().text("optimizer_state_dict").begin_dict();
    // An object of a class: its name and state are data.
    file.text("loss_scaler").raw("cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n)\x81}(");
    file.entry("cur_scale", 1).raw("ub");
    file.text("zero_stage").raw("cdeepspeed.runtime.zero.config\nZeroStageEnum\n");
    file.integer(zero.stage).raw("\x85R");
    file.text(zero.stage == 3 ? "optimizer_state_dict" : "base_optimizer_state").begin_dict();
    file.text("state").begin_dict();
    for (std::size_t group = 0; zero.has_moments && group < kGroups.size(); ++group) {
      file.integer(static_cast<std::int64_t>(group)).begin_dict();
      if (zero.has_step) {
        file.text("step");
        file.tensor({static_cast<float>(zero.step)}, {});
      }
      if (zero.is_plain_sgd) {
        file.text("momentum_buffer").none().end_dict();
        continue;
      }
      if (zero.has_m) {
        file.text("exp_avg");
        vector(group, 1, true);
      }
      if (zero.other != nullptr) {
        file.text(zero.other);
        file.tensor({1}, {1});
      }
      file.text("exp_avg_sq");
      vector(group, 2, true);
      if (zero.is_amsgrad) file.entry("max_exp_avg_sq", 0);
      file.end_dict();
    }
    file.end_dict().text("param_groups").empty_list().end_dict();
    file.text(zero.stage == 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups").begin_list();
    for (std::size_t group = 0; group < kGroups.size(); ++group) vector(group, 0, false);
    file.end_list().text("partition_count");
    if (zero.stage == 3) {
      file.integer(zero.ranks);
    } else {
      file.begin_list().integer(zero.ranks).integer(zero.ranks).end_list();
      if (!zero.lacks_name) {  // Older files have no paddings.
        file.text("param_alignment_paddings").begin_list();
        for (const auto& group : kGroups) file.tuple(Shape(group.size(), zero.padding));
        file.end_list();
      }
    }
    file.end_dict().entry("ds_version", "0.19.8").end_dict();
    return file;
  }

  static TorchWriter model_file(const Zero& zero, int rank) {
    TorchWriter file;
    const auto ranks = static_cast<std::size_t>(zero.ranks);
    Values frozen = values_of(kFrozen, 0);
    file.begin_dict().text("module").raw("ccollections\nOrderedDict\n)R(");
    file.text("seen");
    file.tensor({1, 2, 3}, {3});
    for (const auto& group : kGroups) {
      for (const Parameter& parameter : group) {
        const Values values = zero.stage == 3 ? Values() : values_of(parameter, 0);
        file.text(parameter.name);
        file.tensor(values, zero.stage == 3 ? Shape{0} : parameter.shape);
      }
    }
    file.text("tied");
    file.tensor(values_of(kGroups[0][0], 0), kGroups[0][0].shape);
    file.text("f");
    file.tensor(zero.stage == 3 ? Values() : frozen, {zero.stage == 3 ? 0 : frozen.size()});
    if (zero.has_empty_frozen) {
      file.text("none");
      file.tensor({}, {0});
    }
    file.raw("u").text("buffer_names").begin_list().text("seen").end_list();
    file.text("param_shapes").begin_list();
    for (const auto& group : kGroups) {
      file.raw("ccollections\nOrderedDict\n)R(");
      for (const Parameter& parameter : group) {
        if (!zero.lacks_name || parameter.name != "b") file.text(parameter.name), file.size(parameter.shape);
      }
      file.raw("u");
    }
    file.end_list().text("shared_params").begin_dict().entry("tied", "a").end_dict();
    file.text("frozen_param_shapes").begin_dict().text("f");
    file.size(kFrozen.shape).text("none");
    file.size({0}).end_dict();
    file.text("frozen_param_fragments").begin_dict().text("f");
    if (zero.stage == 3) {
      const std::size_t each = (frozen.size() + ranks - 1) / ranks;
      frozen.resize(each * ranks, -1.0f);
      const auto begin = frozen.begin() + static_cast<std::ptrdiff_t>(each * static_cast<std::size_t>(rank));
      const std::size_t written = zero.has_short_frozen ? each - 1 : each;
      file.tensor(Values(begin, begin + static_cast<std::ptrdiff_t>(written)), {written});
    } else {
      file.tensor(frozen, {frozen.size()});
    }
    file.text("none");
    file.tensor({}, {0});
    file.end_dict();
    if (zero.engine_steps) file.entry("global_steps", *zero.engine_steps);
    file.entry("skipped_steps", 2).end_dict();
    return file;
  }

  // --- a distributed checkpoint ---

  struct Part {
    Shape offsets;
    Shape sizes;
  };
  struct Listed {
    std::string key;
    Shape shape;
    std::vector<Part> parts;
    std::function<float(std::uint64_t)> value;
    std::string type = "Float";
  };

  static Values box_of(const Listed& tensor, const Part& part) {
    Values values;
    const std::uint64_t count = count_of(tensor.shape);
    for (std::uint64_t i = 0; i < count; ++i) {
      std::uint64_t rest = i;
      bool is_inside = true;
      for (std::size_t d = tensor.shape.size(); d-- > 0;) {
        const std::uint64_t at = rest % tensor.shape[d];
        rest /= tensor.shape[d];
        is_inside &= at >= part.offsets[d] && at < part.offsets[d] + part.sizes[d];
      }
      if (is_inside) values.push_back(tensor.value(i));
    }
    return values;
  }

  static std::vector<Listed> model_with_moments(const std::string& model = "model.",
                                                const std::string& optimizer = "optim.") {
    std::vector<Listed> all;
    const char* const endings[] = {"", ".exp_avg", ".exp_avg_sq"};
    for (const auto& group : kGroups) {
      for (const Parameter& parameter : group) {
        for (int field = 0; field < 3; ++field) {
          const std::string key =
              field == 0 ? model + parameter.name : optimizer + "state." + parameter.name + endings[field];
          std::vector<Part> parts = {{Shape(parameter.shape.size(), 0), parameter.shape}};
          if (parameter.name == "a" && field != 2) {  // Columns; m is in four boxes.
            parts = {{{0, 0}, {3, 2}}, {{0, 2}, {3, 3}}};
            if (field == 1) parts = {{{1, 2}, {2, 3}}, {{0, 0}, {1, 2}}, {{0, 2}, {1, 3}}, {{1, 0}, {2, 2}}};
          }
          if (parameter.name == "b") parts = {{{4}, {3}}, {{0}, {4}}};
          const int number = parameter.number;
          all.push_back({key, parameter.shape, parts,
                         [number, field](std::uint64_t i) { return value_of(number, field, i); }});
        }
        all.push_back({optimizer + "state." + parameter.name + ".step", {}, {{{}, {}}}, [](std::uint64_t) {
                         return 40.0f;
                       }});
      }
    }
    return all;
  }

  struct Distributed {
    std::vector<Listed> tensors;
    std::string file = "__0_0.distcp";  // The parts are in it and in others in turn.
    bool transformed = false;
    bool overlapping = false;                  // All parts of a file are listed as the whole file so far.
    std::map<std::string, std::string> paths;  // In the nested dictionary: its first key.
    bool misplaced = false;                    // The parts have other places than the listed ones.
    bool flat = false;                         // The parts have other shapes than the listed ones.
  };

  void write_distributed(const std::string& directory, const Distributed& wanted) {
    fs::create_directories(directory);
    std::string files[2];
    TorchWriter metadata;
    const auto object = [&](const char* name) {
      metadata.raw("ctorch.distributed.checkpoint.metadata\n" + std::string(name) + "\n)\x81");
    };
    object("Metadata");
    metadata.begin_dict().text("state_dict_metadata").begin_dict();
    for (const Listed& tensor : wanted.tensors) {
      metadata.text(tensor.key);
      object("TensorStorageMetadata");
      metadata.begin_dict().text("properties");
      object("TensorProperties");
      const std::string element = tensor.type == "Float"    ? "float32"
                                  : tensor.type == "Double" ? "float64"
                                                            : "int64";
      metadata.raw("(ctorch\n" + element + "\nNtb").text("size");
      metadata.size(tensor.shape).text("chunks").begin_list();
      for (const Part& part : tensor.parts) {
        object("ChunkStorageMetadata");
        metadata.begin_dict().text("offsets");
        metadata.size(part.offsets).text("sizes");
        metadata.size(part.sizes).end_dict().raw("b");
      }
      metadata.end_list().end_dict().raw("b");
    }
    metadata.text("optim.param_groups.a.lr");
    object("BytesStorageMetadata");
    metadata.raw("}b").end_dict().text("planner_data").begin_dict();
    for (const auto& [key, first] : wanted.paths)
      metadata.text(key).raw("(").text(first).text("rest").raw("t");
    metadata.end_dict().text("storage_data").begin_dict();
    int number = 0;
    for (const Listed& tensor : wanted.tensors) {
      for (const Part& part : tensor.parts) {
        TorchWriter item;
        const Values values = box_of(tensor, part);
        if (tensor.type == "Float") {
          item.tensor(values, wanted.flat ? Shape{values.size()} : part.sizes);
        } else {
          const std::string key = item.add_storage(std::string(8 * values.size(), '\1'));
          item.tensor_of("Long", key, values.size(), 0, part.sizes, TorchWriter::strides_of(part.sizes));
        }
        std::string& file = files[number % 2];
        const std::string content = item.archive().finish(number % 3 == 0);
        object("MetadataIndex");
        metadata.begin_dict().entry("fqn", tensor.key).text("offset");
        metadata.size(wanted.misplaced ? Shape(part.offsets.size(), 9) : part.offsets);
        metadata.entry("index", 0).end_dict().raw("b");
        metadata.raw("ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81").begin_dict();
        metadata.entry("relative_path", number % 2 == 0 ? wanted.file : "__1_0.distcp");
        const std::size_t begin = wanted.overlapping ? 0 : file.size();
        metadata.entry("offset", static_cast<std::int64_t>(begin));
        metadata.entry("length", static_cast<std::int64_t>(file.size() + content.size() - begin));
        if (wanted.transformed)
          metadata.text("transform_descriptors").begin_list().text("stream.zstd").end_list();
        metadata.end_dict().raw("b");
        file += content;
        ++number;
      }
    }
    metadata.end_dict().end_dict().raw("b");
    write(directory + "/.metadata", metadata.finish());
    write(directory + "/__0_0.distcp", files[0]);
    write(directory + "/__1_0.distcp", files[1]);
  }

  // --- checks ---

  static Values read(TensorSource& source, std::size_t tensor, SavedField field) {
    Values values;
    source.read(tensor, field,
                [&](Span<const float> piece) { values.insert(values.end(), piece.begin(), piece.end()); });
    return values;
  }
  static void expect_model(TensorSource& source, bool has_moments, const std::string& prefix = "") {
    std::map<std::string, Parameter> wanted;
    for (const auto& group : kGroups) {
      for (const Parameter& parameter : group) wanted[prefix + parameter.name] = parameter;
    }
    std::size_t found = 0;
    for (std::size_t i = 0; i < source.tensors().size(); ++i) {
      const TensorSource::Tensor& tensor = source.tensors()[i];
      if (!wanted.contains(tensor.name)) continue;
      ++found;
      SCOPED_TRACE(tensor.name);
      const Parameter& parameter = wanted[tensor.name];
      EXPECT_EQ(tensor.shape, parameter.shape);
      EXPECT_EQ(tensor.has_m, has_moments);
      EXPECT_EQ(tensor.has_v, has_moments);
      EXPECT_FALSE(tensor.frozen);
      EXPECT_EQ(read(source, i, SavedField::kMaster), values_of(parameter, 0));
      if (!has_moments) continue;
      EXPECT_EQ(read(source, i, SavedField::kM), values_of(parameter, 1));
      EXPECT_EQ(read(source, i, SavedField::kV), values_of(parameter, 2));
    }
    EXPECT_EQ(found, wanted.size());
  }
  static std::string refusal(const std::function<void()>& work) {
    try {
      work();
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == StatusCode::kCorruption || error.code() == StatusCode::kUnsupported ||
                  error.code() == StatusCode::kIoError)
          << error.what();
      return error.what();
    }
    ADD_FAILURE() << "not refused";
    return "";
  }
  static void expect_contains(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
  }
  // Whether a source can be opened and everything in it read.
  static bool reads_all(const std::function<std::unique_ptr<TensorSource>()>& open) {
    try {
      const std::unique_ptr<TensorSource> source = open();
      for (std::size_t i = 0; i < source->tensors().size(); ++i) {
        const TensorSource::Tensor& tensor = source->tensors()[i];
        EXPECT_EQ(read(*source, i, SavedField::kMaster).size(), tensor.count);
        if (tensor.has_m) {
          EXPECT_EQ(read(*source, i, SavedField::kM).size(), tensor.count);
        }
      }
      return true;
    } catch (const Error&) {
      return false;
    }
  }
  // The fuzzer of checkpoints changes their bytes, too.
  void cut_off(const std::string& path, const std::function<std::unique_ptr<TensorSource>()>& open) {
    const std::string whole = text_of(path);
    ASSERT_TRUE(reads_all(open));
    for (std::size_t length = 0; length < whole.size(); length += 1 + whole.size() / 29) {
      write(path, whole.substr(0, length));
      EXPECT_FALSE(reads_all(open)) << "cut off at " << length;
    }
    write(path, whole);
  }
  // The files of a directory as the fuzzer gets them: all but the last have their length before them.
  static std::string packed(char form, const std::string& directory, const std::vector<std::string>& names) {
    std::string text(1, form);
    for (const std::string& name : names) {
      const std::string file = text_of(directory + "/" + name);
      EXPECT_LT(file.size(), 1u << 16);
      if (name != names.back())
        text += {static_cast<char>(file.size() & 0xff), static_cast<char>(file.size() >> 8)};
      text += file;
    }
    return text;
  }

  int command(const std::string& arguments) {
    const std::string line = std::string(FOREBAY_COMMAND) + " state " + arguments + " > " + root_ +
                             "/out 2> " + root_ + "/err < /dev/null";
    const int status = std::system(line.c_str());
    err_ = text_of(root_ + "/err");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  void expect_state(const std::string& directory, bool has_moments, bool has_frozen) {
    SavedStateReader state(directory);
    const SavedStateFacts& facts = state.facts();
    EXPECT_EQ(facts.weights_only, !has_moments);
    EXPECT_EQ(facts.applied_steps, has_moments ? 40u : 0u);
    EXPECT_EQ(facts.parameters.size(), has_frozen ? 4u : 3u);
    run_ranks(2, {}, [&](Rank& rank) {
      EngineOptions options;
      options.stage = 2;
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
      const UnitId unit = engine.add_unit("all");
      const ParameterId a = engine.add_parameter(unit, "a", 15);
      const ParameterId b = engine.add_parameter(unit, "b", 7);
      const ParameterId c = engine.add_parameter(unit, "c.weight", 4);
      std::optional<ParameterId> f;
      if (has_frozen) f = engine.add_parameter(unit, "f", 6, 0, /*frozen=*/true);
      engine.commit();
      engine.load_state(directory);
      const ParameterId ids[] = {a, b, c};
      for (int p = 0; p < 3; ++p) {
        const Parameter& parameter = p < 2 ? kGroups[0][static_cast<std::size_t>(p)] : kGroups[1][0];
        EXPECT_EQ(engine.get_parameter(ids[p]), values_of(parameter, 0));
        const Values none(count_of(parameter.shape));
        EXPECT_EQ(engine.get_moment(ids[p], Moment::kFirst), has_moments ? values_of(parameter, 1) : none);
        EXPECT_EQ(engine.get_moment(ids[p], Moment::kSecond), has_moments ? values_of(parameter, 2) : none);
      }
      if (f) {
        EXPECT_EQ(engine.get_parameter(*f), values_of(kFrozen, 0));
      }
    });
  }

  std::string root_, err_;
};

// --- DeepSpeed ---

TEST_F(CheckpointImport, ReadsEveryStageOfZeroAtAnyNumberOfRanks) {
  for (const int stage : {1, 2, 3}) {
    for (const int ranks : {1, 2, 3, 8}) {
      for (const std::uint64_t padding : {0, 3}) {
        if (stage == 3 && padding > 0) continue;
        SCOPED_TRACE("stage " + std::to_string(stage) + ", ranks " + std::to_string(ranks));
        const std::string directory = root_ + "/zero";
        write_zero(directory, {.stage = stage, .ranks = ranks, .padding = padding, .has_empty_frozen = true});
        const std::unique_ptr<TensorSource> source = open_deepspeed(directory, false);
        expect_model(*source, true);
        EXPECT_EQ(source->steps().attempted, 42u);
        EXPECT_EQ(source->steps().applied, 40u);
        EXPECT_EQ(source->optimizer(), "adamw");
        ASSERT_EQ(source->tensors().size(), 4u);  // No buffer, no second name, nothing without elements.
        EXPECT_EQ(source->without_elements(), std::vector<std::string>{"none"});
        EXPECT_EQ(source->tensors()[3 - (stage < 3 ? 3 : 0)].name, "f");
        for (std::size_t i = 0; i < 4; ++i) {
          if (source->tensors()[i].name != "f") continue;
          EXPECT_TRUE(source->tensors()[i].frozen);
          EXPECT_EQ(read(*source, i, SavedField::kMaster), values_of(kFrozen, 0));
        }
        fs::remove_all(directory);
      }
    }
  }
}

TEST_F(CheckpointImport, FollowsTheNameOfTheLatestCheckpoint) {
  write_zero(root_ + "/run/global_step42", {.prefix = "bf16_zero_pp_rank_"});
  write(root_ + "/run/latest", "global_step42");
  EXPECT_TRUE(is_deepspeed(root_ + "/run"));
  expect_model(*open_deepspeed(root_ + "/run", false), true);
  for (const char* tag : {"../run/global_step42", "..", "", "/etc", "a/b"}) {
    write(root_ + "/run/latest", tag);
    expect_contains(refusal([&] { open_deepspeed(root_ + "/run", false); }), "names no directory beside it");
  }
  write(root_ + "/run/latest", std::string(100'000, 'a'));
  expect_contains(refusal([&] { open_deepspeed(root_ + "/run", false); }), "too long");
  write(root_ + "/run/latest", "global_step43");
  expect_contains(refusal([&] { open_deepspeed(root_ + "/run", false); }), "cannot read the directory");
}

TEST_F(CheckpointImport, WithoutMomentsTheStepsAreThoseOfTheEngine) {
  write_zero(root_ + "/zero", {.has_moments = false});
  const std::unique_ptr<TensorSource> source = open_deepspeed(root_ + "/zero", false);
  expect_model(*source, false);
  EXPECT_EQ(source->steps().attempted, 42u);
  EXPECT_EQ(source->steps().applied, 40u);
  // As after a step that the engine's counter does not know.
  write_zero(root_ + "/later", {.step = 50});
  EXPECT_EQ(open_deepspeed(root_ + "/later", false)->steps().attempted, 50u);
  write_zero(root_ + "/sgd", {.is_plain_sgd = true});
  expect_model(*open_deepspeed(root_ + "/sgd", false), false);
}

TEST_F(CheckpointImport, PartsThatAreMissingOrNotSupportedAreNamed) {
  const std::string directory = root_ + "/zero";
  const auto refused = [&](const Zero& zero, const std::function<void()>& change, const std::string& part) {
    fs::remove_all(directory);
    write_zero(directory, zero);
    change();
    expect_contains(refusal([&] { open_deepspeed(directory, false); }), part);
  };
  const std::string rank = directory + "/zero_pp_rank_";
  refused(
      {}, [&] { fs::remove(rank + "1_mp_rank_00_optim_states.pt"); }, "not those of ranks 0, 1");
  refused(
      {}, [&] { fs::remove(rank + "2_mp_rank_00_optim_states.pt"); }, "is of 3 ranks, and 2 files");
  refused(
      {}, [&] { fs::remove(directory + "/mp_rank_00_model_states.pt"); }, "_model_states.pt");
  refused(
      {.stage = 3}, [&] { fs::remove(rank + "2_mp_rank_00_model_states.pt"); }, "of some ranks are missing");
  refused(
      {}, [&] { write(rank + "0_mp_rank_01_optim_states.pt", ""); }, "tensor-parallel");
  refused(
      {}, [&] { write(directory + "/layer_00-model_states.pt", ""); }, "pipeline");
  refused(
      {}, [&] { write(directory + "/expp_rank_0_mp_rank_00_optim_states.pt", ""); }, "experts");
  refused(
      {}, [&] { write(directory + "/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", ""); }, "two of its");
  refused(
      {}, [&] { write(rank + "0_mp_rank_00_optim_states.pt", "PK"); }, "is not a zip archive");
  refused(
      {.step = 1.5}, [] {}, "is not a whole number");
  refused(
      {.is_amsgrad = true}, [] {}, "AMSGrad, which forebay does not have; use --weights-only");
  expect_model(*open_deepspeed(directory, true), false);
  refused(
      {.has_m = false}, [] {}, "exp_avg_sq and no exp_avg");
  refused(
      {.has_short_moments = true}, [] {}, "a moment has fewer elements than its weights");
  refused(
      {.stage = 3, .has_short_frozen = true}, [] {}, "its part of f is too short");
  refused(
      {.stage = 3, .other = "exp_inf"}, [] {}, "keeps exp_inf, which forebay's do not; use --weights-only");
  expect_model(*open_deepspeed(directory, true), false);
  refused(
      {.step = -1}, [] {}, "is not a whole number");
  refused(
      {},
      [&] {
        write(rank + "1_mp_rank_00_optim_states.pt", optimizer_file({.step = 39}, 1).archive().finish());
      },
      "different numbers of steps");
  refused(
      {},
      [&] {
        write(rank + "1_mp_rank_00_optim_states.pt",
              optimizer_file({.has_moments = false}, 1).archive().finish());
      },
      "some ranks have no moments");
  refused(
      {.stage = 3},
      [&] {
        TorchWriter file;  // As of a job with offload to NVMe.
        file.begin_dict().text("optimizer_state_dict").begin_dict().text("fp32_flat_groups").begin_list();
        file.tensor({}, {0}).end_list().entry("partition_count", 3).end_dict().end_dict();
        write(rank + "0_mp_rank_00_optim_states.pt", file.archive().finish());
      },
      "offload to NVMe");
  refused(
      {},
      [&] {
        TorchWriter file;
        file.begin_dict().text("optimizer_state_dict").begin_dict().entry("partition_count", 3);
        file.end_dict().end_dict();
        write(rank + "0_mp_rank_00_optim_states.pt", file.archive().finish());
      },
      "no fp32 weights of ZeRO");
  refused(
      {},
      [&] {
        write(rank + "1_mp_rank_00_optim_states.pt", optimizer_file({.stage = 3}, 1).archive().finish());
      },
      "of another stage than the first");
  const auto weights = [](std::size_t groups, const std::vector<Shape>& paddings, const Shape& counts) {
    TorchWriter file;
    file.begin_dict().text("optimizer_state_dict").begin_dict().text("partition_count").begin_list();
    for (const std::uint64_t count : counts) file.integer(static_cast<std::int64_t>(count));
    file.end_list();
    file.text("single_partition_of_fp32_groups").begin_list();
    for (std::size_t group = 0; group < groups; ++group) file.tensor({1}, {1});
    file.end_list().text("param_alignment_paddings").begin_list();
    for (const Shape& padding : paddings) file.tuple(padding);
    file.end_list().end_dict().end_dict();
    return file.archive().finish();
  };
  refused(
      {.has_moments = false}, [&] { write(rank + "1_mp_rank_00_optim_states.pt", weights(1, {}, {3})); },
      "another number of groups than the first");
  refused(
      {.has_moments = false},
      [&] {
        for (const char* number : {"0", "1", "2"})
          write(rank + number + "_mp_rank_00_optim_states.pt", weights(2, {{0}, {0}}, {3, 3}));
      },
      "param_alignment_paddings are not those of its parameters");
  refused(
      {.has_moments = false},
      [&] {
        write(rank + "0_mp_rank_00_optim_states.pt", weights(2, {}, {3, 2}));
      },
      "divided over different numbers of ranks");
  fs::create_directories(root_ + "/empty");
  expect_contains(refusal([&] { open_deepspeed(root_ + "/empty", false); }), "no files *_optim_states.pt");
}

// Each of them would shift weights, leave a parameter out or take it for a frozen one.
TEST_F(CheckpointImport, FlatGroupsOfZeroThatDoNotFitTogetherAreRefused) {
  const auto refused = [&](const Zero& zero, const std::string& part) {
    SCOPED_TRACE("stage " + std::to_string(zero.stage) + ", rank " + std::to_string(zero.resized_rank) +
                 ", " + std::to_string(zero.extra));
    fs::remove_all(root_ + "/zero");
    write_zero(root_ + "/zero", zero);
    expect_contains(refusal([&] { open_deepspeed(root_ + "/zero", true); }), part);
  };
  refused({.resized_rank = 0, .extra = -2}, "_1_mp_rank_00_optim_states.pt");
  refused({.resized_rank = 0, .extra = -2}, "leave room for 6");
  refused({.resized_rank = 1, .extra = -2}, "leave room for 0");
  refused({.resized_rank = 1, .extra = 2}, "leave room for 8");
  refused({.resized_rank = 2, .extra = -2}, "end before b");
  for (const int stage : {2, 3}) {
    refused({.stage = stage, .ranks = 1, .resized_rank = 0, .extra = 22}, "its parameters take");
    refused({.stage = stage, .lacks_name = true}, "its parameters take");
  }
  for (const int rank : {0, 2}) {
    refused({.stage = 3, .resized_rank = rank, .extra = 3}, "its parameters take");
    refused({.stage = 3, .resized_rank = rank, .extra = -1}, "flat group");
  }
}

TEST_F(CheckpointImport, MomentsOfZeroWithoutAStepAreRefused) {
  const std::string directory = root_ + "/zero";
  write_zero(directory, {.has_step = false});
  EXPECT_EQ(open_deepspeed(directory, false)->steps().applied, 40u);
  write_zero(directory, {.has_step = false, .engine_steps = std::nullopt});
  expect_contains(refusal([&] { open_deepspeed(directory, false); }),
                  "it has moments and no step; use --weights-only");
  expect_model(*open_deepspeed(directory, true), false);
  write_zero(directory, {.engine_steps = -5});
  expect_contains(refusal([&] { open_deepspeed(directory, false); }), "its global_steps is not a number of");
}

TEST_F(CheckpointImport, FilesOfZeroThatWereCutOffAreRefused) {
  for (const int stage : {2, 3}) {
    const std::string directory = root_ + "/zero" + std::to_string(stage);
    write_zero(directory, {.stage = stage, .ranks = 2});
    const auto open = [&] { return open_deepspeed(directory, false); };
    cut_off(directory + "/zero_pp_rank_1_mp_rank_00_optim_states.pt", open);
    const std::string model = stage == 3 ? "/zero_pp_rank_1_" : "/";
    cut_off(directory + model + "mp_rank_00_model_states.pt", open);
  }
}

// --- files of torch.save() ---

TEST_F(CheckpointImport, TensorsStayWithinTheirStorageAndFile) {
  const std::string path = root_ + "/t.pt";
  const auto opened = [&](const std::string& text) {
    write(path, text);
    const InputFile file(path);
    const TorchFile torch(file);
    return torch.tensor(torch.root());
  };
  const auto of = [&](std::uint64_t offset, const Shape& shape, const Shape& strides) {
    TorchWriter file;
    const std::string key = file.add_storage(std::string(24, 'x'));
    file.tensor_of("Float", key, 6, offset, shape, strides);
    return file.archive().finish();
  };
  ASSERT_TRUE(opened(of(2, {2, 2}, {2, 1})));
  EXPECT_EQ(opened(of(2, {2, 2}, {2, 1}))->count, 4u);
  EXPECT_EQ(opened(of(6, {0}, {1}))->count, 0u);
  EXPECT_EQ(opened(of(2, {2, 0}, {5, 1}))->count, 0u) << "strides of no element mean nothing";
  EXPECT_EQ(opened(of(5, {}, {}))->count, 1u);
  EXPECT_EQ(opened(of(5, {1, 1}, {7, 9}))->count, 1u) << "strides of one element mean nothing";
  const std::uint64_t large = std::uint64_t{1} << 62;
  for (const auto& [offset, shape] : std::vector<std::pair<std::uint64_t, Shape>>{{3, {2, 2}},
                                                                                  {7, {0}},
                                                                                  {0, {7}},
                                                                                  {0, {large, 4}},
                                                                                  {large, {1}},
                                                                                  {large - 1, {2}},
                                                                                  {0, {large, large, large}}})
    expect_contains(refusal([&] { opened(of(offset, shape, TorchWriter::strides_of(shape))); }), "t.pt");
  expect_contains(refusal([&] { opened(of(0, {2, 2}, {1, 2})); }), "is not contiguous");
  expect_contains(refusal([&] { opened(of(0, {2, 2}, {1})); }), "has no shape");
  const std::uint64_t minus_one = ~std::uint64_t{0};
  expect_contains(refusal([&] { opened(of(0, {minus_one}, {1})); }), "has no shape");
  expect_contains(refusal([&] { opened(of(minus_one, {1}, {1})); }), "has no shape");
  expect_contains(refusal([&] { opened(of(0, Shape(65, 1), Shape(65, 1))); }), "has no shape");

  const auto written = [](const std::function<void(TorchWriter&)>& work) {
    TorchWriter file;
    work(file);
    return file.archive().finish();
  };
  expect_contains(refusal([&] {
                    opened(written([](TorchWriter& file) { file.tensor_of("Float", "7", 1, 0, {1}, {1}); }));
                  }),
                  "no entry archive/data/7");
  expect_contains(refusal([&] {
                    opened(written([](TorchWriter& file) {
                      file.tensor_of("QInt8", file.add_storage("x"), 1, 0, {1}, {1});
                    }));
                  }),
                  "torch.QInt8Storage");
  // As PyTorch writes types without a storage of their own: the storage has bytes, and the type is behind it.
  const auto third_version = [&](const char* kind, const char* type) {
    return written([&](TorchWriter& file) {
      file.raw("ctorch._utils\n_rebuild_tensor_v3\n((").text(kind).raw("ctorch.storage\nUntypedStorage\n");
      file.text(file.add_storage("12345678")).text("cpu").integer(8).raw("tQ").integer(0);
      file.tuple({2}).tuple({1}).raw("\x89N").raw(type).raw("tR");
    });
  };
  EXPECT_EQ(opened(third_version("storage", "ctorch\nfloat32\n"))->type, "Float");
  expect_contains(refusal([&] { opened(third_version("storage", "")); }), "too few arguments");
  expect_contains(refusal([&] { opened(third_version("module", "ctorch\nfloat32\n")); }), "has no storage");
  // As torch writes a view with other signs than the stored values.
  const auto with_metadata = [&](const char* value) {
    return written([&](TorchWriter& file) {
      file.raw("ctorch._utils\n_rebuild_tensor_v2\n((").text("storage").raw("ctorch\nFloatStorage\n");
      file.text(file.add_storage("12345678")).text("cpu").integer(2).raw("tQ").integer(0);
      file.tuple({2}).tuple({1}).raw("\x89N}").text("neg").raw(value).raw("stR");
    });
  };
  expect_contains(refusal([&] { opened(with_metadata("\x88")); }),
                  "is a negative view (storage 0); save its resolve_neg()");
  EXPECT_EQ(opened(with_metadata("\x89"))->count, 2u);
  write(path, written([](TorchWriter& file) { file.tensor({1, 2}, {2}); }));
  const InputFile two_elements(path);
  const TorchFile torch(two_elements);
  EXPECT_FALSE(torch.scalar(torch.root())) << "the first element of several is no scalar";
  // Code is data: nothing is called, and nothing of it is a tensor.
  EXPECT_FALSE(
      opened(written([](TorchWriter& file) { file.raw("cos\nsystem\n").text("exit 1").raw("\x85R"); })));
  EXPECT_FALSE(opened(written([](TorchWriter& file) { file.raw("ctorch._utils\n_rebuild_parameter\n)R"); })));
  // A parameter of a parameter of itself, as often as one likes.
  const std::string loop = "ctorch._utils\n_rebuild_parameter\n(NtR";
  EXPECT_FALSE(opened(written([&](TorchWriter& file) { file.raw(loop); })));
  TorchWriter parameter;
  parameter.raw("ctorch._utils\n_rebuild_parameter\n(").text("unused").raw("0");
  parameter.tensor({1, 2}, {2}).raw("\x88NtR");
  EXPECT_EQ(opened(parameter.archive().finish())->count, 2u);
  TorchWriter with_attributes;
  with_attributes.raw(
      "ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n");
  with_attributes.raw("((").text("storage").raw("ctorch\nFloatStorage\n").text("0").text("cpu").integer(2);
  with_attributes.raw("tQ").integer(0);
  with_attributes.tuple({2}).tuple({1}).raw("\x89NtNtR");
  static_cast<void>(with_attributes.add_storage("12345678"));
  EXPECT_EQ(opened(with_attributes.archive().finish())->count, 2u);

  TorchWriter big;
  big.none();
  write(path, ZipWriter().add("a/data.pkl", big.finish()).add("a/byteorder", "big").finish());
  expect_contains(refusal([&] {
                    const InputFile file(path);
                    const TorchFile torch(file);
                  }),
                  "big endian");
  write(path, ZipWriter().add("a/data.pkl", big.finish()).add("b/data.pkl", big.finish()).finish());
  expect_contains(refusal([&] {
                    const InputFile file(path);
                    const TorchFile torch(file);
                  }),
                  "several entries data.pkl");
}

TEST_F(CheckpointImport, FilesAreRegularAndFewOfThemOpen) {
  ASSERT_EQ(::mkfifo((root_ + "/pipe").c_str(), 0600), 0);
  expect_contains(refusal([&] { InputFile file(root_ + "/pipe"); }), "it is not a regular file");
  const auto open_count = [] {
    return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
  };
  const auto before = open_count();
  InputFiles files;
  for (int i = 0; i < 100; ++i) {
    const std::string path = root_ + "/" + std::to_string(i);
    write(path, std::to_string(i));
    const InputFile& file = files.open(files.add(path));
    EXPECT_EQ(file.text(0, file.bytes()), std::to_string(i));
  }
  EXPECT_LE(open_count(), before + 64);
  expect_contains(refusal([&] { static_cast<void>(files.open(0).text(0, std::uint64_t{1} << 62)); }),
                  "it ends early");
  EXPECT_EQ(files.open(0).text(0, 1), "0");
}

TEST_F(CheckpointImport, ZipDirectoriesAreNotBelieved) {
  const std::string path = root_ + "/z.zip";
  const auto opened = [&](const std::string& text, const std::string& name = "a") {
    write(path, text);
    const InputFile file(path);
    const ZipArchive archive(file, 0, file.bytes());
    const ZipArchive::Place place = archive.find(file, name);
    return file.text(place.at, place.bytes);
  };
  for (const bool wide : {false, true}) {
    const ZipWriter zip = ZipWriter().add("a", "hello").add("b", "world");
    EXPECT_EQ(opened(zip.finish(wide)), "hello");
    EXPECT_EQ(opened(zip.finish(wide), "b"), "world");
    expect_contains(refusal([&] { opened(zip.finish(wide), "c"); }), "no entry c");
    // Every field of the directory and the records after it, with the largest numbers.
    const std::string whole = zip.finish(wide);
    const std::size_t directory = whole.find("PK\1\2");
    for (std::size_t at = directory; at < whole.size(); ++at) {
      for (const std::size_t bytes : {1u, 2u, 4u, 8u}) {
        std::string changed = whole;
        for (std::size_t i = at; i < std::min(at + bytes, whole.size()); ++i) changed[i] = '\xff';
        try {
          EXPECT_LE(opened(changed).size(), whole.size());
        } catch (const Error&) {
        }
      }
    }
  }
  expect_contains(refusal([&] { opened(ZipWriter().add("a", "x", 8).finish()); }), "compressed or encrypted");
  expect_contains(refusal([&] { opened(ZipWriter().add("a", "x").add("a", "y").finish()); }), "twice");
  expect_contains(refusal([&] { opened(""); }), "not a zip archive");
  const auto refused = [&](std::string text, std::size_t at, std::string_view bytes, const char* finding) {
    expect_contains(refusal([&] { opened(text.replace(at, bytes.size(), bytes)); }), finding);
  };
  const std::string plain = ZipWriter().add("a", "hello").finish();
  const std::string wide = ZipWriter().add("a", "hello").finish(true);
  const std::size_t directory = plain.find("PK\1\2");
  constexpr std::size_t kEndBytes = 22, kLocatorBytes = 20;
  const std::size_t wide_directory = wide.find("PK\1\2"), record = wide.find("PK\6\6");
  const std::string all_bits(4, '\xff');
  refused(plain, 0, "PK\1\2", "its entry a is not within it");
  refused(plain, directory + 8, "\1", "compressed or encrypted");
  refused(plain, directory + 20, "\4", "compressed or encrypted");
  refused(plain, directory + 20, std::string("\6\0\0\0\6", 5), "its entry a is not within it");
  refused(plain, directory + 32, "\1",
          "its zip directory is damaged");  // The directory ends before a comment.
  refused(plain, plain.size() - 10, "\xff", "its zip directory is not within it");
  expect_contains(refusal([&] { opened(plain + "x"); }), "not a zip archive");
  // The extra field is another program's, or its size is wrong.
  constexpr std::size_t kExtra = 47;
  refused(wide, wide_directory + kExtra, "\2", "its zip directory is damaged");
  refused(wide, wide_directory + kExtra + 2, "\x14", "its zip directory is damaged");
  refused(wide, wide_directory + kExtra + 2, "\x1b", "its zip directory is damaged");
  refused(wide, record, "PK\6\5", "its zip directory cannot be found");
  refused(wide, wide.size() - kEndBytes - kLocatorBytes + 8, std::string(7, '\xff'),
          "its zip directory cannot be found");
  expect_contains(refusal([&] { opened(wide.substr(wide.size() - kEndBytes)); }),
                  "its zip directory cannot be found");
  // One field alone may be in the record of 64 bits.
  const auto with_fields = [&](std::string_view count, std::string_view bytes, std::string_view at) {
    std::string changed = wide;
    changed.replace(wide.size() - kEndBytes + 10, 2, count);
    changed.replace(wide.size() - kEndBytes + 12, 4, bytes);
    return changed.replace(wide.size() - kEndBytes + 16, 4, at);
  };
  const auto number = [](std::size_t value, std::size_t bytes) {
    std::string text;
    for (std::size_t i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i) & 0xff);
    return text;
  };
  const std::string directory_bytes = number(record - wide_directory, 4), at = number(wide_directory, 4);
  EXPECT_EQ(opened(with_fields(all_bits.substr(2), directory_bytes, at)), "hello");
  EXPECT_EQ(opened(with_fields(number(1, 2), all_bits, at)), "hello");
  EXPECT_EQ(opened(with_fields(number(1, 2), directory_bytes, all_bits)), "hello");
  // Comments of entries are skipped.
  std::string commented = ZipWriter().add("a", "hello").add("b", "world").finish();
  const std::size_t first = commented.find("PK\1\2");
  commented.replace(first + 32, 2, number(3, 2)).insert(first + kExtra, "PK!");
  commented.replace(commented.size() - 10, 1, number(2 * kExtra + 3, 1));
  EXPECT_EQ(opened(commented, "b"), "world");
  // A directory of more bytes than are read, in a file without blocks.
  write(path, "");
  fs::resize_file(path, ZipArchive::kMostDirectoryBytes + 1);
  std::string end = plain.substr(plain.size() - kEndBytes);
  end.replace(12, 8, std::string("\1\0\0\4\0\0\0\0", 8));
  std::ofstream(path, std::ios::binary | std::ios::app) << end;
  expect_contains(refusal([&] {
                    const InputFile file(path);
                    const ZipArchive archive(file, 0, file.bytes());
                  }),
                  "its zip directory is not within it");
  // An archive within a file: nothing before or after it is read.
  const std::string zip = ZipWriter().add("a", "inner").finish();
  write(path, "before" + zip + "after");
  const InputFile file(path);
  const ZipArchive inner(file, 6, zip.size());
  const ZipArchive::Place place = inner.find(file, "a");
  EXPECT_EQ(file.text(place.at, place.bytes), "inner");
  for (const auto& [begin, bytes] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
           {6, zip.size() - 1}, {7, zip.size()}, {0, ~std::uint64_t{0}}, {~std::uint64_t{0}, 1}})
    EXPECT_THROW(ZipArchive(file, begin, bytes).find(file, "a"), Error);
}

// --- distributed checkpoints ---

TEST_F(CheckpointImport, ReadsDistributedCheckpointsInBoxes) {
  write_distributed(root_ + "/d", {.tensors = model_with_moments()});
  EXPECT_TRUE(is_distributed(root_ + "/d"));
  EXPECT_FALSE(is_distributed(root_));
  for (const char* path : {"/d", "/d/.metadata"}) {
    const std::unique_ptr<TensorSource> source = open_distributed(root_ + path, false);
    expect_model(*source, true, "model.");
    EXPECT_EQ(source->prefixes(), std::vector<std::string>{"model."});
    EXPECT_EQ(source->steps().applied, 40u);
    EXPECT_EQ(source->optimizer(), "adamw");
  }
  const std::unique_ptr<TensorSource> weights = open_distributed(root_ + "/d", true);
  expect_model(*weights, false, "model.");
}

// get_state_dict() of torch has a tied head under both of its names.
TEST_F(CheckpointImport, ASecondNameOfATiedMatrixIsLeftOut) {
  std::vector<Listed> tensors = model_with_moments();
  const std::vector<Part> whole = {{{0, 0}, {3, 5}}};
  tensors.push_back(
      {"model.head", {3, 5}, whole, [](std::uint64_t i) { return value_of(kGroups[0][0].number, 0, i); }});
  tensors.push_back({"model.f", {3, 5}, whole, [](std::uint64_t i) { return value_of(3, 0, i); }});
  write_distributed(root_ + "/d", {.tensors = tensors});

  EXPECT_EQ(command("import " + root_ + "/imported --from " + root_ + "/d"), 0) << err_;

  expect_contains(
      err_, "note: 1 tensor with the bits of another, as a tied parameter's second name, is left out, head");
  const SavedStateReader state(root_ + "/imported");
  std::vector<std::string> names;
  for (const SavedParameter& parameter : state.facts().parameters) names.push_back(parameter.name);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"a", "b", "c.weight", "f"}));
}

TEST_F(CheckpointImport, PrefixesAreThoseOfMomentsOrOfTheNestedDictionary) {
  std::vector<Listed> tensors = model_with_moments("", "");
  write_distributed(root_ + "/d", {.tensors = tensors});
  EXPECT_EQ(open_distributed(root_ + "/d", false)->prefixes(), std::vector<std::string>{""});
  // Weights twice: the user has to choose.
  tensors = model_with_moments();
  for (const Listed& tensor : model_with_moments("ema.", "unused.")) {
    if (tensor.key.starts_with("ema.")) tensors.push_back(tensor);
  }
  write_distributed(root_ + "/d", {.tensors = tensors});
  const std::unique_ptr<TensorSource> twice = open_distributed(root_ + "/d", false);
  EXPECT_EQ(twice->prefixes(), (std::vector<std::string>{"ema.", "model."}));
  expect_model(*twice, true, "ema.");
  // Without moments, the first key of the nested dictionary.
  Distributed alone;
  for (const Listed& tensor : model_with_moments()) {
    if (tensor.key.starts_with("model.")) alone.tensors.push_back(tensor);
  }
  write_distributed(root_ + "/d", alone);
  EXPECT_TRUE(open_distributed(root_ + "/d", false)->prefixes().empty());
  for (const Listed& tensor : alone.tensors) alone.paths[tensor.key] = "model";
  write_distributed(root_ + "/d", alone);
  EXPECT_EQ(open_distributed(root_ + "/d", false)->prefixes(), std::vector<std::string>{"model."});
}

TEST_F(CheckpointImport, WhatDistributedCheckpointsCannotGiveIsNamed) {
  const auto refused = [&](const Distributed& wanted, const std::string& part) {
    write_distributed(root_ + "/d", wanted);
    const auto open = [&] {
      const std::unique_ptr<TensorSource> source = open_distributed(root_ + "/d", false);
      for (std::size_t i = 0; i < source->tensors().size(); ++i) read(*source, i, SavedField::kMaster);
    };
    expect_contains(refusal(open), part);
  };
  const auto with = [](const std::function<void(std::vector<Listed>&)>& change) {
    Distributed wanted{.tensors = model_with_moments()};
    change(wanted.tensors);
    return wanted;
  };
  const auto one = [](std::uint64_t) { return 1.0f; };
  refused({.tensors = model_with_moments(), .transformed = true}, "compressed");
  for (const char* name : {"../__0_0.distcp", "/etc/passwd", "..", ""})
    refused({.tensors = model_with_moments(), .file = name}, "outside of its directory");
  refused({.tensors = model_with_moments(), .file = "__9_0.distcp"}, "__9_0.distcp");
  refused({.tensors = model_with_moments(), .overlapping = true}, "places in it have more together");
  refused({.tensors = model_with_moments(), .misplaced = true}, "no place of a part of model.a");
  refused({.tensors = model_with_moments(), .flat = true}, "is not the one that is listed");
  refused(with([](auto& all) { all[1].type = "Double"; }),
          "optim.state.a.exp_avg is not a tensor of fp32, bf16 or fp16");
  refused(with([&](auto& all) {
            all.push_back({"optim.state.0.exp_avg", {1}, {{{0}, {1}}}, one});
          }),
          "numbers in place of the names");
  refused(with([&](auto& all) {
            all.push_back({"optim.state.x.exp_avg", {1}, {{{0}, {1}}}, one});
          }),
          "no such weights");
  refused(with([&](auto& all) {
            all.push_back({"o2.state.a.exp_avg", {1}, {{{0}, {1}}}, one});
          }),
          "two optimizers");
  refused(with([&](auto& all) {
            all.push_back({"optim.state.a.max_exp_avg_sq", {1}, {{{0}, {1}}}, one});
          }),
          "AMSGrad, which forebay does not have; use --weights-only");
  refused(with([&](auto& all) {
            all.push_back({"optim.state.a.square_avg", {1}, {{{0}, {1}}}, one});
          }),
          "keeps optim.state.a.square_avg, which forebay's do not; use --weights-only");
  refused(with([](auto& all) {
            std::erase_if(all, [](const Listed& tensor) { return tensor.key.ends_with(".exp_avg"); });
          }),
          "and no exp_avg");
  refused(with([&](auto& all) {
            all.push_back({"optim.state.z.step", {}, {{{}, {}}}, one});
          }),
          "different numbers of steps");
  refused(with([](auto& all) {
            std::erase_if(all, [](const Listed& tensor) { return tensor.key.ends_with(".step"); });
          }),
          "moments and no step");
  refused(with([](auto& all) { all[0].parts.pop_back(); }), "do not make the whole tensor");
  refused(with([](auto& all) {
            ASSERT_EQ(all[1].key, "optim.state.a.exp_avg");
            all[1].shape = {5, 3};
            all[1].parts = {{{0, 0}, {5, 3}}};
          }),
          "optim.state.a.exp_avg has another shape than its parameter");
  refused(with([](auto& all) { all[0].parts = {{{0, 0}, {3, 2}}, {{0, 3}, {3, 3}}}; }), "its storage");
  // As many elements as the tensor has, some twice.
  refused(with([](auto& all) { all[0].parts = {{{0, 0}, {3, 2}}, {{0, 1}, {3, 3}}}; }), "overlap");
  refused(with([](auto& all) { all[0].parts = {{{0, 0}, {3, 3}}, {{0, 1}, {3, 2}}}; }), "overlap");
  refused(with([](auto& all) {
            std::erase_if(all, [](const Listed& tensor) { return tensor.key.starts_with("model."); });
          }),
          "no tensors of fp32");
  const std::uint64_t large = std::uint64_t{1} << 62;
  write(root_ + "/d/.metadata", "");
  expect_contains(refusal([&] { open_distributed(root_ + "/d", false); }),
                  "its pickle cannot be read, byte 0");
  write(root_ + "/d/.metadata", PickleWriter(4).integer(static_cast<std::int64_t>(large)).finish());
  expect_contains(refusal([&] { open_distributed(root_ + "/d", false); }), "not the metadata");
  fs::resize_file(root_ + "/d/.metadata", (256u << 20) + 1);
  expect_contains(refusal([&] { open_distributed(root_ + "/d", false); }), "it is too long");
}

TEST_F(CheckpointImport, IntegersAmongWeightsAreLeftOut) {
  std::vector<Listed> tensors = model_with_moments();
  tensors.push_back({"model.count", {2}, {{{0}, {2}}}, [](std::uint64_t) { return 1.0f; }, "Long"});
  tensors.push_back({"model.nothing", {0}, {{{0}, {0}}}, [](std::uint64_t) { return 1.0f; }});
  write_distributed(root_ + "/d", {.tensors = tensors});
  const std::unique_ptr<TensorSource> source = open_distributed(root_ + "/d", false);
  expect_model(*source, true, "model.");
  EXPECT_EQ(source->tensors().size(), 3u);
  EXPECT_TRUE(source->left_out().empty());
  EXPECT_EQ(source->without_elements(), std::vector<std::string>{"model.nothing"});
}

// A word that ends as an optimizer's does, a weight with the end of another's name, and a hyperparameter.
// More elements than are read at once.
TEST_F(CheckpointImport, LongTensorsOfSafetensorsAreReadInOrder) {
  constexpr std::uint64_t kCount = (2u << 20) + 3;
  const std::string header = R"({"w":{"dtype":"BF16","shape":[)" + std::to_string(kCount) +
                             R"(],"data_offsets":[0,)" + std::to_string(2 * kCount) + "]}}";
  const auto bits = [](std::uint64_t i) { return static_cast<std::uint16_t>(i % 16'381); };
  std::string file(8, '\0');
  file[0] = static_cast<char>(header.size());
  file += header;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    file += static_cast<char>(bits(i));
    file += static_cast<char>(bits(i) >> 8);
  }
  write(root_ + "/long.safetensors", file);

  std::uint64_t count = 0;
  std::uint64_t wrong = 0;
  open_safetensors(root_ + "/long.safetensors")->read(0, SavedField::kMaster, [&](Span<const float> values) {
    for (const float value : values) wrong += value != bfloat16_to_float(bits(count++));
  });
  EXPECT_EQ(count, kCount);
  EXPECT_EQ(wrong, 0u);
}

TEST_F(CheckpointImport, NamesAreDividedAtTheirDots) {
  Distributed some;
  for (const Listed& tensor : model_with_moments()) {
    if (tensor.key == "model.a" || tensor.key.starts_with("optim.state.a.")) some.tensors.push_back(tensor);
  }
  const auto one = [](std::uint64_t) { return 1.0f; };
  for (const char* key : {"model.estate.z.step", "model.xa", "optim.param_groups.a.betas"})
    some.tensors.push_back({key, {1}, {{{0}, {1}}}, one});
  write_distributed(root_ + "/d", some);
  const std::unique_ptr<TensorSource> source = open_distributed(root_ + "/d", false);
  EXPECT_EQ(source->prefixes(), std::vector<std::string>{"model."});
  std::vector<std::string> names;
  for (const TensorSource::Tensor& tensor : source->tensors()) names.push_back(tensor.name);
  EXPECT_EQ(names, (std::vector<std::string>{"model.a", "model.estate.z.step", "model.xa"}));
}

TEST_F(CheckpointImport, WeightsOfOtherTypesAreLeftOutWithANote) {
  std::vector<Listed> tensors = model_with_moments();
  tensors.push_back({"model.wide", {2}, {{{0}, {2}}}, [](std::uint64_t) { return 1.0f; }, "Double"});
  write_distributed(root_ + "/d", {.tensors = tensors});
  ASSERT_EQ(command("import " + root_ + "/state --from " + root_ + "/d"), 0) << err_;
  expect_contains(err_, "1 tensor of other types than fp32, bf16 and fp16 is left out, model.wide");
  expect_state(root_ + "/state", true, false);
}

TEST_F(CheckpointImport, DistributedCheckpointsThatWereCutOffAreRefused) {
  Distributed small;
  for (const Listed& tensor : model_with_moments()) {
    if (tensor.key == "model.a" || tensor.key.starts_with("optim.state.a.")) small.tensors.push_back(tensor);
  }
  write_distributed(root_ + "/d", small);
  const auto open = [&] { return open_distributed(root_ + "/d", false); };
  cut_off(root_ + "/d/.metadata", open);
  cut_off(root_ + "/d/__0_0.distcp", open);
}

// The corpus of the fuzzer has the files that these tests write, so that it gets past the first checks. To
// write it again: FOREBAY_RECORD_CORPUS=1.
TEST_F(CheckpointImport, TheCorpusOfTheFuzzerIsWhole) {
  const auto expect_corpus = [&](const std::string& name, const std::string& text) {
    const std::string path = std::string(FOREBAY_FUZZ_CORPUS) + "/checkpoint/" + name;
    if (std::getenv("FOREBAY_RECORD_CORPUS") != nullptr) write(path, text);
    EXPECT_TRUE(text_of(path) == text) << path;
  };
  write_zero(root_ + "/2", {.ranks = 1, .padding = 1});
  expect_corpus("zero2", packed('z', root_ + "/2",
                                {"zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"}));
  write_zero(root_ + "/3", {.stage = 3, .ranks = 1});
  expect_corpus("zero3", packed('Z', root_ + "/3",
                                {"zero_pp_rank_0_mp_rank_00_optim_states.pt",
                                 "zero_pp_rank_0_mp_rank_00_model_states.pt"}));
  Distributed some{.paths = {{"model.a", "model"}}};
  for (const Listed& tensor : model_with_moments()) {
    if (tensor.key == "model.a" || tensor.key.starts_with("optim.state.a.")) some.tensors.push_back(tensor);
  }
  write_distributed(root_ + "/d", some);
  expect_corpus("distributed", packed('d', root_ + "/d", {".metadata", "__0_0.distcp", "__1_0.distcp"}));
}

// Boxes of any division give each element once and in order.
TEST_F(CheckpointImport, BoxesOfAnyDivisionGiveTheTensorInOrder) {
  const Shape shape = {4, 3, 5, 2};
  const std::string path = root_ + "/boxes";
  for (std::uint64_t division = 0; division < 16; ++division) {
    StoredTensor tensor{shape, {}};
    InputFiles files;
    files.add(path);
    std::string stored;
    // Each dimension whole, or in two.
    for (std::uint64_t box = 0; box < 16; ++box) {
      if ((box & ~division) != 0) continue;
      StoredBox part{0, stored.size(), DataType::kFloat32, {}, {}};
      for (std::size_t d = 0; d < shape.size(); ++d) {
        const std::uint64_t half = (division >> d & 1) != 0 ? shape[d] / 2 : 0;
        const bool is_second = (box >> d & 1) != 0;
        part.offsets.push_back(is_second ? half : 0);
        part.sizes.push_back(is_second ? shape[d] - half : half > 0 ? half : shape[d]);
      }
      stored += TorchWriter::bytes_of(
          box_of({"t", shape, {}, [](std::uint64_t i) { return static_cast<float>(i); }},
                 {part.offsets, part.sizes}));
      tensor.boxes.push_back(std::move(part));
    }
    write(path, stored);
    check_boxes(tensor, "t", path);
    for (const std::uint64_t piece : {1u, 7u, 1000u}) {
      Values values;
      read_boxes(tensor, files, piece, [&](Span<const float> part) {
        EXPECT_LE(part.size(), piece);
        values.insert(values.end(), part.begin(), part.end());
      });
      ASSERT_EQ(values.size(), 120u);
      for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], static_cast<float>(i));
    }
  }
}

// --- the command ---

TEST_F(CheckpointImport, TheCommandMakesStatesThatAnEngineLoads) {
  for (const int stage : {1, 2, 3}) {
    write_zero(root_ + "/zero/global_step42", {.stage = stage});
    write(root_ + "/zero/latest", "global_step42\n");
    const std::string state = root_ + "/state";
    ASSERT_EQ(command("import " + state + " --from " + root_ + "/zero"), 0) << err_;
    EXPECT_EQ(command("verify " + state), 0) << err_;
    expect_state(state, true, true);
    EXPECT_EQ(SavedStateReader(state).facts().attempted_steps, 42u);
    fs::remove_all(state);
    ASSERT_EQ(command("import " + state + " --weights-only --from " + root_ + "/zero"), 0) << err_;
    expect_state(state, false, true);
    fs::remove_all(state);
    ASSERT_EQ(command("import " + state + " --optimizer adam --from " + root_ + "/zero"), 0) << err_;
    EXPECT_EQ(SavedStateReader(state).facts().optimizer, "adam");
    fs::remove_all(state);
    fs::remove_all(root_ + "/zero");
  }
  write_distributed(root_ + "/d", {.tensors = model_with_moments()});
  ASSERT_EQ(command("import " + root_ + "/state --from " + root_ + "/d"), 0) << err_;
  expect_state(root_ + "/state", true, false);
  fs::remove_all(root_ + "/state");
  EXPECT_EQ(command("import " + root_ + "/state --optimizer lion --from " + root_ + "/d"), 2);
  expect_contains(err_, "the moments are those of adamw");
  EXPECT_EQ(command("import " + root_ + "/state --prefix no. --from " + root_ + "/d"), 2);
  expect_contains(err_, "begins with 'no.'");
  std::vector<Listed> tensors = model_with_moments();
  for (const Listed& tensor : model_with_moments("ema.", "unused.")) {
    if (tensor.key.starts_with("ema.")) tensors.push_back(tensor);
  }
  write_distributed(root_ + "/d", {.tensors = tensors});
  EXPECT_EQ(command("import " + root_ + "/state --from " + root_ + "/d"), 2);
  expect_contains(err_, "--prefix: ema., model.");
  ASSERT_EQ(command("import " + root_ + "/state --prefix ema. --from " + root_ + "/d"), 0) << err_;
  expect_state(root_ + "/state", true, false);
  // Only weights are counted that are not finite.
  tensors = model_with_moments();
  tensors[1].value = [](std::uint64_t) { return std::numeric_limits<float>::infinity(); };
  write_distributed(root_ + "/infinite", {.tensors = tensors});
  ASSERT_EQ(command("import " + root_ + "/infinite-state --from " + root_ + "/infinite"), 0) << err_;
  EXPECT_EQ(err_, "");
  std::erase_if(tensors, [](const Listed& tensor) { return tensor.key.ends_with(".exp_avg_sq"); });
  write_distributed(root_ + "/lion", {.tensors = tensors});
  EXPECT_EQ(command("import " + root_ + "/lion-state --optimizer adam --from " + root_ + "/lion"), 2);
  expect_contains(err_, "the moments are those of lion");
  EXPECT_EQ(command("show " + root_ + "/state --weights-only"), 2);
  expect_contains(err_, "for import");
  // A value that cannot be read leaves no state behind.
  write(root_ + "/d/__1_0.distcp", "");
  fs::remove_all(root_ + "/state");
  EXPECT_EQ(command("import " + root_ + "/state --prefix ema. --from " + root_ + "/d"), 1);
  EXPECT_FALSE(fs::exists(root_ + "/state/latest"));
}

}  // namespace
}  // namespace forebay
