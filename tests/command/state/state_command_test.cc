// Saved training state without an engine: shown, verified and exported; and bad input, which is refused in
// words.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "forebay/conversions.h"
#include "forebay/engine.h"
#include "forebay/error.h"
#include "forebay/saved_state.h"
#include "runtime/command/state/state_export.h"
#include "runtime/command/state/state_print.h"
#include "tests/support/local_world.h"
#include "tests/support/temporary_directory.h"

namespace {

// The number of the next fsync() of this thread that fails, or 0.
thread_local int failing_sync = 0;

// The same of rename().
thread_local int failing_rename = 0;

}  // namespace

extern "C" int rename(const char* from, const char* to) {
  if (failing_rename > 0 && --failing_rename == 0) {
    errno = EIO;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}

// In place of the C library's, for export_state() too.
extern "C" int fsync(int file) {
  if (failing_sync > 0 && --failing_sync == 0) {
    errno = EIO;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_fsync, file));
}

namespace forebay {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using testing::Rank;
using testing::run_ranks;

constexpr std::uint64_t kLong[] = {3, 700};
constexpr std::uint64_t kMatrix[] = {20, 30};

float value_of(int parameter, std::uint64_t i) {
  return static_cast<float>(parameter) + 1e-4f * static_cast<float>(i) - 0.03f;
}

class StateCommand : public ::testing::Test {
 protected:
  StateCommand() {
    root_ = forebay::testing::make_temporary_directory("state");
    directory_ = root_ + "/state";
  }
  ~StateCommand() override { fs::remove_all(root_); }

  // Three ranks at stage 3 save steps 0, 1, ... of a small model; `keep` of them stay.
  void save(int states = 1, int keep = 1, double ema = 0.0, const std::string& last = "z.last") {
    run_ranks(3, {}, [&](Rank& rank) {
      EngineOptions options;
      options.stage = 3;
      options.optional_gradients = true;
      options.ema = ema;
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
      const UnitId first = engine.add_unit("first");
      const UnitId second = engine.add_unit("second");
      const std::vector<ParameterId> ids = {engine.add_parameter(first, "wte", 2100),
                                            engine.add_parameter(first, "bias", 7),
                                            engine.add_parameter(second, "frozen", 600, 0, /*frozen=*/true),
                                            engine.add_parameter(second, last, 1)};
      engine.declare_shape(ids[0], kLong);
      engine.declare_shape(ids[2], kMatrix);
      engine.commit();
      for (std::size_t p = 0; p < ids.size(); ++p) {
        const std::uint64_t count = p == 0 ? 2100 : p == 1 ? 7 : p == 2 ? 600 : 1;
        std::vector<float> values;
        for (std::uint64_t i = 0; i < count; ++i) values.push_back(value_of(static_cast<int>(p), i));
        engine.set_parameter(ids[p], values);
      }
      const Stream stream = value_or_throw(rank.backend->stream_create());
      for (int step = 0; step < states; ++step) {
        if (step > 0) {  // With gradients of zero nothing changes.
          engine.step_begin();
          engine.micro_step_begin(0);
          for (const int unit : {0, 1}) static_cast<void>(engine.forward(unit, stream));
          for (const int unit : {1, 0}) static_cast<void>(engine.backward(unit, stream));
          engine.step({.groups = {{}}});
        }
        engine.save_state(directory_, "{\"cursor\": " + std::to_string(step) + "}", keep);
      }
      throw_if_error(rank.backend->stream_destroy(stream));
    });
  }

  // Runs `forebay state` and returns its exit code.
  int command(const std::string& arguments) {
    const std::string line = std::string(FOREBAY_COMMAND) + " state " + arguments + " > " + root_ +
                             "/out 2> " + root_ + "/err < /dev/null";
    const int status = std::system(line.c_str());
    out_ = text_of(root_ + "/out");
    err_ = text_of(root_ + "/err");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  static std::string text_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }
  void flip(const std::string& path, std::uint64_t at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(at));
    const int byte = file.get();
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(byte ^ 1));
  }
  // Names of files that an export left, without the state.
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(root_)) {
      const std::string name = entry.path().filename();
      if (name != "out" && name != "err" && name != "state") names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  std::string root_, directory_, out_, err_;
};

struct TensorFile {
  Json header;
  std::string data;

  explicit TensorFile(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream all;
    all << file.rdbuf();
    const std::string text = all.str();
    std::uint64_t length = 0;
    std::memcpy(&length, text.data(), 8);
    EXPECT_EQ(length % 8, 0u);
    header = Json::parse(text.substr(8, length));
    data = text.substr(8 + length);
  }
  template <typename Element>
  std::vector<Element> values(const std::string& name) const {
    const auto begin = header.at(name).at("data_offsets").at(0).get<std::uint64_t>();
    const auto end = header.at(name).at("data_offsets").at(1).get<std::uint64_t>();
    std::vector<Element> values((end - begin) / sizeof(Element));
    std::memcpy(values.data(), data.data() + begin, end - begin);
    return values;
  }
};

TEST_F(StateCommand, ShowsTheContentsInOrderOfRegistration) {
  save();

  ASSERT_EQ(command("show " + directory_ + " --json"), 0) << err_;
  const Json json = Json::parse(out_);
  EXPECT_EQ(json["step"], 0);
  EXPECT_EQ(json["ranks"], 3);
  EXPECT_EQ(json["stage"], 3);
  EXPECT_EQ(json["dtype"], "fp32");
  EXPECT_EQ(json["trainer_state"], "{\"cursor\": 0}");
  EXPECT_EQ(json["files"].size(), 3u);
  ASSERT_EQ(json["parameters"].size(), 4u);
  const Json& wte = json["parameters"][0];
  EXPECT_EQ(wte["name"], "wte");
  EXPECT_EQ(wte["shape"], Json({3, 700}));
  EXPECT_EQ(wte["elements"], 2100);
  EXPECT_EQ(wte["bytes"], 2100 * 12);
  EXPECT_EQ(json["parameters"][1]["shape"], Json(nullptr));
  EXPECT_EQ(json["parameters"][2]["frozen"], true);
  EXPECT_EQ(json["parameters"][2]["bytes"], 2400);
  EXPECT_EQ(json["parameters"][3]["name"], "z.last");

  ASSERT_EQ(command("show " + directory_), 0) << err_;
  for (const char* part :
       {"3 ranks at ZeRO stage 3 in fp32", "[3, 700]", "frozen (frozen)", "25,200", "cursor"})
    EXPECT_NE(out_.find(part), std::string::npos) << part << "\n" << out_;
  std::istringstream lines(out_);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << line;
}

TEST_F(StateCommand, LongNamesAreShortenedInTheMiddle) {
  EXPECT_EQ(shortened_name("short", 40), "short");
  EXPECT_EQ(shortened_name("abcdefghijklmnopqrstuvwxyz", 11), "ab...uvwxyz");
  EXPECT_EQ(shortened_name("äöüäöüäöüäöüäöü", 11), "äö...äöüäöü");
  EXPECT_EQ(shortened_name("a\nb", 40), "a\\nb");
  EXPECT_EQ(shortened_name("abcdefghijk", 11), "abcdefghijk");
  EXPECT_EQ(shortened_name("abcdefghijkl", 11), "ab...ghijkl");
}

SavedStateFacts example_facts() {
  SavedStateFacts facts;
  facts.path = "/states/step-000000001234";
  facts.attempted_steps = 1234;
  facts.applied_steps = 1230;
  facts.loss_scale = 1024.5;
  facts.ranks = 5;
  facts.stage = 2;
  facts.dtype = "fp16";
  facts.trainer_state = "{\"cursor\": 7}" + std::string(300, 'x');
  facts.files = {{"rank-0-of-5.safetensors", 1000}, {"rank-1-of-5.safetensors", 2072}};
  SavedParameter matrix{.name = "wte", .count = 2100, .shape = {3, 700}, .has_shape = true};
  matrix.has_m = matrix.has_v = true;
  SavedParameter flat{.name = "bias", .count = 7, .shape = {7}, .has_shape = false, .frozen = true};
  facts.parameters = {matrix, flat};
  return facts;
}

TEST(StatePrint, EachFigureStandsBehindItsName) {
  EXPECT_EQ(state_text(example_facts(), {"step-000000001234", "step-000000001230"}),
            R"(state       /states/step-000000001234
step        1,234, 1,230 of them applied
saved by    5 ranks at ZeRO stage 2 in fp16
loss scale  1024.5
files       2 files, 3.00 KiB
parameters  2 parameters of 2,107 elements; weights, m and v in fp32 take 24.64 KiB
trainer     {"cursor":
            7}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
kept states step-000000001234, step-000000001230

parameter         shape  elements   bytes
wte            [3, 700]     2,100  25,200
bias (frozen)         -         7      28
)");

  SavedStateFacts plain = example_facts();
  plain.dtype = "bf16";
  plain.trainer_state = "";
  plain.ranks = 1;
  const std::string text = state_text(plain, {"step-000000001234"});
  EXPECT_EQ(text.find("loss scale"), std::string::npos) << text;
  EXPECT_EQ(text.find("kept states"), std::string::npos) << text;
  EXPECT_NE(text.find("\ntrainer     -\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\nsaved by    1 rank at ZeRO stage 2 in bf16\n"), std::string::npos) << text;
  EXPECT_EQ(state_size_text(plain), "2 files, 3.00 KiB; 2 parameters");
}

TEST(StatePrint, EachFigureHasItsKeyInJson) {
  SavedStateFacts facts = example_facts();
  facts.trainer_state = "\xff";
  EXPECT_EQ(Json::parse(state_json(facts, {"step-000000001234", "step-000000001230"})), Json::parse(R"(
{"path": "/states/step-000000001234", "step": 1234, "applied_steps": 1230, "loss_scale": 1024.5, "ranks": 5,
 "stage": 2, "dtype": "fp16", "trainer_state": "�", "kept_states": ["step-000000001234", "step-000000001230"],
 "files": [{"name": "rank-0-of-5.safetensors", "bytes": 1000},
           {"name": "rank-1-of-5.safetensors", "bytes": 2072}],
 "parameters": [{"name": "wte", "shape": [3, 700], "elements": 2100, "bytes": 25200, "frozen": false},
                {"name": "bias", "shape": null, "elements": 7, "bytes": 28, "frozen": true}]})"));
}

TEST_F(StateCommand, ExportsTheWeightsAsSafetensors) {
  save();

  ASSERT_EQ(command("export " + directory_ + " --to " + root_ + "/m.safetensors"), 0) << err_;
  EXPECT_EQ(out_, root_ + "/m.safetensors\n");
  EXPECT_NE(err_.find("the shapes of 1 parameter were not saved"), std::string::npos) << err_;
  EXPECT_EQ(files(), std::vector<std::string>{"m.safetensors"});
  const TensorFile file(root_ + "/m.safetensors");
  EXPECT_EQ(file.header["__metadata__"]["format"], "pt");
  EXPECT_EQ(file.header["wte"]["shape"], Json({3, 700}));
  EXPECT_EQ(file.header["wte"]["dtype"], "F32");
  EXPECT_EQ(file.header["bias"]["shape"], Json({7}));
  EXPECT_EQ(file.data.size(), (2100 + 7 + 600 + 1) * 4u);
  const char* const names[] = {"wte", "bias", "frozen", "z.last"};
  for (int p = 0; p < 4; ++p) {
    const std::vector<float> values = file.values<float>(names[p]);
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(values[i], value_of(p, i)) << names[p] << " " << i;
  }

  for (const char* type : {"bf16", "fp16"}) {
    ASSERT_EQ(command("export " + directory_ + " --dtype " + type + " --to " + root_ + "/n.safetensors"), 0)
        << err_;
    const TensorFile narrow(root_ + "/n.safetensors");
    const std::vector<std::uint16_t> values = narrow.values<std::uint16_t>("wte");
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float value = value_of(0, i);
      ASSERT_EQ(values[i], type == std::string("bf16") ? float_to_bfloat16(value) : float_to_float16(value));
    }
    EXPECT_EQ(narrow.header["wte"]["dtype"], type == std::string("bf16") ? "BF16" : "F16");
  }
}

TEST_F(StateCommand, RefusesAnExportOfAParameterThatIsCalledAsTheMetadata) {
  save(1, 1, 0.0, "__metadata__");

  EXPECT_EQ(command("export " + directory_ + " --to " + root_ + "/m.safetensors"), 2);

  EXPECT_NE(err_.find("a parameter is called __metadata__"), std::string::npos) << err_;
  EXPECT_TRUE(files().empty());
}

TEST_F(StateCommand, ExportsSeveralFilesWithAnIndex) {
  save();
  // Room for exactly 7 + 600 elements, and one byte too little for one more.
  for (const std::string limit : {"2428", "2431"}) {
    SCOPED_TRACE(limit);
    ASSERT_EQ(command("export " + directory_ + " --max-shard-size " + limit + " --to " + root_ +
                      "/model.safetensors"),
              0)
        << err_;

    const std::vector<std::string> expected = {
        "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors", "model.safetensors.index.json"};
    EXPECT_EQ(files(), expected);
    const Json index = Json::parse(text_of(root_ + "/model.safetensors.index.json"));
    EXPECT_EQ(index["metadata"]["total_size"], 2708 * 4);
    const std::map<std::string, std::string> places = index["weight_map"];
    const std::map<std::string, std::string> wanted = {
        {"wte", expected[0]}, {"bias", expected[1]}, {"frozen", expected[1]}, {"z.last", expected[2]}};
    // wte is larger than a file and has one alone.
    EXPECT_EQ(places, wanted);
    for (const auto& [name, place] : places) {
      const TensorFile file(root_ + "/" + place);
      EXPECT_TRUE(file.header.contains(name)) << name;
    }
  }
}

// A program would read the old one.
TEST_F(StateCommand, RefusesAnExportBesideOneOfTheOtherForm) {
  save();
  const std::string one = "export " + directory_ + " --to " + root_ + "/m.safetensors";
  const std::string several = one + " --max-shard-size 2430";
  ASSERT_EQ(command(several), 0) << err_;
  EXPECT_EQ(command(several), 0) << err_;
  EXPECT_EQ(command(one), 2);
  EXPECT_NE(err_.find("m.safetensors.index.json is there"), std::string::npos) << err_;
  EXPECT_FALSE(fs::exists(root_ + "/m.safetensors"));
  fs::remove(root_ + "/m.safetensors.index.json");
  EXPECT_EQ(command(one), 0) << err_;
  EXPECT_EQ(command(several), 2);
  EXPECT_NE(err_.find("m.safetensors is there"), std::string::npos) << err_;
  EXPECT_FALSE(fs::exists(root_ + "/m.safetensors.index.json"));
}

TEST_F(StateCommand, RefusesAnExportOverAFileOfTheStates) {
  save(2, 2);
  const std::string older = directory_ + "/step-000000000000", newest = directory_ + "/step-000000000001";
  const std::string file = newest + "/rank-0-of-3.safetensors";
  fs::rename(file, root_ + "/kept.safetensors");  // A state may be made of links.
  fs::create_symlink(root_ + "/kept.safetensors", file);
  fs::create_hard_link(older + "/rank-1-of-3.safetensors", root_ + "/hard.safetensors");
  fs::create_symlink(newest + "/rank-2-of-3.safetensors", root_ + "/soft.safetensors");
  fs::create_directory_symlink(newest, root_ + "/way");
  fs::create_hard_link(newest + "/manifest.json", root_ + "/index.safetensors.index.json");
  fs::create_directories(newest + "/of/user");
  const auto tree = [&] {
    std::map<std::string, std::string> texts;
    for (const auto& entry : fs::recursive_directory_iterator(root_)) {
      const std::string path = entry.path();
      if (entry.is_regular_file() && path != root_ + "/out" && path != root_ + "/err")
        texts[path] = text_of(path);
    }
    return texts;
  };
  const std::map<std::string, std::string> before = tree();
  const std::string several = " --max-shard-size 2430";
  for (const std::string& to :
       {file, newest + "/new.safetensors", newest + "/new.safetensors" + several, older + "/new.safetensors",
        newest + "/of/user/new.safetensors", root_ + "/way/new.safetensors",
        directory_ + "/../state/step-000000000001/new.safetensors", root_ + "/kept.safetensors",
        root_ + "/hard.safetensors", root_ + "/soft.safetensors", root_ + "/index.safetensors" + several}) {
    EXPECT_EQ(command("export " + directory_ + " --to " + to), 2) << to;
    EXPECT_NE(err_.find("is a file of the saved states in " + directory_), std::string::npos) << err_;
    EXPECT_EQ(tree(), before) << to;
  }
  EXPECT_EQ(command("export " + directory_ + " --to " + directory_ + "/model.safetensors"), 0) << err_;
}

TEST_F(StateCommand, RefusesAnExportOverAFileThatItDidNotWrite) {
  save();
  const std::string one = "export " + directory_ + " --to " + root_ + "/m.safetensors";
  const std::string several = one + " --max-shard-size 2430";
  const auto refuse = [&](const std::string& called, const std::string& name) {
    const std::string path = root_ + "/" + name;
    for (const std::string text : {"precious", ""}) {
      std::ofstream(path) << text;
      EXPECT_EQ(command(called), 2) << name;
      EXPECT_NE(err_.find("cannot write " + path + ": the file was not written by forebay state export"),
                std::string::npos)
          << err_;
      EXPECT_EQ(text_of(path), text);
      EXPECT_EQ(files(), std::vector<std::string>{name});
    }
    fs::rename(path, root_ + "/kept");
    fs::create_symlink("kept", path);
    EXPECT_EQ(command(called), 2) << name;
    EXPECT_NE(err_.find("it is there and is no regular file"), std::string::npos) << err_;
    EXPECT_TRUE(fs::is_symlink(path));
    fs::remove(path);
    fs::remove(root_ + "/kept");
  };
  refuse(one, "m.safetensors");
  refuse(several, "m-00001-of-00003.safetensors");
  refuse(several, "m-00003-of-00003.safetensors");
  refuse(several, "m.safetensors.index.json");
}

TEST_F(StateCommand, RefusesAnImportThatReplacesFilesOfItsSource) {
  save();
  const std::string model = root_ + "/model";
  fs::create_directory(model);
  ASSERT_EQ(command("export " + directory_ + " --to " + model + "/model.safetensors"), 0) << err_;
  fs::create_directory_symlink(model, root_ + "/way");
  for (const std::string& to : {model, root_ + "/way", model + "/../model"}) {
    EXPECT_EQ(command("import " + to + " --from " + model), 2) << to;
    EXPECT_NE(err_.find("is the directory that the weights come from"), std::string::npos) << err_;
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(model), {}), 1);
  // DeepSpeed has a file of this name too, above the directory of a checkpoint.
  const std::string other = root_ + "/other";
  fs::create_directory(other);
  std::ofstream(other + "/latest") << "global_step5";
  EXPECT_EQ(command("import " + other + " --from " + model), 2);
  EXPECT_NE(err_.find(other + "/latest is there"), std::string::npos) << err_;
  EXPECT_EQ(text_of(other + "/latest"), "global_step5");
}

TEST_F(StateCommand, TwoExportsToOneFileLeaveAWholeOne) {
  save();
  const std::string to = root_ + "/m.safetensors";
  SavedStateReader state(directory_);
  bool is_first = true;
  export_state(state, {.to = to}, [&](std::uint64_t, std::uint64_t) {
    if (!std::exchange(is_first, false)) return;
    EXPECT_EQ(command("export " + directory_ + " --to " + to), 0) << err_;
  });
  EXPECT_EQ(TensorFile(to).values<float>("wte").back(), value_of(0, 2099));
  EXPECT_EQ(files(), std::vector<std::string>{"m.safetensors"});
}

// With the names of one the files of another would go.
TEST_F(StateCommand, ExportsGiveTheirFilesNamesInTurn) {
  save();
  SavedStateReader state(directory_);
  const int other = ::open(root_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_EQ(::flock(other, LOCK_EX), 0);
  std::atomic<bool> has_ended{false};
  std::thread exporter([&] {
    export_state(state, {.to = root_ + "/m.safetensors", .max_shard_bytes = 2430},
                 [](std::uint64_t, std::uint64_t) {});
    has_ended = true;
  });
  const auto count = [&](const char* word) {
    std::size_t found = 0;
    for (const auto& entry : std::filesystem::directory_iterator(root_))
      found += entry.path().filename().string().find(word) != std::string::npos;
    return found;
  };
  struct stat facts {};
  ASSERT_EQ(::fstat(other, &facts), 0);
  const std::string inode = ':' + std::to_string(facts.st_ino) + ' ';
  const auto waits_for_lock = [&] {
    std::ifstream locks("/proc/locks");
    for (std::string line; std::getline(locks, line);) {
      if (line.find("-> FLOCK") != std::string::npos && line.find(inode) != std::string::npos) return true;
    }
    return false;
  };
  while (!has_ended && !waits_for_lock()) std::this_thread::yield();
  EXPECT_EQ(count(".exporting."), 4u);
  ASSERT_EQ(::flock(other, LOCK_UN), 0);
  exporter.join();
  ::close(other);
  EXPECT_EQ(count(".exporting."), 0u);
  EXPECT_EQ(count("m"), 4u);
}

// Three files and the index; the directory is synced last, and some file systems refuse that.
TEST_F(StateCommand, AnExportThatCannotBeSyncedFailsAndLeavesNothing) {
  save();
  SavedStateReader state(directory_);
  const StateExport wanted{.to = root_ + "/m.safetensors", .max_shard_bytes = 2430};
  const auto nothing = [](std::uint64_t, std::uint64_t) {};
  for (int sync = 1; sync <= 4; ++sync) {
    failing_sync = sync;
    try {
      export_state(state, wanted, nothing);
      ADD_FAILURE() << "sync " << sync << " failed, and the export did not";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kIoError);
      const char* const names[] = {"m-00001-of-00003.safetensors", "m-00002-of-00003.safetensors",
                                   "m-00003-of-00003.safetensors", "m.safetensors.index.json"};
      EXPECT_EQ(error.status().message(), "cannot write " + root_ + "/" + names[sync - 1] +
                                              ": Input/output error; name a place that can be written to and "
                                              "has room");
    }
    EXPECT_EQ(files(), std::vector<std::string>()) << sync;
  }
  failing_sync = 5;
  EXPECT_EQ(export_state(state, wanted, nothing).size(), 4u);
  EXPECT_EQ(failing_sync, 0);
  EXPECT_EQ(files().size(), 4u);
}

// A mixture of both would look whole.
TEST_F(StateCommand, AnExportOverAnotherOneThatBreaksOffLeavesNoIndex) {
  save();
  SavedStateReader state(directory_);
  const StateExport wanted{.to = root_ + "/m.safetensors", .max_shard_bytes = 2430};
  const auto nothing = [](std::uint64_t, std::uint64_t) {};
  for (int rename = 1; rename <= 4; ++rename) {
    EXPECT_EQ(export_state(state, wanted, nothing).size(), 4u);
    failing_rename = rename;
    EXPECT_THROW(export_state(state, wanted, nothing), Error);
    EXPECT_FALSE(fs::exists(root_ + "/m.safetensors.index.json")) << rename;
  }
}

TEST_F(StateCommand, ExportsAnAverageAndTheWeightsThatHaveNone) {
  save(1, 1, /*ema=*/0.9);
  ASSERT_EQ(command("export " + directory_ + " --average --to " + root_ + "/average.safetensors"), 0) << err_;
  const TensorFile file(root_ + "/average.safetensors");
  EXPECT_EQ(file.values<float>("frozen").at(5), value_of(2, 5));
  EXPECT_EQ(file.values<float>("wte").at(5), value_of(0, 5)) << "it begins as the weights";
  SavedStateReader state(directory_);
  std::uint64_t done = 0, all = 0;
  export_state(state, {.to = root_ + "/half.safetensors", .dtype = DataType::kBfloat16},
               [&](std::uint64_t done_then, std::uint64_t all_then) {
                 done = done_then;
                 all = all_then;
               });
  EXPECT_EQ(all, 2708 * 2u);
  EXPECT_EQ(done, all);
  state.verify([&](std::uint64_t done_then, std::uint64_t all_then) {
    done = done_then;
    all = all_then;
  });
  EXPECT_EQ(all, (4 * 2708 - 3 * 600) * sizeof(float)) << "master, m, v and average; the frozen one alone";
  EXPECT_EQ(done, all);
}

TEST_F(StateCommand, FailsWhenItsOutputCannotBeWritten) {
  save();
  ASSERT_EQ(command("export " + directory_ + " --to " + root_ + "/from.safetensors"), 0) << err_;
  for (const std::string& words : {"show " + directory_, "show --json " + directory_, "verify " + directory_,
                                   "verify --state step-000000000000 " + directory_,
                                   "export " + directory_ + " --to " + root_ + "/m.safetensors",
                                   "import " + root_ + "/imported --from " + root_ + "/from.safetensors"}) {
    const std::string line =
        std::string(FOREBAY_COMMAND) + " state " + words + " > /dev/full 2> " + root_ + "/err < /dev/null";
    EXPECT_EQ(WEXITSTATUS(std::system(line.c_str())), 1) << words;
    EXPECT_EQ(text_of(root_ + "/err").find("forebay state"), 0u) << words << text_of(root_ + "/err");
    EXPECT_NE(text_of(root_ + "/err").find("cannot write to standard output"), std::string::npos) << words;
  }
}

TEST_F(StateCommand, AnExportBeyondTheLimitOfFilesFailsAndLeavesNothing) {
  save();
  const std::string line = "ulimit -f 8; exec " FOREBAY_COMMAND " state export " + directory_ + " --to " +
                           root_ + "/m.safetensors > /dev/null 2> " + root_ + "/err < /dev/null";
  EXPECT_EQ(WEXITSTATUS(std::system(line.c_str())), 1);
  EXPECT_NE(text_of(root_ + "/err").find("File too large"), std::string::npos) << text_of(root_ + "/err");
  EXPECT_EQ(files(), std::vector<std::string>());
}

TEST_F(StateCommand, KeepsAsManyStatesAsWereAskedFor) {
  save(/*states=*/5, /*keep=*/3);

  const std::vector<std::string> kept = {"step-000000000004", "step-000000000003", "step-000000000002"};
  EXPECT_EQ(saved_state_names(directory_), kept);
  EXPECT_EQ(SavedStateReader(directory_).facts().attempted_steps, 4u);
  EXPECT_EQ(SavedStateReader(directory_, kept[2]).facts().trainer_state, "{\"cursor\": 2}");
  ASSERT_EQ(command("verify " + directory_), 0) << err_;
  for (const std::string& name : kept) EXPECT_NE(out_.find(name + " is whole"), std::string::npos) << out_;
  EXPECT_NE(out_.find("to load: step-000000000004"), std::string::npos) << out_;
  ASSERT_EQ(command("show " + directory_ + " --state step-000000000003 --json"), 0) << err_;
  EXPECT_EQ(Json::parse(out_)["step"], 3);
  EXPECT_EQ(command("show " + directory_ + " --state step-000000000009"), 1);
  EXPECT_NE(err_.find("it has step-000000000002 to step-000000000004"), std::string::npos) << err_;
}

// A changed byte anywhere is noticed, and an export of it leaves no file.
TEST_F(StateCommand, VerifyFindsEveryChangedByte) {
  save();
  for (const char* name : {"rank-1-of-3.safetensors", "manifest.json", "state.safetensors.index.json"}) {
    const std::string path = directory_ + "/step-000000000000/" + name;
    const std::uint64_t bytes = fs::file_size(path);
    for (std::uint64_t at = 0; at < bytes; at += std::max<std::uint64_t>(bytes / 7, 1)) {
      flip(path, at);
      EXPECT_EQ(command("verify " + directory_), 1) << name << " at " << at << "\n" << out_;
      EXPECT_NE(err_.find("step-000000000000"), std::string::npos) << err_;
      flip(path, at);
    }
  }
  const std::string index = directory_ + "/step-000000000000/state.safetensors.index.json";
  fs::rename(index, root_ + "/index");
  EXPECT_EQ(command("verify " + directory_), 1) << out_;
  EXPECT_NE(err_.find("index.json is damaged: it is not there"), std::string::npos) << err_;
  fs::rename(root_ + "/index", index);
  EXPECT_EQ(command("verify " + directory_), 0) << err_;

  const std::string first = directory_ + "/step-000000000000/rank-0-of-3.safetensors";
  std::uint64_t header = 0;
  std::memcpy(&header, text_of(first).data(), sizeof header);
  flip(first, sizeof header + header);  // The first value of wte.
  EXPECT_EQ(command("export " + directory_ + " --to " + root_ + "/m.safetensors"), 1);
  EXPECT_NE(err_.find("the checksum of master of wte differs"), std::string::npos) << err_;
  EXPECT_TRUE(files().empty());
}

TEST_F(StateCommand, ImportsSafetensorsAsAStateThatAnEngineLoads) {
  save();
  ASSERT_EQ(command("export " + directory_ + " --max-shard-size 2430 --to " + root_ + "/model.safetensors"),
            0);
  for (const char* from : {"/model.safetensors.index.json", ""}) {
    const std::string imported = root_ + "/imported";
    ASSERT_EQ(command("import " + imported + " --from " + root_ + from), 0) << err_;
    ASSERT_EQ(command("verify " + imported), 0) << err_;
    ASSERT_EQ(command("show " + imported + " --json"), 0) << err_;
    EXPECT_EQ(Json::parse(out_)["parameters"].size(), 4u);
    EXPECT_EQ(Json::parse(out_)["parameters"][3]["bytes"], 4) << "z.last, a weight alone";
    run_ranks(2, {}, [&](Rank& rank) {
      EngineOptions options;
      options.stage = 2;
      options.optimizer = Optimizer::kLion;
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
      const UnitId unit = engine.add_unit("all");
      const std::vector<ParameterId> ids = {
          engine.add_parameter(unit, "bias", 7), engine.add_parameter(unit, "frozen", 600, 0, true),
          engine.add_parameter(unit, "wte", 2100), engine.add_parameter(unit, "z.last", 1)};
      engine.commit();
      engine.load_state(imported);
      const int numbers[] = {1, 2, 0, 3};
      for (std::size_t p = 0; p < ids.size(); ++p) {
        const std::vector<float> values = engine.get_parameter(ids[p]);
        for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], value_of(numbers[p], i));
      }
      EXPECT_EQ(engine.get_moment(ids[2], Moment::kFirst), std::vector<float>(2100));
    });
    EXPECT_EQ(command("import " + imported + " --from " + root_ + from), 2);
    EXPECT_NE(err_.find("holds a saved state already"), std::string::npos) << err_;
    fs::remove_all(imported);
  }
  ASSERT_EQ(command("export " + directory_ + " --dtype bf16 --to " + root_ + "/n.safetensors"), 0);
  ASSERT_EQ(command("import " + root_ + "/n --prefix z. --from " + root_ + "/n.safetensors"), 0) << err_;
  ASSERT_EQ(command("show " + root_ + "/n --json"), 0) << err_;
  ASSERT_EQ(Json::parse(out_)["parameters"].size(), 1u);
  EXPECT_EQ(Json::parse(out_)["parameters"][0]["name"], "last");
  // Back again: the same bytes.
  ASSERT_EQ(command("export " + directory_ + " --to " + root_ + "/m.safetensors"), 0);
  ASSERT_EQ(command("import " + root_ + "/m --from " + root_ + "/m.safetensors"), 0) << err_;
  ASSERT_EQ(command("export " + root_ + "/m --to " + root_ + "/again.safetensors"), 0);
  const TensorFile first(root_ + "/m.safetensors");
  const TensorFile again(root_ + "/again.safetensors");
  for (const char* name : {"wte", "bias", "frozen", "z.last"})
    EXPECT_EQ(first.values<float>(name), again.values<float>(name)) << name;

  // Damaged and foreign files, and nothing is left of them.
  const std::string whole = text_of(root_ + "/m.safetensors");
  const auto refused = [&](const std::string& text, const std::string& part) {
    std::ofstream(root_ + "/bad.safetensors", std::ios::binary) << text;
    EXPECT_EQ(command("import " + root_ + "/bad --from " + root_ + "/bad.safetensors"), 1);
    EXPECT_NE(err_.find(part), std::string::npos) << err_;
    EXPECT_FALSE(fs::exists(root_ + "/bad/latest"));
  };
  const std::string odd = R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                          R"("b":{"dtype":"F32","shape":[3],"data_offsets":[4,16]},)"
                          R"("empty":{"dtype":"F32","shape":[0,2],"data_offsets":[16,16]}})";
  const float values[] = {std::numeric_limits<float>::infinity(), 1, std::numeric_limits<float>::quiet_NaN(),
                          -std::numeric_limits<float>::infinity()};
  std::ofstream(root_ + "/odd.safetensors", std::ios::binary)
      << static_cast<char>(odd.size()) << std::string(7, '\0') << odd
      << std::string(reinterpret_cast<const char*>(values), sizeof values);
  EXPECT_EQ(command("import " + root_ + "/odd --from " + root_ + "/odd.safetensors"), 0);
  EXPECT_NE(err_.find("note: 3 weights are NaN or infinite, the first in a\n"), std::string::npos) << err_;
  EXPECT_NE(err_.find("note: 1 tensor without elements is left out, empty\n"), std::string::npos) << err_;
  // A scalar stays one.
  ASSERT_EQ(command("export " + root_ + "/odd --to " + root_ + "/odd-again.safetensors"), 0) << err_;
  EXPECT_EQ(err_, "");
  const std::string exported = text_of(root_ + "/odd-again.safetensors");
  EXPECT_NE(exported.find(R"("a":{"dtype":"F32","shape":[],)"), std::string::npos) << exported.substr(0, 200);

  refused("", "it is too short");
  refused(whole.substr(0, whole.size() - 1), "is not that of its elements");
  refused(std::string(8, '\x7f') + whole.substr(8), "its header is too long");
  std::string integers = whole;
  integers.replace(integers.find("F32"), 3, "I32");
  refused(integers, "of type I32");
  std::string text = whole;
  text[10] = '\xff';
  refused(text, "its header cannot be read");
  std::string twice = whole;
  twice.replace(twice.find("\"bias\""), 6, "\"wte\" ");
  refused(twice, "it has wte twice");
  const std::string shared = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},)"
                             R"("b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  refused(
      std::string{static_cast<char>(shared.size())} + std::string(7, '\0') + shared + std::string(12, '\0'),
      "its tensors b and a share bytes");
  const std::string large = R"({"a":{"dtype":"F32","shape":[9223372036854775809,2],"data_offsets":[0,8]}})";
  refused(std::string{static_cast<char>(large.size())} + std::string(7, '\0') + large + std::string(8, '\0'),
          "the shape of a is too large");
  for (const char* const end : {"5", "8"}) {
    const std::string longer =
        R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,)" + std::string(end) + "]}}";
    refused(
        std::string{static_cast<char>(longer.size())} + std::string(7, '\0') + longer + std::string(8, '\0'),
        "the place of a is not that of its elements");
  }
  // A header of more bytes than are read, in a file without blocks.
  constexpr std::uint64_t kMostHeaderBytes = 100u << 20;
  const std::uint64_t length = kMostHeaderBytes + 1;
  const std::string bad = root_ + "/bad.safetensors";
  std::ofstream(bad, std::ios::binary) << std::string(reinterpret_cast<const char*>(&length), sizeof length);
  fs::resize_file(bad, sizeof length + length);
  EXPECT_EQ(command("import " + root_ + "/bad --from " + bad), 1);
  EXPECT_NE(err_.find("its header is too long"), std::string::npos) << err_;
  fs::rename(bad, bad + ".index.json");
  EXPECT_EQ(command("import " + root_ + "/bad --from " + bad + ".index.json"), 1);
  EXPECT_NE(err_.find("it is too long for an index"), std::string::npos) << err_;
}

// Checkpoints with an expert for each tensor have as many. A quadratic reader takes minutes.
TEST_F(StateCommand, ImportsManyTensorsInLinearTime) {
  constexpr int kTensors = 60'000;
  std::string header = "{";
  for (int i = 0; i < kTensors; ++i) {
    header += (i == 0 ? "" : ",") + ("\"t" + std::to_string(i)) + "\":{\"dtype\":\"F32\",\"shape\":[1]," +
              "\"data_offsets\":[" + std::to_string(4 * i) + "," + std::to_string(4 * i + 4) + "]}";
  }
  header += "}";
  const std::uint64_t length = header.size();
  std::ofstream(root_ + "/many.safetensors", std::ios::binary)
      << std::string(reinterpret_cast<const char*>(&length), sizeof length) << header
      << std::string(4 * kTensors, '\0');

  EXPECT_EQ(command("import " + root_ + "/many --from " + root_ + "/many.safetensors"), 0) << err_;
  EXPECT_EQ(SavedStateReader(root_ + "/many").facts().parameters.size(), std::size_t{kTensors});
}

TEST_F(StateCommand, AStateOfAStepWithTooManyDigitsIsRefused) {
  SavedStateFacts facts;
  facts.attempted_steps = 1'000'000'000'000;
  facts.parameters = {{.name = "w", .count = 1}};
  try {
    SavedStateWriter writer(root_ + "/late", facts);
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("999999999999 at most"), std::string::npos) << error.what();
  }
  EXPECT_FALSE(fs::exists(root_ + "/late"));
}

TEST_F(StateCommand, RefusesAnIndexOfTensorsThatItsFilesDoNotHave) {
  save();
  ASSERT_EQ(command("export " + directory_ + " --max-shard-size 2430 --to " + root_ + "/model.safetensors"),
            0);
  const std::string path = root_ + "/model.safetensors.index.json";
  const Json whole = Json::parse(text_of(path));
  const std::string other = whole["weight_map"]["wte"];
  ASSERT_NE(whole["weight_map"]["z.last"], other);
  const auto refused = [&](const char* tensor) {
    Json index = whole;
    index["weight_map"][tensor] = other;
    std::ofstream(path) << index;
    EXPECT_EQ(command("import " + root_ + "/imported --from " + root_), 1);
    EXPECT_NE(err_.find(std::string("the tensor ") + tensor + " is not in " + root_ + "/" + other),
              std::string::npos)
        << err_;
    EXPECT_FALSE(fs::exists(root_ + "/imported"));
  };
  refused("missing");
  refused("z.last");
  // Two tensors of each of two files: one name twice, or one in the other file.
  const auto write = [&](const std::string& file, const std::string& first, const std::string& second) {
    const auto entry = [](const std::string& name, const char* offsets) {
      return "\"" + name + R"(":{"dtype":"F32","shape":[1],"data_offsets":)" + offsets + "}";
    };
    const std::string header = "{" + entry(first, "[0,4]") + "," + entry(second, "[4,8]") + "}";
    std::ofstream(root_ + "/" + file, std::ios::binary)
        << static_cast<char>(header.size()) << std::string(7, '\0') << header << std::string(8, '\0');
  };
  const auto import = [&](const std::string& place_of_b) {
    Json index;
    index["weight_map"] = {{"a", "one"}, {"b", place_of_b}, {"d", "two"}};
    std::ofstream(path) << index;
    return command("import " + root_ + "/imported --from " + path);
  };
  write("one", "a", "b");
  write("two", "c", "d");
  EXPECT_EQ(import("two"), 1);
  EXPECT_NE(err_.find("the tensor b is not in " + root_ + "/two"), std::string::npos) << err_;
  write("two", "b", "d");
  EXPECT_EQ(import("one"), 1);
  EXPECT_NE(err_.find("/two cannot be imported: another file has b too"), std::string::npos) << err_;
  EXPECT_EQ(import("elsewhere/one"), 1);
  EXPECT_NE(err_.find("it names a file in another directory"), std::string::npos) << err_;
  // Beside a file of all tensors, an index is not read.
  write("model.safetensors", "a", "b");
  EXPECT_EQ(command("import " + root_ + "/imported --from " + root_), 0) << err_;
}

TEST_F(StateCommand, BadInputIsRefusedInWords) {
  const auto refused = [&](const std::string& arguments, int code, const std::string& part) {
    EXPECT_EQ(command(arguments), code) << arguments;
    EXPECT_NE(err_.find(part), std::string::npos) << err_;
    EXPECT_EQ(std::count(err_.begin(), err_.end(), '\n'), 1) << err_;
  };
  for (const char* action : {"show ", "verify "}) {
    refused(action + root_ + "/nothing", 1, "there is no directory");
    refused(action + root_, 1, "there is no saved state in " + root_);
  }
  fs::create_directories(root_ + "/parts/step-12/part-0");
  std::ofstream(root_ + "/parts/step-12/part-0/latest") << "x";
  refused("show " + root_ + "/parts", 1, "step-12/part-0; give one of these");
  fs::remove_all(root_ + "/parts");
  save();
  refused("export " + directory_, 2, "add --to model.safetensors");
  refused("export " + directory_ + " --to " + root_ + "/model.bin", 2, "ends in .safetensors");
  refused("export " + directory_ + " --to " + root_ + "/.safetensors", 2, "ends in .safetensors");
  refused("export " + directory_ + " --average --to " + root_ + "/m.safetensors", 2, "has no moving average");
  refused("export " + directory_ + " --to " + root_ + "/no/m.safetensors", 1, "cannot write");
  refused("export " + directory_ + " --to " + root_ + "/m.safetensors --max-shard-size 0", 2,
          "--max-shard-size");
  refused("export " + directory_ + " --to " + root_ + "/m.safetensors --dtype int8", 2, "fp32, bf16, fp16");
  refused("show " + directory_ + " --to " + root_ + "/m.safetensors", 2, "--to is for export");
  refused("verify " + directory_ + " --json", 2, "--json is for show");
  refused("burn " + directory_, 2, "verify, show, export, import");
  fs::create_directory(root_ + "/d.safetensors");
  refused("export " + directory_ + " --to " + root_ + "/d.safetensors", 2, "is no regular file");
  fs::remove(root_ + "/d.safetensors");
  std::ofstream(directory_ + "/latest") << "nonsense";
  EXPECT_EQ(command("verify " + directory_), 0) << err_;  // The newest whole state is loaded then.
  EXPECT_TRUE(files().empty());
}

TEST_F(StateCommand, ADeclaredShapeHasTheParametersElements) {
  run_ranks(1, {}, [&](Rank& rank) {
    Engine engine(*rank.backend, *rank.kernels, *rank.communicator, {});
    const ParameterId id = engine.add_parameter(engine.add_unit("u"), "p", 12);
    EXPECT_THROW(engine.declare_shape(id, {3, 5}), Error);
    EXPECT_THROW(engine.declare_shape(id, {std::uint64_t{1} << 63, 6}), Error);
    EXPECT_THROW(engine.declare_shape({0, 1}, {12}), Error);
    engine.declare_shape(id, {3, 4});
    EXPECT_EQ(engine.model().units[0].parameters[0].shape, (std::vector<std::uint64_t>{3, 4}));
  });
}

}  // namespace
}  // namespace forebay
