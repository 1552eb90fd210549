// The room in directories, as it is asked before tiers are measured. Rates are not checked.
#include "runtime/command/machine/tier_measurement.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/statvfs.h>

#include <cstdint>
#include <map>
#include <string>

#include "forebay/units.h"
#include "tests/support/temporary_directory.h"

// Null: the system tells how much room a directory has.
namespace {
const std::map<std::string, std::uint64_t>* room_of_directories = nullptr;
}
extern "C" int statvfs(const char* path, struct statvfs* facts) noexcept {
  static const auto ask =
      reinterpret_cast<int (*)(const char*, struct statvfs*)>(::dlsym(RTLD_NEXT, "statvfs"));
  const int result = ask(path, facts);
  if (room_of_directories != nullptr) {
    facts->f_bavail = room_of_directories->at(path);
    facts->f_bsize = facts->f_frsize = 1;
  }
  return result;
}

namespace forebay {
namespace {

TEST(TierMeasurement, TheDirectoryWithTheLeastRoomLimitsStripes) {
  const testing::TemporaryDirectory a, b, c;
  const std::map<std::string, std::uint64_t> room{{a.path(), 7_GiB}, {b.path(), 5_GiB}, {c.path(), 6_GiB}};
  room_of_directories = &room;

  const Result<FileMeasurement> files = prepare_files(read_topology(), {a.path(), b.path(), c.path()}, 3_MiB);
  room_of_directories = nullptr;

  ASSERT_TRUE(files.ok()) << files.status().to_string();
  EXPECT_EQ(files.value().free_bytes, 3 * 5_GiB);
}

}  // namespace
}  // namespace forebay
