// Offloading as the kernel sees it: bytes read and written, memory and descriptors over many steps, and a
// byte that changes on the drive.

#include "tests/support/process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>

#include "tests/engine/toy_cases.h"

namespace forebay::testing {
namespace {

namespace fs = std::filesystem;

ToyOptions in_files(int stage, Offload offload, DataType type, int ranks, const std::string& directory) {
  ToyOptions options = options_for(stage, type, ranks);
  options.engine.offload = offload;
  options.engine.tier = Tier::kFile;
  options.engine.offload_directories = {directory};
  options.engine.staging_bytes = 8u << 20;
  options.engine.host_threads = 1;
  return options;
}

// Units of one size. Their pieces do not all fit into the staging memory.
void make_large(ToyOptions* options) {
  options->units.assign(8, ToyUnit{{{1 << 18}}, {}, true});
  options->groups = {{1e-2, 0.1}};
}

struct DriveBytes {
  std::uint64_t read = 0;
  std::uint64_t written = 0;
};

// All threads of this process.
DriveBytes drive_bytes() {
  DriveBytes bytes;
  std::ifstream file("/proc/self/io");
  std::string key;
  for (std::uint64_t value; file >> key >> value;) {
    if (key == "read_bytes:") bytes.read = value;
    if (key == "write_bytes:") bytes.written = value;
  }
  return bytes;
}

struct Moving {
  const char* name;
  int stage;
  Offload offload;
  DataType type;
};
class OffloadDrive : public ::testing::TestWithParam<Moving> {};

TEST_P(OffloadDrive, MovesThePlannedBytesByTheKernelsCount) {
  if (!std::ifstream("/proc/self/io")) GTEST_SKIP() << "this kernel does not count a process's drive bytes";
  constexpr int kRanks = 2;
  constexpr int kSteps = 12;
  const TemporaryDirectory directory;
  const Moving& moving = GetParam();
  ToyOptions options = in_files(moving.stage, moving.offload, moving.type, kRanks, directory.path());
  make_large(&options);
  std::string store;
  DriveBytes before, after;
  FileBytes planned;
  run_ranks(kRanks, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    const bool counts = rank.communicator->rank() == 0;
    // Both ranks are between the same steps. Only reads ahead are queued.
    const auto count = [&](DriveBytes* bytes) {
      static_cast<void>(trainer.engine().statistics());
      throw_if_error(rank.communicator->barrier());
      if (counts) *bytes = drive_bytes();
      throw_if_error(rank.communicator->barrier());
    };
    for (int step = 0; step < 2; ++step) static_cast<void>(trainer.step(step));
    count(&before);
    for (int step = 0; step < kSteps; ++step) static_cast<void>(trainer.step(2 + step));
    count(&after);
    if (!counts) return;
    store = trainer.engine().statistics().store_description;
    planned = trainer.engine().plan().file_bytes;
  });
  if (store.find(", direct") == std::string::npos) {
    GTEST_SKIP() << "the file system of " << directory.path()
                 << " has no direct transfers, so the page cache decides which bytes reach the drive ("
                 << store << "); set TMPDIR to a directory on a drive";
  }

  const auto per_step = [&](std::uint64_t late, std::uint64_t early) {
    return static_cast<double>(late - early) / (kRanks * kSteps);
  };
  const double read = per_step(after.read, before.read) / static_cast<double>(planned.read_per_step);
  const double written =
      per_step(after.written, before.written) / static_cast<double>(planned.written_per_step);
  std::cout << moving.name << ": read " << read << " and written " << written << " of the plan's "
            << planned.read_per_step << " and " << planned.written_per_step << " bytes per rank and step\n";
  // At each count some bytes are read ahead: up to the size of the staging memory.
  const double ahead =
      static_cast<double>(options.engine.staging_bytes) / static_cast<double>(kSteps * planned.read_per_step);
  EXPECT_NEAR(read, 1.0, 0.01 + ahead);
  EXPECT_NEAR(written, 1.0, 0.01);
}

INSTANTIATE_TEST_SUITE_P(Settings, OffloadDrive,
                         ::testing::Values(Moving{"Optimizer", 2, Offload::kOptimizer, DataType::kBfloat16},
                                           Moving{"OptimizerAndParameters", 3,
                                                  Offload::kOptimizerAndParameters, DataType::kBfloat16},
                                           Moving{"OptimizerAndParametersInFp32", 3,
                                                  Offload::kOptimizerAndParameters, DataType::kFloat32}),
                         [](const auto& info) { return info.param.name; });

// The resources of this process.
struct Footprint {
  std::uint64_t resident_bytes = 0;
  std::uint64_t descriptors = 0;
  std::uint64_t pinned_bytes = 0;
  std::uint64_t pins = 0;
  std::uint64_t handles = 0;
};

Footprint footprint(Rank& rank, Engine& engine) {
  Footprint held;
  held.pinned_bytes = engine.statistics().host_bytes;  // Also waits for the engine.
  held.pins = rank.host_backend().call_count(HostCall::kPin);
  held.handles = rank.host_backend().live_handle_count();
  std::uint64_t total_pages = 0, resident_pages = 0;
  std::ifstream("/proc/self/statm") >> total_pages >> resident_pages;
  held.resident_bytes = resident_pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    static_cast<void>(entry);
    ++held.descriptors;
  }
  return held;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kWatchesMemory = false;  // The sanitizer's own memory grows.
#else
constexpr bool kWatchesMemory = true;
#endif

void expect_a_steady_footprint(int steps) {
  const int early_steps = steps / 10;
  constexpr std::uint64_t kMostGrowthBytes = 512 << 10;  // A leak of 300 bytes a step, in the long run.
  const TemporaryDirectory directory;
  for (const Tier tier : {Tier::kPinned, Tier::kFile}) {
    for (const Offload offload : {Offload::kOptimizer, Offload::kOptimizerAndParameters}) {
      SCOPED_TRACE(std::string(offload_name(offload)) + " on " + tier_name(tier));
      ToyOptions options = in_files(3, offload, DataType::kBfloat16, 1, directory.path());
      options.engine.tier = tier;
      run_ranks(1, {}, [&](Rank& rank) {
        ToyTrainer trainer(options, rank);
        trainer.initialize();
        Footprint early;
        for (int step = 0; step < steps; ++step) {
          if (step == early_steps) early = footprint(rank, trainer.engine());
          static_cast<void>(trainer.step(step));
        }
        const Footprint late = footprint(rank, trainer.engine());

        std::cout << offload_name(offload) << " on " << tier_name(tier) << ": resident "
                  << early.resident_bytes << " bytes after " << early_steps << " steps, "
                  << late.resident_bytes << " after " << steps << "; " << late.descriptors << " descriptors, "
                  << late.pinned_bytes << " bytes pinned\n";
        EXPECT_EQ(late.descriptors, early.descriptors);
        EXPECT_EQ(late.pinned_bytes, early.pinned_bytes);
        EXPECT_EQ(late.pins, early.pins);
        EXPECT_EQ(late.handles, early.handles);
        if (kWatchesMemory) {
          EXPECT_LE(late.resident_bytes, early.resident_bytes + kMostGrowthBytes);
        }
      });
    }
  }
}

TEST(OffloadFootprint, DoesNotGrowOverManySteps) {
  expect_a_steady_footprint(300);
}

TEST(SlowOffloadFootprint, DoesNotGrowOverManySteps) {
  expect_a_steady_footprint(2000);
}

// The scratch file of this process in `directory`, opened a second time beside the store.
int open_scratch_file(const std::string& directory) {
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const std::string target = fs::read_symlink(entry.path(), ignored).string();
    if (target.rfind(directory + "/", 0) == 0) return ::open(entry.path().c_str(), O_RDWR | O_CLOEXEC);
  }
  return -1;
}

TEST(OffloadFlip, AByteThatChangesOnTheDriveIsFound) {
  const TemporaryDirectory directory;
  for (const auto& [stage, offload] :
       {std::pair(2, Offload::kOptimizer), std::pair(3, Offload::kOptimizerAndParameters)}) {
    for (const std::uint64_t from_end : {10'000u, 1'500'000u}) {
      ToyOptions options = in_files(stage, offload, DataType::kBfloat16, 1, directory.path());
      make_large(&options);
      Status found;
      run_ranks(1, {}, [&](Rank& rank) {
        ToyTrainer trainer(options, rank);
        trainer.initialize();
        for (int step = 0; step < 2; ++step) static_cast<void>(trainer.step(step));
        static_cast<void>(trainer.engine().statistics());  // Nothing is being written.

        const int file = open_scratch_file(directory.path());
        ASSERT_GE(file, 0);
        struct stat facts {};
        ASSERT_EQ(::fstat(file, &facts), 0);
        const off_t place = facts.st_size - static_cast<off_t>(from_end);
        char byte = 0;
        ASSERT_EQ(::pread(file, &byte, 1, place), 1);
        byte = static_cast<char>(byte ^ 0x10);
        ASSERT_EQ(::pwrite(file, &byte, 1, place), 1);
        ASSERT_EQ(::fsync(file), 0);
        ::close(file);

        try {
          for (int step = 2; step < 4; ++step) static_cast<void>(trainer.step(step));
          static_cast<void>(trainer.engine().digest());
        } catch (const Error& error) {
          found = error.status();
        }
      });
      EXPECT_EQ(found.code(), StatusCode::kCorruption)
          << offload_name(offload) << ", " << from_end << " bytes before the end: " << found.to_string();
      EXPECT_NE(found.message().find("unit7"), std::string::npos) << found.message();
    }
  }
}

}  // namespace
}  // namespace forebay::testing
