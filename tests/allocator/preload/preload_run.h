// Runs a program under the preload on the fake driver, and reads its record and the fake's counts afterwards.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "allocator/preload/record.h"
#include "tests/support/process.h"

namespace forebay::testing {

// Paths for the tests of this folder; set by CMake.
inline const std::string kPreloadLibrary = PRELOAD_LIBRARY;
inline const std::string kProgramDirectory = PRELOAD_PROGRAM_DIRECTORY;
inline const std::string kFakeDirectory = FAKE_CUDA_DIRECTORY;
inline const std::string kFakeRuntimeDirectory = FAKE_CUDART_DIRECTORY;

inline std::string program(const std::string& name) {
  return kProgramDirectory + "/" + name;
}

// In a sanitized build the sanitizer's runtime demands to be the first library, unless told otherwise. It
// finds leaks only if the program ends in the usual way.
inline Process::Variables sanitizer_variables() {
#if defined(__SANITIZE_ADDRESS__)
  return {{"ASAN_OPTIONS", "verify_asan_link_order=0:detect_leaks=0"}};
#else
  return {};
#endif
}
inline constexpr bool kSanitized =
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    true;
#else
    false;
#endif

class PreloadRun {
 public:
  // `mode`: arena, observe, off; "none": without the preload at all.
  explicit PreloadRun(const std::vector<std::string>& command, const std::string& mode = "arena",
                      Process::Variables variables = {}) {
    variables.merge(sanitizer_variables());
    variables.emplace("LD_LIBRARY_PATH", kFakeDirectory + ":" + kFakeRuntimeDirectory);
    variables.emplace("FAKE_CUDA_MEMORY", "67108864");
    variables.emplace("FOREBAY_DEVICE_ROOM", "0");  // A test of its own sets it.
    variables.emplace("FAKE_CUDA_SUMMARY", directory_ / "summary");
    if (mode != "none") {
      variables.emplace("LD_PRELOAD", kPreloadLibrary);
      variables.emplace("FOREBAY_PRELOAD", mode);
      variables.emplace("FOREBAY_PRELOAD_RECORDS", directory_.path());
    }
    finished = run_program(command, variables);
    Result<std::vector<PreloadReport>> read = read_preload_records(directory_.path());
    EXPECT_TRUE(read.ok()) << read.status().message();
    if (read.ok()) records = std::move(read).value();
    std::ifstream summary(directory_ / "summary");
    for (std::string name; summary >> name;) {
      summary >> fake[name];
      if (name == "live_handles") live_handles.push_back(fake[name]);
    }
  }

  // The only record. Fails the test if there are several.
  const PreloadReport& record() const {
    static const PreloadReport none;
    EXPECT_EQ(records.size(), 1u) << finished.output;
    return records.empty() ? none : records.front();
  }
  std::uint64_t served(PreloadServer server) const {
    return record().allocations[static_cast<std::size_t>(server)];
  }
  // Allocations that the arena did not serve, for any reason.
  std::uint64_t unserved() const {
    std::uint64_t count = 0;
    for (std::size_t i = 1; i < kPreloadServerCount; ++i) count += record().allocations[i];
    return count;
  }
  // No hazard: nothing would have corrupted memory on a device.
  void expect_no_hazard() {
    EXPECT_EQ(fake["hazards"], 0u) << finished.output;
    EXPECT_EQ(fake["forbidden_calls"], 0u) << finished.output;
  }

  Finished finished;
  std::vector<PreloadReport> records;
  std::map<std::string, std::uint64_t> fake;  // At the end of the last process.
  std::vector<std::uint64_t> live_handles;    // At the end of each process, in this order.

 private:
  TemporaryDirectory directory_;
};

}  // namespace forebay::testing
