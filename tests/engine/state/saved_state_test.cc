// Saved state against other jobs, planted files, kills and file systems: nothing that was saved is lost, and
// nothing but Error is thrown.

#include "runtime/engine/state/saved_state.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "forebay/checksum.h"
#include "forebay/error.h"
#include "forebay/saved_state.h"
#include "tests/engine/toy_cases.h"
#include "tests/support/temporary_directory.h"

namespace {

// The operations on files, in order: "sync NAME", "rename to NAME" and "remove DIRECTORY". The library's
// calls come here.
thread_local std::vector<std::string>* file_operations = nullptr;

std::string last_part(const std::string& path) {
  return path.substr(path.find_last_of('/') + 1);
}

}  // namespace

// The error of syncing a directory on this thread, or 0.
namespace {
thread_local int directory_sync_error = 0;
}
extern "C" int fsync(int file) {
  struct stat facts {};
  if (directory_sync_error != 0 && ::fstat(file, &facts) == 0 && S_ISDIR(facts.st_mode)) {
    errno = directory_sync_error;
    return -1;
  }
  if (file_operations != nullptr) {
    char path[4096] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(file);
    if (::readlink(link.c_str(), path, sizeof path - 1) > 0)
      file_operations->push_back("sync " + last_part(path));
  }
  return static_cast<int>(::syscall(SYS_fsync, file));
}

// A full pipe, or a file system over a network, takes a part.
namespace {
thread_local std::size_t most_written = SIZE_MAX;
}
extern "C" ssize_t write(int file, const void* data, size_t bytes) {
  return ::syscall(SYS_write, file, data, std::min<std::size_t>(bytes, most_written));
}

// Called before this thread opens a file below a directory.
namespace {
thread_local std::function<void(const std::string& name)>* before_open = nullptr;
}
extern "C" int openat(int directory, const char* name, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = va_arg(more, mode_t);
  va_end(more);
  if (before_open != nullptr) (*before_open)(name);
  return static_cast<int>(::syscall(SYS_openat, directory, name, flags, mode));
}

extern "C" int unlinkat(int directory, const char* name, int flags) {
  if (file_operations != nullptr && (flags & AT_REMOVEDIR) != 0)
    file_operations->push_back(std::string("remove ") + name);
  return static_cast<int>(::syscall(SYS_unlinkat, directory, name, flags));
}

// Whether this thread cannot rename an old state, as where another process is in its directory on some file
// systems.
namespace {
thread_local bool holds_old_states = false;
}
extern "C" int renameat(int from_directory, const char* from, int to_directory, const char* to) {
  if (holds_old_states && std::string(to).starts_with(".removing-")) {
    errno = EBUSY;
    return -1;
  }
  if (file_operations != nullptr) file_operations->push_back(std::string("rename to ") + to);
  return static_cast<int>(::syscall(SYS_renameat2, from_directory, from, to_directory, to, 0));
}

namespace forebay::testing {
namespace {

namespace fs = std::filesystem;
using internal::SavedState;
using internal::StateDirectory;
using internal::StateLock;

constexpr std::size_t kValues = 3000;

float value_of(std::uint64_t step, std::size_t index) {
  return static_cast<float>(step) + static_cast<float>(index) / kValues;
}

// Writes the file of a state of one parameter, as an engine does. Returns the name of the state.
std::string begin_state(const StateDirectory& files, std::uint64_t step) {
  const std::string temporary =
      internal::temporary_state(internal::state_name(step), internal::new_save_number());
  internal::remove_unfinished(files);
  files.make_subdirectory(temporary);
  internal::StateFileWriter file(files.subdirectory(temporary).create(internal::state_file_name(0, 1)),
                                 std::vector<internal::StateParameter>{{.name = "p", .count = kValues}},
                                 {{.parameter = 0, .field = 0, .offset = 0, .count = kValues}});
  std::vector<float> values(kValues);
  for (std::size_t i = 0; i < kValues; ++i) values[i] = value_of(step, i);
  file.write(values);
  file.finish();
  return temporary;
}

void save(const std::string& directory, std::uint64_t step, int keep = 1) {
  const StateDirectory files = StateDirectory::make(directory);
  const StateLock lock(files);
  internal::publish_state(files, begin_state(files, step), {{"step", step}, {"ranks", 1}}, keep);
}

// The step of the state that would be loaded, all of it read. Errors: throws Error.
std::uint64_t load(const std::string& directory) {
  const std::string name = internal::find_state(StateDirectory(directory));
  if (name.empty()) throw Error(StatusCode::kIoError, "nothing is saved");
  SavedState saved(directory, name);
  const auto step = saved.manifest().at("step").get<std::uint64_t>();
  std::vector<float> values(kValues);
  saved.read("p", "master", 0, values);
  for (std::size_t i = 0; i < kValues; ++i) EXPECT_EQ(values[i], value_of(step, i));
  return step;
}

// Changes a manifest, and its checksum with it.
void change_manifest(const std::string& path, const std::function<void(nlohmann::json&)>& change) {
  nlohmann::json envelope;
  std::ifstream(path) >> envelope;
  nlohmann::json manifest = nlohmann::json::parse(envelope.at("manifest").get<std::string>());
  change(manifest);
  const std::string text = manifest.dump();
  envelope = {{"checksum", checksum_of(text.data(), text.size())}, {"manifest", text}};
  std::ofstream(path) << envelope;
}

Status verdict(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.status();
  }
  return Status();
}

// A child process. `work` gets a descriptor to write to; it must start no thread.
class Child {
 public:
  explicit Child(const std::function<void(int report)>& work) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("cannot make a pipe");
    report_ = ends[0];
    process_ = ::fork();
    if (process_ == 0) {
      ::close(ends[0]);
      int code = 0;
      try {
        work(ends[1]);
      } catch (const Error&) {
        code = 2;
      }
      ::_exit(code);
    }
    ::close(ends[1]);
  }
  ~Child() {
    if (process_ > 0) kill();
    ::close(report_);
  }
  // The next report; none if the child has ended.
  bool next(std::uint64_t& value) const {
    return ::read(report_, &value, sizeof(value)) == static_cast<ssize_t>(sizeof(value));
  }
  void kill() {
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
    process_ = 0;
  }
  pid_t process() const { return process_; }

 private:
  int report_ = -1;
  pid_t process_ = 0;
};

void report(int descriptor, std::uint64_t value) {
  if (::write(descriptor, &value, sizeof(value)) != static_cast<ssize_t>(sizeof(value))) ::_exit(3);
}

class SavedStateFiles : public ::testing::Test {
 protected:
  SavedStateFiles() { directory_ = make_temporary_directory("state"); }
  ~SavedStateFiles() override {
    std::error_code ignored;
    fs::remove_all(directory_, ignored);
  }
  void survive_kills(int kills);
  void let_two_jobs_save(int rounds);
  std::string file(const std::string& name) const { return directory_ + "/" + name; }
  std::string latest() const {
    std::ifstream stream(file("latest"));
    std::string name;
    std::getline(stream, name);
    return name;
  }

  std::string directory_;
};

// Reports when it has the lock, and keeps it.
void hold_lock(const std::string& directory, int out) {
  const StateLock lock{StateDirectory(directory)};
  report(out, 1);
  for (;;) ::pause();
}

TEST_F(SavedStateFiles, AnotherJobIsToldWhoSavesThere) {
  save(directory_, 1);
  Child other([&](int out) { hold_lock(directory_, out); });
  std::uint64_t ready = 0;
  ASSERT_TRUE(other.next(ready));
  const Status refused = verdict([&] { save(directory_, 2); });
  EXPECT_EQ(refused.code(), StatusCode::kUnavailable);
  EXPECT_NE(refused.message().find("process " + std::to_string(other.process()) + " on "), std::string::npos)
      << refused.message();
  EXPECT_EQ(load(directory_), 1U) << "loading needs no lock";
  other.kill();
  save(directory_, 2);
  EXPECT_EQ(load(directory_), 2U);
}

TEST_F(SavedStateFiles, ALockThatACopyByLinksSharesIsNamed) {
  save(directory_, 1);
  Child other([&](int out) { hold_lock(directory_, out); });
  std::uint64_t ready = 0;
  ASSERT_TRUE(other.next(ready));
  const std::string copy = file("copy");
  fs::create_directory(copy);
  fs::create_hard_link(file(".lock"), copy + "/.lock");

  const Status refused = verdict([&] { save(copy, 2); });
  fs::remove(copy + "/.lock");

  EXPECT_EQ(refused.code(), StatusCode::kUnavailable);
  for (const std::string& words : {"process " + std::to_string(other.process()) + " on ",
                                   std::string("is a hard link"), std::string("remove this link")})
    EXPECT_NE(refused.message().find(words), std::string::npos) << refused.message();
  save(copy, 2);
  EXPECT_EQ(load(copy), 2U);
}

mode_t mode_of(const std::string& path) {
  struct stat facts {};
  return ::stat(path.c_str(), &facts) == 0 ? facts.st_mode & 07777 : 0;
}

// A lock that no forebay job took, of a descriptor of its own.
int lock_of_another_program(const std::string& path, short type) {
  const int file = ::open(path.c_str(), type == F_RDLCK ? O_RDONLY : O_RDWR);
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  EXPECT_EQ(::fcntl(file, F_OFD_SETLK, &lock), 0);
  return file;
}

TEST_F(SavedStateFiles, TheLockIsForItsOwnerAlone) {
  save(directory_, 1);
  EXPECT_EQ(mode_of(file(".lock")), 0600U);
  ASSERT_EQ(::chmod(file(".lock").c_str(), 0666), 0);
  const StateLock lock{StateDirectory(directory_)};
  EXPECT_EQ(mode_of(file(".lock")), 0600U) << "an earlier version made it for all to read";
}

TEST_F(SavedStateFiles, AnotherUserCannotHoldTheLock) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  save(directory_, 1);
  ASSERT_EQ(::chmod(directory_.c_str(), 0755), 0);
  Child stranger([&](int out) {
    constexpr uid_t kNobody = 65534;
    if (::setgid(kNobody) != 0 || ::setuid(kNobody) != 0) ::_exit(3);
    if (::access(file("latest").c_str(), R_OK) != 0) return report(out, 1);
    if (::open(file(".lock").c_str(), O_RDONLY) >= 0) return report(out, 3);
    const Status status = verdict([&] { const StateLock lock{StateDirectory(directory_)}; });
    report(out, status.message().find("it is user 0's") == std::string::npos ? 4 : 2);
  });
  std::uint64_t finding = 0;
  ASSERT_TRUE(stranger.next(finding));
  if (finding == 1) GTEST_SKIP() << "another user cannot reach TMPDIR";
  EXPECT_EQ(finding, 2U) << "3: it could take a read lock, 4: it is not told whose the lock is";
}

TEST_F(SavedStateFiles, ALockOfAnotherProgramIsNotBlamedOnTheLastJob) {
  const auto refused_under = [&](short type) {
    const int file_number = lock_of_another_program(file(".lock"), type);
    const Status status = verdict([&] { save(directory_, 2); });
    ::close(file_number);
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_EQ(status.message().find("another job saves"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("a process that is not named holds a lock on " + file(".lock")),
              std::string::npos)
        << status.message();
    return status.message();
  };
  const auto last = [](pid_t process) {
    return "written last by process " + std::to_string(process) + " on ";
  };

  save(directory_, 1);
  for (const short type : {F_RDLCK, F_WRLCK})
    EXPECT_NE(refused_under(type).find(last(::getpid())), std::string::npos) << "its own process";

  Child ended([&](int out) {
    save(directory_, 1);
    report(out, 1);
    for (;;) ::pause();
  });
  std::uint64_t ready = 0;
  ASSERT_TRUE(ended.next(ready));
  const pid_t process = ended.process();
  EXPECT_NE(refused_under(F_RDLCK).find(last(process)), std::string::npos) << "a job takes no read lock";
  ended.kill();
  EXPECT_NE(refused_under(F_WRLCK).find(last(process)), std::string::npos) << "a dead one";
  save(directory_, 2);
}

// A trainer that copies its directory opens and closes the lock's file; its children outlive it.
TEST_F(SavedStateFiles, ALockEndsWithItsProcessAndNotBefore) {
  save(directory_, 1);
  int release[2];
  ASSERT_EQ(::pipe(release), 0);
  Child other([&](int out) {
    const StateLock lock{StateDirectory(directory_)};
    std::ifstream(file(".lock")).get();
    if (::fork() == 0) {
      // A child gives up the lock when it begins to run.
      report(out, 1);
      ::close(release[1]);
      char end = 0;
      ::_exit(static_cast<int>(::read(release[0], &end, 1)));
    }
    for (;;) ::pause();
  });
  ::close(release[0]);
  std::uint64_t ready = 0;
  ASSERT_TRUE(other.next(ready));
  EXPECT_EQ(verdict([&] { save(directory_, 2); }).code(), StatusCode::kUnavailable);
  other.kill();
  save(directory_, 2);
  EXPECT_EQ(load(directory_), 2U);
  ::close(release[1]);
}

TEST_F(SavedStateFiles, OneSaveOfAProcessHoldsADirectoryAtATime) {
  const StateDirectory files(directory_);
  const StateLock kept(files);
  const auto other_save = [&] { return verdict([&] { StateLock lock(files, true); }).code(); };
  {
    const StateLock first(files, true);
    EXPECT_EQ(other_save(), StatusCode::kUnavailable);
    const StateLock beside(files);
    EXPECT_EQ(other_save(), StatusCode::kUnavailable) << "a lock that saves nothing ends no save";
  }
  EXPECT_EQ(other_save(), StatusCode::kOk);
  EXPECT_EQ(other_save(), StatusCode::kOk) << "the save before has ended";
}

TEST_F(SavedStateFiles, TheIndexesOfAStateCountItsBytes) {
  save(directory_, 1);
  nlohmann::json index;
  std::ifstream(file("step-000000000001/state.safetensors.index.json")) >> index;
  EXPECT_EQ(index.at("metadata").at("total_size"), kValues * sizeof(float));
  const std::string name = "rank-0-of-1.safetensors";
  const std::string path = file("step-000000000001/" + name);
  std::ifstream whole(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(whole)), {});
  const std::size_t end = text.find("12008]");
  ASSERT_NE(end, std::string::npos);
  text.replace(end, 6, "12007]").pop_back();
  std::ofstream(path, std::ios::binary) << text;
  const Status status = verdict([&] {
    internal::StateFileIndex(StateDirectory(directory_).subdirectory("step-000000000001").open(name));
  });
  EXPECT_NE(status.message().find("its header does not describe all of it"), std::string::npos)
      << status.message();
}

// A text is escaped in the manifest, and the manifest in its file: a quote takes four bytes.
TEST_F(SavedStateFiles, AManifestThatCannotBeReadIsNotPublished) {
  save(directory_, 1);
  const StateDirectory files(directory_);
  const std::string temporary = begin_state(files, 2);
  const nlohmann::json manifest = {{"step", 2}, {"ranks", 1}, {"trainer_state", std::string(2000, '"')}};

  const Status status = verdict([&] { internal::publish_state(files, temporary, manifest, 1, 8000); });

  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  for (const char* const part : {"7.81 KiB", "keep large data of the trainer in a file of its own"})
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  EXPECT_EQ(load(directory_), 1U);
  EXPECT_FALSE(fs::exists(file(internal::state_name(2))));
  internal::publish_state(files, temporary, manifest, 1, 16000);
  EXPECT_EQ(load(directory_), 2U);
}

// The state has one parameter with one element, which is 1.
void save_one_value(const std::string& directory) {
  SavedStateFacts facts;
  facts.parameters = {{.name = "p", .count = 1}};
  SavedStateWriter writer(directory, facts);
  const float value = 1;
  writer.write({&value, 1});
  writer.finish();
}

TEST_F(SavedStateFiles, AStateOfMoreRanksOrElementsThanThereAreIsRefused) {
  save_one_value(directory_);
  EXPECT_EQ(SavedStateReader(directory_).facts().ranks, 1);
  const std::string manifest = file("step-000000000000/manifest.json");
  change_manifest(manifest, [](nlohmann::json& json) { json["ranks"] = 5'000'000'000; });
  const Status status = verdict([&] { SavedStateReader reader(directory_); });
  EXPECT_NE(status.message().find("ranks is 5000000000"), std::string::npos) << status.message();
  // The product of the shape is 1 in 64 bits.
  change_manifest(manifest, [](nlohmann::json& json) {
    json["ranks"] = 1;
    json["parameters"][0]["shape"] = {3, 12'297'829'382'473'034'411u};
  });
  const Status large = verdict([&] { SavedStateReader reader(directory_); });
  EXPECT_NE(large.message().find("the shape of p is not that of its elements"), std::string::npos)
      << large.message();
}

TEST_F(SavedStateFiles, AnEngineKeepsItsLockUntilItEnds) {
  const ToyOptions options = options_for(1, DataType::kBfloat16, 2);
  const auto can_lock = [&] {
    Child other([&](int out) {
      const StateLock lock{StateDirectory(directory_)};
      report(out, 1);
    });
    std::uint64_t value = 0;
    return other.next(value);
  };
  run_ranks(2, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    trainer.engine().lock_state(directory_);
    trainer.engine().save_state(directory_, "x");
    EXPECT_TRUE(rank.communicator->rank() != 0 || !can_lock());
    throw_if_error(rank.communicator->barrier());
  });
  EXPECT_TRUE(can_lock());
  Child other([&](int out) { hold_lock(directory_, out); });
  std::uint64_t ready = 0;
  ASSERT_TRUE(other.next(ready));
  run_ranks(2, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    const Status refused = verdict([&] { trainer.engine().lock_state(directory_); });
    EXPECT_EQ(refused.code(), StatusCode::kUnavailable) << "every rank is told";
    EXPECT_EQ(verdict([&] { trainer.engine().save_state(directory_, "y"); }).code(),
              StatusCode::kUnavailable);
    EXPECT_FALSE(trainer.step(0).skipped) << "the engine goes on";
    EXPECT_EQ(trainer.engine().load_state(directory_), "x");
  });
}

// Each rank saves its part, so the state would be a mixture that no rank ever had.
TEST_F(SavedStateFiles, RanksWithDifferentWeightsSaveNothing) {
  for (const int stage : {0, 2, 3}) {
    ToyOptions options = options_for(stage, DataType::kFloat32, 3);
    options.engine.save_async = true;
    run_ranks(3, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      Engine& engine = trainer.engine();
      engine.save_state(directory_, "x");
      EXPECT_FALSE(trainer.step(0).skipped);
      const ParameterId first{0, 0};
      std::vector<float> values = engine.get_parameter(first);
      if (rank.communicator->rank() == 1) values.back() += 1.0f;
      engine.set_parameter(first, values);
      for (const bool in_background : {false, true}) {
        const Status refused = verdict([&] {
          in_background ? engine.save_state_begin(directory_, "y") : engine.save_state(directory_, "y");
        });
        EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument) << "every rank is told";
        EXPECT_NE(refused.message().find("the hash of the values given to parameter"), std::string::npos)
            << refused.message();
      }
      EXPECT_EQ(verdict([&] { engine.load_state(directory_, 77); }).code(), StatusCode::kIoError);
      EXPECT_EQ(verdict([&] { engine.save_state(directory_, "y"); }).code(), StatusCode::kInvalidArgument)
          << "a load that failed has changed nothing";
      EXPECT_EQ(engine.load_state(directory_), "x") << "the engine goes on, with equal weights";
      if (rank.communicator->rank() == 1) engine.freeze(first, true);
      EXPECT_EQ(engine.load_state(directory_), "x");
      EXPECT_EQ(verdict([&] { engine.save_state(directory_, "y"); }).code(), StatusCode::kInvalidArgument)
          << "a load freezes nothing";
      if (rank.communicator->rank() == 1) engine.freeze(first, false);
      EXPECT_EQ(engine.load_state(directory_), "x");
      EXPECT_FALSE(trainer.step(0).skipped);
      engine.save_state(directory_, "z");
    });
    fs::remove_all(directory_);
  }
}

// A job that saves removes the state before, which another one may be loading.
TEST_F(SavedStateFiles, AStateThatAnotherJobReplacesIsFollowed) {
  const ToyOptions options = options_for(2, DataType::kFloat32, 3);
  const auto load = [&](const std::string& opened, int replacements) {
    int replaced = 0;
    std::function<void(const std::string&)> replace = [&](const std::string& name) {
      if (name != opened || replaced == replacements) return;
      const std::string next = internal::state_name(100 + static_cast<std::uint64_t>(++replaced));
      const std::string old = latest();
      fs::copy(file(old), file(next));
      std::ofstream(file("latest")) << next << '\n';
      fs::remove_all(file(old));
    };
    Status status;
    run_ranks(3, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      trainer.engine().save_state(directory_, "x");
      const bool meets = rank.communicator->rank() == 2;
      if (meets) before_open = &replace;
      const Status mine = verdict([&] { EXPECT_EQ(trainer.engine().load_state(directory_), "x"); });
      if (meets) before_open = nullptr;
      if (meets) status = mine;
      EXPECT_FALSE(trainer.step(0).skipped) << "the engine goes on";
    });
    EXPECT_EQ(replaced, replacements);
    return status;
  };
  for (const char* const opened : {"manifest.json", "rank-1-of-3.safetensors"}) {
    SCOPED_TRACE(opened);
    const Status followed = load(opened, 3);
    EXPECT_TRUE(followed.ok()) << followed.to_string();
    fs::remove_all(directory_);
    const Status replaced_always = load(opened, 10);
    EXPECT_EQ(replaced_always.code(), StatusCode::kIoError);
    EXPECT_NE(replaced_always.message().find("another job replaces it"), std::string::npos)
        << replaced_always.message();
    fs::remove_all(directory_);
  }
}

TEST_F(SavedStateFiles, AReaderOpensTheStateThatReplacesTheOneItFound) {
  const ToyOptions options = options_for(2, DataType::kFloat32, 1);
  run_ranks(1, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    trainer.engine().save_state(directory_, "x");
  });
  const std::string first = latest();
  int looks = 0;
  std::function<void(const std::string&)> replace = [&](const std::string& name) {
    if (name != first || ++looks > 1) return;
    const std::string next = internal::state_name(100);
    fs::copy(file(first), file(next));
    std::ofstream(file("latest")) << next << '\n';
    fs::remove_all(file(first));
  };
  before_open = &replace;
  const Status opened = verdict(
      [&] { EXPECT_EQ(last_part(SavedStateReader(directory_).facts().path), internal::state_name(100)); });
  before_open = nullptr;
  EXPECT_TRUE(opened.ok()) << opened.to_string();
  EXPECT_EQ(looks, 1);

  change_manifest(file(latest()) + "/manifest.json",
                  [](nlohmann::json& manifest) { manifest.erase("stage"); });
  const Status damaged = verdict([&] { SavedStateReader reader(directory_); });
  EXPECT_EQ(damaged.code(), StatusCode::kCorruption);
  EXPECT_EQ(damaged.message().find("json.exception"), std::string::npos) << damaged.message();
}

TEST_F(SavedStateFiles, AStepIsSavedAgainWithoutAnExchange) {
  for (int i = 0; i < 4; ++i) {
    save(directory_, 7);
    EXPECT_EQ(latest(), i % 2 == 0 ? "step-000000000007" : "step-000000000007-2");
    EXPECT_EQ(load(directory_), 7U);
  }
  save(directory_, 8);
  EXPECT_EQ(latest(), "step-000000000008");
  EXPECT_FALSE(fs::exists(file("step-000000000007-2")));
  // It takes the place of one state, however many are kept.
  save(directory_, 9, 3);
  save(directory_, 9, 3);
  EXPECT_EQ(internal::state_names(StateDirectory(directory_)),
            (std::vector<std::string>{"step-000000000009-2", "step-000000000008"}));
}

// As where an old state was moved to a larger drive. Links are not followed.
TEST_F(SavedStateFiles, ALinkToAnOldStateIsRemovedAndNotTheState) {
  const std::string elsewhere = make_temporary_directory("elsewhere");
  save(directory_, 7);
  fs::copy(file("step-000000000007"), elsewhere, fs::copy_options::recursive);
  fs::remove_all(file("step-000000000007"));
  fs::create_directory_symlink(elsewhere, file("step-000000000007"));
  save(directory_, 8);
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory_)) names.push_back(entry.path().filename());
  for (const std::string& name : names) EXPECT_EQ(name.find(".removing-"), std::string::npos) << name;
  EXPECT_FALSE(fs::is_symlink(file("step-000000000007")));
  EXPECT_TRUE(fs::exists(elsewhere + "/state.safetensors.index.json"));
  fs::remove_all(elsewhere);
}

// Both names exist while a step is saved again.
TEST_F(SavedStateFiles, AStepWithTwoNamesIsTheStateThatLatestNames) {
  save(directory_, 7);
  fs::copy(file("step-000000000007"), file("step-000000000007-2"));
  for (const char* const name : {"step-000000000007", "step-000000000007-2"}) {
    std::ofstream(file("latest")) << name << '\n';
    EXPECT_EQ(internal::find_state_of(StateDirectory(directory_), 7), name);
  }
}

TEST_F(SavedStateFiles, AreWholeWhereWritesTakeAPart) {
  most_written = 1001;
  save(directory_, 7);
  most_written = SIZE_MAX;
  EXPECT_EQ(load(directory_), 7U);
}

TEST_F(SavedStateFiles, AFileThatTakesNoByteIsAnError) {
  most_written = 0;
  const Status status = verdict([&] { save(directory_, 7); });
  most_written = SIZE_MAX;
  EXPECT_EQ(status.code(), StatusCode::kIoError) << status.to_string();
}

TEST_F(SavedStateFiles, AreSavedWhereADirectoryCannotBeSynced) {
  std::uint64_t step = 1;
  for (const int error : {EINVAL, EOPNOTSUPP}) {
    directory_sync_error = error;
    save(directory_, ++step);
    directory_sync_error = 0;
    EXPECT_EQ(load(directory_), step);
  }
  directory_sync_error = EIO;
  const Status status = verdict([&] { save(directory_, 7); });
  directory_sync_error = 0;
  EXPECT_EQ(status.code(), StatusCode::kIoError) << status.to_string();
  EXPECT_EQ(load(directory_), step);
}

TEST_F(SavedStateFiles, AnOldStateThatCannotBeRemovedStays) {
  save(directory_, 7);
  holds_old_states = true;
  save(directory_, 8);
  holds_old_states = false;
  EXPECT_EQ(load(directory_), 8U);
  EXPECT_TRUE(fs::exists(file("step-000000000007/manifest.json")));
  save(directory_, 9);
  EXPECT_EQ(internal::state_names(StateDirectory(directory_)),
            (std::vector<std::string>{"step-000000000009"}));
}

TEST_F(SavedStateFiles, AStateIsSavedAlsoWhereOldOnesCannotBeListed) {
  save(directory_, 7);
  std::function<void(const std::string&)> list = [&](const std::string& name) {
    // Only then: before that, the states must be listed.
    if (name == "." && fs::exists(file("step-000000000008"))) throw std::bad_alloc();
  };
  before_open = &list;
  save(directory_, 8);
  before_open = nullptr;
  EXPECT_EQ(load(directory_), 8U);
}

TEST_F(SavedStateFiles, IsReadToItsEndAlsoWhereItIsRemovedMeanwhile) {
  save_one_value(directory_);
  SavedStateReader reader(directory_);
  fs::remove_all(reader.facts().path);
  float found = 0;
  reader.read(reader.facts().parameters.front(), SavedField::kMaster,
              [&](Span<const float> values) { found = values[0]; });
  EXPECT_EQ(found, 1.0f);
}

TEST_F(SavedStateFiles, FilesThatAreNotOfASavedStateStay) {
  save(directory_, 7);
  std::ofstream(file("step-000000000007/notes.txt")) << "mine";
  fs::create_directories(file("step-000000000007/more"));
  std::ofstream(file("step-000000000007/rank-0-of-1.safetensors.sha256")) << "mine";
  for (const std::uint64_t step : {8, 9}) save(directory_, step);
  EXPECT_TRUE(fs::exists(file(".removing-step-000000000007/notes.txt")));
  EXPECT_TRUE(fs::exists(file(".removing-step-000000000007/more")));
  EXPECT_TRUE(fs::exists(file(".removing-step-000000000007/rank-0-of-1.safetensors.sha256")));
  EXPECT_FALSE(fs::exists(file(".removing-step-000000000007/rank-0-of-1.safetensors")));
  EXPECT_FALSE(fs::exists(file(".removing-step-000000000007/manifest.json")));
  EXPECT_EQ(load(directory_), 9U);
}

// A name is given only to bytes that are on the drive, and a later name only after an earlier one is.
TEST_F(SavedStateFiles, IsOnTheDriveBeforeItHasAName) {
  std::vector<std::string> operations;
  file_operations = &operations;
  save(directory_, 7);
  file_operations = nullptr;
  // Without the number of the save.
  for (std::string& operation : operations) {
    if (operation.find(".saving-") != std::string::npos) operation.resize(operation.size() - 16);
  }
  EXPECT_EQ(operations,
            (std::vector<std::string>{"sync rank-0-of-1.safetensors", "sync state.safetensors.index.json",
                                      "sync manifest.json", "sync .saving-step-000000000007-",
                                      "rename to step-000000000007", "sync " + last_part(directory_),
                                      "sync .latest", "rename to latest", "sync " + last_part(directory_)}));
}

TEST_F(SavedStateFiles, StaysUntilLatestNamesTheNextOne) {
  save(directory_, 7);
  std::vector<std::string> operations;
  file_operations = &operations;
  save(directory_, 8);
  file_operations = nullptr;
  const std::string removed = ".removing-step-000000000007";
  ASSERT_GE(operations.size(), 4U);
  EXPECT_EQ(std::vector(operations.end() - 4, operations.end()),
            (std::vector<std::string>{"rename to latest", "sync " + last_part(directory_),
                                      "rename to " + removed, "remove " + removed}));
}

// A disk takes whole pages of its own size past the page cache, and others are refused.
TEST_F(SavedStateFiles, AWriteThatCannotGoPastThePageCacheGoesThroughIt) {
  internal::StateFile written = StateDirectory::make(directory_).create("file");
  static_cast<void>(written.set_direct(true));  // Not every file system can.
  const std::string text = "no page of a file, nor of memory";
  written.write(text.data() + 1, 3);
  written.write(text.data() + 4, text.size() - 4);
  written.sync();

  EXPECT_EQ(StateDirectory(directory_).read("file", 100), text.substr(1));
}

// Runs of random lengths, some of which stay in memory at random places of a page.
TEST_F(SavedStateFiles, ValuesThatStayAreWrittenAsOthersAre) {
  const StateDirectory files = StateDirectory::make(directory_);
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto below = [&](std::uint64_t most) {
    return std::uniform_int_distribution<std::uint64_t>(0, most - 1)(random);
  };
  std::vector<float> memory(3'000'000);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(i);
  for (int round = 0; round < 8; ++round) {
    std::vector<internal::StateParameter> parameters;
    std::vector<internal::StateRun> runs;
    std::vector<const float*> values;
    std::size_t end = 0;
    for (int i = 0; i < 12; ++i) {
      const std::uint64_t most = std::array<std::uint64_t, 4>{3, 1'500, 300'000, 700'000}[below(4)];
      const std::uint64_t count = below(2) == 0 ? most : 1 + below(most);
      // Half of them follow the one before.
      if (below(2) == 0 || end + count > memory.size()) end = below(memory.size() - count);
      parameters.push_back({.name = "p" + std::to_string(i), .count = count, .shape = {count}});
      runs.push_back({.parameter = static_cast<std::size_t>(i), .field = 0, .offset = 0, .count = count});
      values.push_back(&memory[end]);
      end += count;
    }
    std::array<std::string, 3> written;
    for (int way = 0; way < 3; ++way) {
      internal::StateFileWriter file(files.create("file"), parameters, runs);
      for (std::size_t i = 0; i < runs.size(); ++i) {
        if (way == 1 || (way == 2 && below(2) == 0)) {
          std::vector<std::uint64_t> checksums;
          for (std::uint64_t at = 0; at < runs[i].count; at += internal::kBlockCount)
            checksums.push_back(checksum_of(
                values[i] + at, std::min(internal::kBlockCount, runs[i].count - at) * sizeof(float)));
          file.write_run(reinterpret_cast<const std::byte*>(values[i]), checksums.data());
        } else {
          file.write(std::span(values[i], runs[i].count));
        }
      }
      file.finish();
      written[static_cast<std::size_t>(way)] = files.read("file", std::uint64_t{1} << 30);
    }
    ASSERT_TRUE(written[0] == written[1]) << "round " << round << ": runs that stay";
    ASSERT_TRUE(written[0] == written[2]) << "round " << round << ": some of them stay";
  }
}

// Saves a tensor of 600 rows of 2000 elements in two files, each with a half of every row.
void save_in_parts(const std::string& directory) {
  const StateDirectory files = StateDirectory::make(directory);
  const std::string temporary = internal::temporary_state(internal::state_name(1), 1);
  files.make_subdirectory(temporary);
  for (int r = 0; r < 2; ++r) {
    const TensorSplit split{
        .shape = {600, 2000}, .dimension = 1, .part = static_cast<std::uint64_t>(r), .parts = 2};
    internal::StateFileWriter file(files.subdirectory(temporary).create(internal::state_file_name(r, 2)),
                                   std::vector<internal::StateParameter>{
                                       {.name = "p", .count = 600'000, .shape = {600, 1000}, .split = split}},
                                   {{.parameter = 0, .field = 0, .offset = 0, .count = 600'000}});
    std::vector<float> values;
    for (int row = 0; row < 600; ++row) {
      for (int column = 0; column < 1000; ++column)
        values.push_back(static_cast<float>(row * 2000 + r * 1000 + column));
    }
    for (std::size_t at = 0; at < values.size(); at += 70'001)
      file.write(std::span(values).subspan(at, std::min<std::size_t>(70'001, values.size() - at)));
    file.finish();
  }
  internal::publish_state(files, temporary, {{"ranks", 2}});
}

// Its copy of the descriptor is there until its handlers have run.
TEST_F(SavedStateFiles, AChildThatWasJustMadeKeepsNoLock) {
  save(directory_, 1);
  const StateDirectory files(directory_);
  pid_t child = -1;
  {
    const StateLock lock(files);
    child = static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr));
    if (child == 0) {  // Without handlers.
      for (;;) ::syscall(SYS_pause);
    }
  }
  const Status status = verdict([&] { const StateLock again(files); });
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(status.ok()) << status.to_string();
}

// Each descriptor that is missing, in turn: an older state is not taken instead, and none is lost.
TEST_F(SavedStateFiles, MissingDescriptorsAreNoDamage) {
  save(directory_, 1);
  save(directory_, 2, 2);
  const std::string temporary = begin_state(StateDirectory(directory_), 2);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  int refusals = 0;
  for (rlim_t free = 1;; ++free) {
    SCOPED_TRACE(free);
    const StateDirectory files(directory_);
    const int next = ::dup(STDERR_FILENO);
    ::close(next);
    rlimit low = before;
    low.rlim_cur = static_cast<rlim_t>(next) + free;
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
    std::string found;
    const Status loading = verdict([&] { found = internal::find_state(StateDirectory(directory_)); });
    const Status saving = verdict([&] {
      internal::publish_state(StateDirectory(directory_), temporary, {{"step", 2}, {"ranks", 1}});
    });
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    if (loading.ok()) {
      EXPECT_EQ(found, internal::state_name(2));
    } else {
      EXPECT_EQ(loading.code(), StatusCode::kUnavailable);
      EXPECT_NE(loading.message().find("ulimit -n"), std::string::npos) << loading.message();
    }
    if (saving.ok()) break;
    EXPECT_EQ(load(directory_), 2u);
    ++refusals;
  }
  EXPECT_GE(refusals, 2);
  EXPECT_EQ(load(directory_), 2u);
}

TEST_F(SavedStateFiles, ARankReadsTheBlocksThatItNeeds) {
  save_in_parts(directory_);
  SavedState saved(directory_, internal::state_name(1));
  constexpr std::uint64_t kBlockBytes = internal::kBlockCount * sizeof(float);
  constexpr std::uint64_t kHeaderBytes = 4096 + 3 * sizeof(std::uint64_t);

  std::vector<float> values(300);
  saved.read("p", "master", 200'100, values);
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], 200'100 + static_cast<float>(i));
  EXPECT_LE(saved.bytes_read(), kBlockBytes + kHeaderBytes) << "of one file";

  // All of it: each block once, though the rows go from file to file.
  values.resize(1'200'000);
  saved.read("p", "master", 0, values);
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], static_cast<float>(i));
  EXPECT_LE(saved.bytes_read(), values.size() * sizeof(float) + 2 * kHeaderBytes);
}

// Otherwise a tensor would have other values, or values from outside of its file.
TEST_F(SavedStateFiles, AManifestThatMisplacesATensorIsRefused) {
  using Json = nlohmann::json;
  const std::string state = internal::state_name(1);
  struct Case {
    const char* finding;
    std::function<void(Json& manifest, Json& parameter, Json& piece)> change;
  };
  const Case cases[] = {
      {"names a file outside of it", [](Json& m, Json&, Json&) { m["files"][1]["name"] = "../other"; }},
      {"lists p twice", [](Json& m, Json& p, Json&) { m["parameters"].push_back(Json(p)); }},
      {"the split of p is not one of its shape", [](Json&, Json& p, Json&) { p["count"] = 600'000; }},
      {"a piece outside of its tensor", [](Json&, Json&, Json& piece) { piece["part"] = 2; }},
      {"a piece outside of its tensor", [](Json&, Json&, Json& piece) { piece["offset"] = 1; }},
      {"a piece outside of its tensor", [](Json&, Json&, Json& piece) { piece["count"] = 600'001; }},
      {"a piece outside of its file",
       [](Json& m, Json&, Json& piece) {
         piece["master"][0] = m["files"][0]["bytes"].get<std::uint64_t>() - 4 * 600'000 + 4;
       }},
      {"a piece outside of its file", [](Json&, Json&, Json& piece) { piece["master"][1] = 1; }},
      {"the checksum of its header differs", [](Json& m, Json&, Json&) { m["files"][0]["blocks"] = 11; }},
      {"or names no optimizer", [](Json& m, Json&, Json&) { m["optimizer"] = 5; }},
      {"or names no optimizer", [](Json& m, Json&, Json&) { m["weights_only"] = "yes"; }},
      // The element behind it is no element of it.
      {"master of p is not whole", [](Json&, Json&, Json& piece) { piece["count"] = 599'999; }},
  };
  save_in_parts(directory_);
  const std::string path = file(state + "/manifest.json");
  const fs::path whole = directory_ + "/whole";
  fs::copy_file(path, whole);
  for (const Case& c : cases) {
    fs::copy_file(whole, path, fs::copy_options::overwrite_existing);
    change_manifest(path, [&](Json& manifest) {
      Json& parameter = manifest["parameters"][0];
      c.change(manifest, parameter, parameter["pieces"][0]);
    });
    const Status status = verdict([&] {
      SavedState saved(directory_, state);
      std::vector<float> last_of_part(1);
      saved.read("p", "master", 599 * 2000 + 999, last_of_part);
    });
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << c.finding;
    EXPECT_NE(status.message().find(c.finding), std::string::npos) << c.finding << ": " << status.message();
  }
}

// A state whose name had more digits could not be found again.
TEST_F(SavedStateFiles, AStepOfMoreDigitsThanANameHasIsRefused) {
  EXPECT_EQ(internal::state_name(999'999'999'999), "step-999999999999");
  const Status status = verdict([] { static_cast<void>(internal::state_name(1'000'000'000'000)); });
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("a state has step 999999999999 at most"), std::string::npos);
}

TEST_F(SavedStateFiles, TwoRanksWithTheSameElementsAreRefused) {
  const StateDirectory files = StateDirectory::make(directory_);
  const auto publish = [&](std::uint64_t first_count, std::uint64_t whole_of_second = 100) {
    const std::string temporary = internal::temporary_state(internal::state_name(1), 1);
    files.remove(temporary);
    files.make_subdirectory(temporary);
    for (int r = 0; r < 2; ++r) {
      const std::uint64_t offset = r == 0 ? 0 : 50;
      const std::uint64_t count = r == 0 ? first_count : 50;
      internal::StateFileWriter file(
          files.subdirectory(temporary).create(internal::state_file_name(r, 2)),
          std::vector<internal::StateParameter>{{.name = "p", .count = r == 0 ? 100 : whole_of_second}},
          {{.parameter = 0, .field = 0, .offset = offset, .count = count}});
      file.write(std::vector<float>(count));
      file.finish();
    }
    return verdict([&] { internal::publish_state(files, temporary, {{"ranks", 2}}); });
  };
  const Status both = publish(60);
  EXPECT_NE(both.message().find("several ranks saved element 50 of master of p"), std::string::npos)
      << both.message();
  const Status none = publish(40);
  EXPECT_NE(none.message().find("no rank saved element 40 of master of p"), std::string::npos)
      << none.message();
  const Status other = publish(50, 101);
  EXPECT_NE(other.message().find("ranks saved p in different shapes or splits"), std::string::npos)
      << other.message();
  EXPECT_TRUE(publish(50).ok());
}

// Directories of other tools may have such names.
TEST_F(SavedStateFiles, ADirectoryThatIsNoStateStays) {
  fs::create_directories(file(internal::state_name(1)) + "/theirs");
  fs::create_directories(file(internal::state_name(2)));
  std::ofstream(file(internal::state_name(2)) + "/notes") << "theirs";
  save(directory_, 3);
  save(directory_, 4, 2);
  EXPECT_TRUE(fs::exists(file(internal::state_name(1)) + "/theirs"));
  EXPECT_TRUE(fs::exists(file(internal::state_name(2)) + "/notes"));
  EXPECT_TRUE(fs::exists(file(internal::state_name(3)))) << "the others are not among those that are kept";

  fs::create_directories(file(internal::state_name(5)));
  std::ofstream(file(internal::state_name(5)) + "/notes") << "theirs";
  const Status status = verdict([&] { save(directory_, 5); });
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("step-000000000005, which is no saved state"), std::string::npos)
      << status.message();
  EXPECT_EQ(load(directory_), 4U);
}

TEST_F(SavedStateFiles, ADamagedLatestHidesNothing) {
  save(directory_, 3);
  const auto with_latest = [&](const std::function<void()>& change) {
    fs::remove_all(file("latest"));
    change();
    const Status status = verdict([&] { EXPECT_EQ(load(directory_), 3U); });
    EXPECT_TRUE(status.ok()) << status.to_string();
  };
  with_latest([] {});
  with_latest([&] { std::ofstream(file("latest")) << ""; });
  with_latest([&] { std::ofstream(file("latest")) << "nonsense\n"; });
  with_latest([&] { std::ofstream(file("latest")) << "step-000000000009\n"; });
  with_latest([&] { std::ofstream(file("latest")) << std::string(1 << 20, 'x'); });
  with_latest([&] { fs::create_directory(file("latest")); });
  with_latest([&] { ASSERT_EQ(::mkfifo(file("latest").c_str(), 0600), 0); });
  with_latest([&] { fs::create_symlink("latest", file("latest")); });
  with_latest([&] { fs::create_symlink("/dev/zero", file("latest")); });
  fs::remove_all(file("latest"));
  // A newer state that is not whole is passed over, and the next save replaces all.
  fs::create_directory(file("step-000000000005"));
  std::ofstream(file("step-000000000005/manifest.json")) << "{}";
  EXPECT_EQ(load(directory_), 3U);
  save(directory_, 4);
  EXPECT_EQ(load(directory_), 4U);
  EXPECT_EQ(latest(), "step-000000000004");
  EXPECT_FALSE(fs::exists(file("step-000000000003")));
}

// As DeepSpeed writes it.
TEST_F(SavedStateFiles, AFileLatestOfAnotherToolStays) {
  fs::create_directory(file("global_step10"));
  std::ofstream(file("latest")) << "global_step10";
  const ToyOptions options = options_for(1, DataType::kBfloat16, 2);
  run_ranks(2, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    trainer.engine().save_state(directory_ + "/ours", "x");
    const auto save_here = [&] { trainer.engine().save_state(directory_, "x"); };
    const auto lock_here = [&] { trainer.engine().lock_state(directory_); };
    for (const Status& status : {verdict(save_here), verdict(lock_here)}) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_NE(status.message().find("another tool wrote it"), std::string::npos) << status.message();
    }
    EXPECT_FALSE(trainer.step(0).skipped) << "the engine goes on";
  });
  EXPECT_EQ(verdict([&] { SavedStateWriter writer(directory_, {}); }).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(latest(), "global_step10");
  EXPECT_FALSE(fs::exists(file(".lock")));

  const auto with_latest = [&](const std::string& text) {
    std::ofstream(file("latest")) << text;
    return verdict([&] { internal::check_latest(StateDirectory(directory_)); }).code();
  };
  EXPECT_EQ(with_latest("step-000000000009\n"), StatusCode::kOk) << "somebody removed the state";
  fs::copy(file("ours/step-000000000000"), file("step-000000000000"));
  EXPECT_EQ(with_latest("nonsense"), StatusCode::kOk) << "a damaged file beside a saved state";
  EXPECT_EQ(with_latest("global_step10"), StatusCode::kInvalidArgument);
}

TEST_F(SavedStateFiles, AStateOfAnotherModelStays) {
  const auto refused = [&](const std::function<void(ToyOptions&)>& change, const std::string& difference) {
    run_ranks(2, {}, [&](Rank& rank) {
      ToyOptions options = options_for(1, DataType::kBfloat16, 2);
      change(options);
      ToyTrainer other(options, rank);
      other.initialize();
      const Status status = verdict([&] { other.engine().save_state(directory_, "other"); });
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << "on every rank";
      EXPECT_NE(status.message().find("of another model"), std::string::npos) << status.message();
      EXPECT_NE(status.message().find(difference), std::string::npos) << status.message();
      EXPECT_FALSE(other.step(0).skipped) << "the engine goes on";
    });
    EXPECT_EQ(SavedStateReader(directory_).facts().trainer_state, "x");
    EXPECT_FALSE(fs::exists(file(".saving-step-000000000000")));
  };
  const auto save_with = [&](int ranks, const ToyOptions& options) {
    run_ranks(ranks, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      trainer.engine().save_state(directory_, "x");
    });
  };
  save_with(2, options_for(1, DataType::kBfloat16, 2));

  refused([](ToyOptions& o) { o.units.pop_back(); }, " there and no value here");
  refused([](ToyOptions& o) { o.units.push_back({.parameters = {{.count = 3}}}); },
          " has no value there and 3 elements here");
  refused([](ToyOptions& o) { ++o.units[0].parameters[0].count; }, "p0 has ");

  // The model of the state, at other ranks, another stage and another type.
  save_with(3, options_for(2, DataType::kFloat32, 3));
}

TEST_F(SavedStateFiles, AStateOfAnotherLiveEngineStays) {
  ToyOptions options = options_for(0, DataType::kFloat32, 1);
  options.engine.save_async = true;
  run_ranks(1, {}, [&](Rank& rank) {
    const auto refuses = [&](Engine& engine) {
      for (const Status& status : {verdict([&] { engine.save_state(directory_, "x"); }),
                                   verdict([&] { engine.save_state_begin(directory_, "x"); })}) {
        if (status.ok()) {
          engine.save_state_end();
          return false;
        }
        EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
        EXPECT_NE(status.message().find("another engine of this process"), std::string::npos)
            << status.message();
      }
      return true;
    };
    ToyTrainer second(options, rank);
    second.initialize();
    {
      ToyTrainer first(options, rank);
      first.initialize();
      first.engine().save_state_begin(directory_, "first");
      first.engine().save_state_end();
      EXPECT_FALSE(refuses(first.engine()));
      EXPECT_TRUE(refuses(second.engine()));
      fs::remove_all(file("step-000000000000"));
      fs::remove_all(file("step-000000000000-2"));
      EXPECT_FALSE(refuses(second.engine())) << "nothing is saved there";
      EXPECT_TRUE(refuses(first.engine())) << "now it is the other's";
      first.engine().load_state(directory_);
      EXPECT_FALSE(refuses(first.engine())) << "it goes on from that state";
      EXPECT_FALSE(refuses(second.engine()));
    }
    ToyTrainer third(options, rank);
    third.initialize();
    EXPECT_TRUE(refuses(third.engine()));
    second.engine().save_state(directory_ + "/other", "x");
    EXPECT_TRUE(refuses(third.engine())) << "an engine may save in several directories";
  });
  run_ranks(1, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    EXPECT_TRUE(verdict([&] { trainer.engine().save_state(directory_, "x"); }).ok())
        << "the others have ended";
  });
}

TEST_F(SavedStateFiles, APlantedLinkIsNotFollowed) {
  std::ofstream(file("precious")) << "precious";
  fs::create_directory(file("elsewhere"));
  std::ofstream(file("elsewhere/precious")) << "precious";
  fs::create_symlink(file("precious"), file(".latest"));
  fs::create_symlink(file("elsewhere"), file(".saving-step-000000000001"));
  save(directory_, 1);
  EXPECT_EQ(load(directory_), 1U);
  for (const char* name : {"precious", "elsewhere/precious"}) {
    std::ifstream stream(file(name));
    std::string text;
    std::getline(stream, text);
    EXPECT_EQ(text, "precious");
  }
  fs::remove(file(".lock"));
  fs::create_symlink(file("precious"), file(".lock"));
  EXPECT_EQ(verdict([&] { save(directory_, 2); }).code(), StatusCode::kIoError);
  EXPECT_EQ(load(directory_), 1U);
  fs::remove(file(".lock"));
  fs::create_hard_link(file("precious"), file(".lock"));
  const Status linked = verdict([&] { save(directory_, 2); });
  EXPECT_NE(linked.message().find("it is no lock of forebay"), std::string::npos) << linked.to_string();
  std::ifstream stream(file("precious"));
  std::string text;
  std::getline(stream, text);
  EXPECT_EQ(text, "precious");
  fs::remove(file(".lock"));
  ASSERT_EQ(::mkfifo(file(".lock").c_str(), 0600), 0);
  EXPECT_NE(verdict([&] { save(directory_, 2); }).message().find("it is no lock"), std::string::npos);
  fs::remove(file(".lock"));
  std::ofstream(file(".lock")) << std::string(60, '\0');  // As after a power failure.
  save(directory_, 2);
  // As in a copy of the directory by links.
  fs::remove(file(".lock"));
  save(directory_, 2);
  fs::create_hard_link(file(".lock"), file("copy"));
  save(directory_, 3);
  EXPECT_EQ(load(directory_), 3U);
}

TEST_F(SavedStateFiles, OnlyRegularFilesAreRead) {
  const std::string rank_file = file("step-000000000001/rank-0-of-1.safetensors");
  const std::string manifest = file("step-000000000001/manifest.json");
  save(directory_, 1);
  for (const std::string& path : {rank_file, manifest}) {
    fs::rename(path, file("kept"));
    const auto refused = [&](const char* kind, const char* finding = "") {
      const Status status = verdict([&] { load(directory_); });
      EXPECT_FALSE(status.ok()) << path << " is " << kind;
      EXPECT_NE(status.message().find(finding), std::string::npos) << status.message();
      fs::remove_all(path);
    };
    fs::create_directory(path);
    refused("a directory", "it is not a regular file");
    ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
    refused("a named pipe", "it is not a regular file");
    fs::create_symlink("/dev/zero", path);
    refused("an endless device");
    fs::create_symlink(path, path);
    refused("a loop of links");
    std::ofstream(path) << "";
    fs::resize_file(path, std::uintmax_t{1} << 40);
    refused("a terabyte of zeros");
    fs::rename(file("kept"), path);
    EXPECT_EQ(load(directory_), 1U);
  }
}

TEST_F(SavedStateFiles, BadDirectoriesAreErrorsOfForebay) {
  std::ofstream(file("file")) << "x";
  fs::create_symlink(file("loop"), file("loop"));
  const ToyOptions options = options_for(1, DataType::kBfloat16, 1);
  run_ranks(1, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    for (const std::string& path :
         {file("file"), file("file/below"), file("loop"), file(std::string(5000, 'x')), std::string()}) {
      for (const Status& status : {verdict([&] { trainer.engine().save_state(path, "x"); }),
                                   verdict([&] { trainer.engine().lock_state(path); }),
                                   verdict([&] { trainer.engine().load_state(path); })}) {
        EXPECT_EQ(status.code(), StatusCode::kIoError) << path.substr(0, 100);
        EXPECT_LT(status.message().size(), 600U);
      }
    }
    EXPECT_FALSE(trainer.step(0).skipped);
  });
}

// Kills a process that saves at random moments. The state that it last reported, or a newer one, is whole.
void SavedStateFiles::survive_kills(int kills) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::uint64_t least = 0;
  for (int i = 0; i < kills; ++i) {
    Child saver([&](int out) {
      for (std::uint64_t step = least == 0 ? 1 : least;; ++step) {
        save(directory_, step);
        report(out, step);
        save(directory_, step);  // Again, under the other name.
      }
    });
    std::uint64_t step = 0;
    const auto saves = std::uniform_int_distribution<int>(0, 3)(random);
    for (int k = 0; k < saves && saver.next(step); ++k) least = step;
    std::this_thread::sleep_for(
        std::chrono::microseconds(std::uniform_int_distribution<int>(0, 3000)(random)));
    saver.kill();
    while (saver.next(step)) least = step;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      if (entry.path().filename().string().starts_with("step-")) {
        EXPECT_TRUE(std::filesystem::exists(entry.path() / "manifest.json")) << entry.path();
      }
    }
    if (least == 0) continue;
    const Status status = verdict([&] { EXPECT_GE(load(directory_), least); });
    ASSERT_TRUE(status.ok()) << "kill " << i << ": " << status.to_string();
  }
  EXPECT_GT(least, 0u) << "no process has saved anything";
}

TEST_F(SavedStateFiles, SurvivesKillsAtRandomMoments) {
  survive_kills(30);
}

// Two jobs that do not know of each other. One of them saves at a time, and every state is whole.
void SavedStateFiles::let_two_jobs_save(int rounds) {
  for (int i = 0; i < rounds; ++i) {
    const auto job = [&](int out) {
      for (std::uint64_t step = 1; step < 6; ++step) {
        try {
          save(directory_, step);
          report(out, step);
        } catch (const Error& error) {
          if (error.code() != StatusCode::kUnavailable) throw;
        }
      }
    };
    Child first(job);
    Child second(job);
    std::uint64_t step = 0;
    int saved = 0;
    while (first.next(step)) ++saved;
    while (second.next(step)) ++saved;
    EXPECT_GT(saved, 0);
    const Status status = verdict([&] { load(directory_); });
    ASSERT_TRUE(status.ok()) << "round " << i << ": " << status.to_string();
  }
}

TEST_F(SavedStateFiles, TwoJobsLeaveAWholeState) {
  let_two_jobs_save(20);
}

// In TMPDIR, so that they can be run on any file system.
using SlowSavedStateFiles = SavedStateFiles;

TEST_F(SlowSavedStateFiles, SurvivesAThousandKills) {
  survive_kills(1000);
}

TEST_F(SlowSavedStateFiles, AThousandTimesTwoJobs) {
  let_two_jobs_save(1000);
}

}  // namespace
}  // namespace forebay::testing
