// The snapshot file, byte by byte and as Python reads it.
#include "forebay/memory_snapshot.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/temporary_directory.h"

namespace forebay {
namespace {

// A file that is gone when the test is over.
class TemporaryFile {
 public:
  TemporaryFile()
      : path_(directory_ / "snapshot"),
        descriptor_(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    EXPECT_GE(descriptor_, 0);
  }
  ~TemporaryFile() { ::close(descriptor_); }
  int descriptor() const { return descriptor_; }
  const std::string& path() const { return path_; }
  std::string bytes() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  const testing::TemporaryDirectory directory_;
  const std::string path_;
  const int descriptor_;
};

std::string write(const MemorySnapshot& snapshot) {
  const TemporaryFile file;
  const Status status = write_memory_snapshot(snapshot, file.descriptor());
  EXPECT_TRUE(status.ok()) << status.to_string();
  return file.bytes();
}

// `text` with its length in front, in the form of BINUNICODE.
std::string unicode(const std::string& text) {
  return std::string("X") + static_cast<char>(text.size()) + std::string(3, '\0') + text;
}

std::string in_settings(const std::string& item) {
  return "\x80\x02}" + unicode("segments") + "]s" + unicode("device_traces") + "]s" +
         unicode("allocator_settings") + "}" + item + "s.";
}

std::string setting(std::variant<bool, std::int64_t, std::string> value) {
  MemorySnapshot snapshot;
  snapshot.allocator_settings.push_back({"n", std::move(value)});
  return write(snapshot);
}

TEST(MemorySnapshot, AnEmptySnapshotIsADictOfEmptyParts) {
  EXPECT_EQ(write({}), in_settings(""));
}

TEST(MemorySnapshot, WritesEachValueInItsShortestForm) {
  const auto expected = [](const std::string& value) { return in_settings(unicode("n") + value + "s"); };
  const auto bytes = [](const char* text, std::size_t count) { return std::string(text, count); };

  EXPECT_EQ(setting(true), expected("\x88"));
  EXPECT_EQ(setting(false), expected("\x89"));
  EXPECT_EQ(setting(std::string("v")), expected(unicode("v")));
  EXPECT_EQ(setting(std::int64_t{0}), expected(bytes("K\0", 2)));
  EXPECT_EQ(setting(std::int64_t{255}), expected("K\xFF"));
  EXPECT_EQ(setting(std::int64_t{256}), expected(bytes("M\0\x01", 3)));
  EXPECT_EQ(setting(std::int64_t{65535}), expected("M\xFF\xFF"));
  EXPECT_EQ(setting(std::int64_t{65536}), expected(bytes("J\0\0\x01\0", 5)));
  EXPECT_EQ(setting(std::int64_t{0x7FFFFFFF}), expected("J\xFF\xFF\xFF\x7F"));
  // From here on as long as needed for a leading zero bit.
  EXPECT_EQ(setting(std::int64_t{0x80000000}), expected(bytes("\x8A\x05\0\0\0\x80\0", 7)));
  EXPECT_EQ(setting(std::int64_t{0x7F00000000}), expected(bytes("\x8A\x05\0\0\0\0\x7F", 7)));
  EXPECT_EQ(setting(std::int64_t{0x8000000000}), expected(bytes("\x8A\x06\0\0\0\0\x80\0", 8)));
  EXPECT_EQ(setting(INT64_MAX), expected("\x8A\x08\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7F"));
  EXPECT_EQ(setting(std::int64_t{-1}), expected("\x8A\x08\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF"));
}

TEST(MemorySnapshot, AnAddressOfSixtyFourBitsIsNotNegative) {
  MemorySnapshot snapshot;
  snapshot.device_traces = {{{.address = UINT64_MAX}}};

  const std::string expected("\x8A\x09\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\0", 11);
  EXPECT_NE(write(snapshot).find(expected), std::string::npos);
}

TEST(MemorySnapshot, NamesAKeyByItsIndexFromTheSecondTimeOn) {
  MemorySnapshot snapshot;
  snapshot.device_traces = {{{.action = SnapshotAction::kAlloc}, {.action = SnapshotAction::kAlloc}}};

  const std::string bytes = write(snapshot);

  EXPECT_NE(bytes.find(unicode("action")), std::string::npos);
  EXPECT_EQ(bytes.find(unicode("action")), bytes.rfind(unicode("action")));
}

TEST(MemorySnapshot, OddBytesBecomeQuestionMarks) {
  const auto text = [](const std::string& raw) {
    const std::string bytes = setting(raw);
    const std::string before = in_settings(unicode("n"));
    const std::size_t at = before.size() - 2 + 5;  // Without "s.", then behind X and the length.
    return bytes.substr(at, bytes.size() - at - 3);
  };

  EXPECT_EQ(text("plain"), "plain");
  EXPECT_EQ(text("Gr\xC3\xB6\xC3\x9F"
                 "e \xE2\x82\xAC \xF0\x9F\x98\x80"),
            "Gr\xC3\xB6\xC3\x9F"
            "e \xE2\x82\xAC \xF0\x9F\x98\x80");
  EXPECT_EQ(text("\xFF"
                 "a\xC3"),
            "?a?");
  EXPECT_EQ(text("\xC0\x80"), "??") << "longer than needed";
  EXPECT_EQ(text("\xE0\x80\x80"), "???") << "longer than needed";
  EXPECT_EQ(text("\xED\xA0\x80"), "???") << "a surrogate";
  EXPECT_EQ(text("\xF4\x90\x80\x80"), "????") << "beyond the last code point";
  EXPECT_EQ(text("\xE2\x82"
                 "x"),
            "??x")
      << "cut off";
}

TEST(MemorySnapshot, AStackIndexOutOfRangeIsRefused) {
  MemorySnapshot snapshot;
  snapshot.stacks.resize(1);
  snapshot.device_traces = {{{.stack = 1}}};
  const TemporaryFile file;

  const Status status = write_memory_snapshot(snapshot, file.descriptor());

  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("stack 1 of 1"), std::string::npos) << status.message();
}

TEST(MemorySnapshot, ReportsAFileThatCannotBeWritten) {
  const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
  if (full < 0) GTEST_SKIP() << "there is no /dev/full";
  MemorySnapshot snapshot;
  snapshot.device_traces = {std::vector<SnapshotEvent>(10'000)};

  const Status status = write_memory_snapshot(snapshot, full);
  ::close(full);

  EXPECT_EQ(status.code(), StatusCode::kIoError);
  EXPECT_NE(status.message().find("No space left"), std::string::npos) << status.message();
  EXPECT_EQ(write_memory_snapshot({}, -1).code(), StatusCode::kIoError);
}

// A little of everything; the Python below knows its contents.
MemorySnapshot example() {
  MemorySnapshot snapshot;
  snapshot.stacks = {{{"forward", "train.py", 12}, {"main", "train.py", 99}},
                     {{"step", "\xC3\xB6ptim.py", 70000}}};
  SnapshotSegment segment;
  segment.address = 0x7f0000000000;
  segment.total_size = 20u << 20;
  segment.allocated_size = 1024;
  segment.active_size = 1536;
  segment.requested_size = 1000;
  segment.stream = 0x55aa00001234;
  segment.blocks = {{segment.address, 1024, 1000, SnapshotBlockState::kActiveAllocated, 0},
                    {segment.address + 1024, 512, 512, SnapshotBlockState::kActivePendingFree, 1},
                    {segment.address + 1536, (20u << 20) - 1536, 0, SnapshotBlockState::kInactive}};
  snapshot.segments.push_back(segment);
  segment.device = 1;
  segment.segment_type = SnapshotSegmentType::kSmall;
  segment.is_expandable = false;
  segment.blocks = {{segment.address, segment.total_size, 0, SnapshotBlockState::kInactive}};
  snapshot.segments.push_back(segment);
  snapshot.device_traces.resize(2);
  std::vector<SnapshotEvent>& trace = snapshot.device_traces[0];
  std::uint64_t time_us = 1'700'000'000'000'000;
  for (const SnapshotAction action :
       {SnapshotAction::kSegmentMap, SnapshotAction::kAlloc, SnapshotAction::kFreeRequested,
        SnapshotAction::kFreeCompleted, SnapshotAction::kSegmentUnmap, SnapshotAction::kSegmentAlloc,
        SnapshotAction::kSegmentFree, SnapshotAction::kOutOfMemory, SnapshotAction::kSnapshot}) {
    trace.push_back(
        {action, 0x7f0000000200, 4096, 7, time_us++, static_cast<std::uint32_t>(trace.size() % 2)});
  }
  for (int i = 0; i < 20'000; ++i) {
    trace.push_back({SnapshotAction::kAlloc, static_cast<std::uint64_t>(i) * 512, 512, 0, time_us++, 0});
  }
  snapshot.allocator_settings = {{"allocator", std::string("forebay")},
                                 {"expandable_segments", true},
                                 {"limit_bytes", std::int64_t{3} << 40},
                                 {"device", std::int64_t{-1}}};
  return snapshot;
}

// Signals cut calls short or end them without a byte.
TEST(MemorySnapshot, IsWholeDespiteSignals) {
  const std::string expected = write(example());
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  ::fcntl(ends[1], F_SETPIPE_SZ, 4096);
  struct sigaction interrupts {};
  struct sigaction before {};
  interrupts.sa_handler = [](int) {};
  ASSERT_EQ(::sigaction(SIGUSR1, &interrupts, &before), 0);
  Status status;
  std::atomic<bool> done{false};
  std::thread writer([&] {
    status = write_memory_snapshot(example(), ends[1]);
    done = true;
    ::close(ends[1]);
    while (done) std::this_thread::yield();
  });
  std::string read;
  char part[512];
  for (ssize_t count = 1; count > 0;) {
    ::pthread_kill(writer.native_handle(), SIGUSR1);
    count = ::read(ends[0], part, sizeof part);
    if (count > 0) read.append(part, static_cast<std::size_t>(count));
  }
  done = false;
  writer.join();
  ::close(ends[0]);
  ::sigaction(SIGUSR1, &before, nullptr);

  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(read.size(), expected.size());
  EXPECT_TRUE(read == expected);
}

constexpr const char* kPython = R"(
import pickle, pickletools, sys
raw = open(sys.argv[1], 'rb').read()
for op, arg, pos in pickletools.genops(raw):
    assert op.name not in ('GLOBAL', 'REDUCE', 'BUILD', 'INST', 'OBJ', 'NEWOBJ', 'STACK_GLOBAL'), op.name
    assert op.proto <= 2, op.name
class Nothing(pickle.Unpickler):
    def find_class(self, module, name): raise AssertionError(module + '.' + name)
s = Nothing(open(sys.argv[1], 'rb')).load()
assert list(s) == ['segments', 'device_traces', 'allocator_settings'], list(s)
first, second = s['segments']
base = 0x7f0000000000
assert (first['device'], first['address'], first['total_size']) == (0, base, 20 << 20)
assert (first['allocated_size'], first['active_size'], first['requested_size']) == (1024, 1536, 1000)
assert (first['stream'], first['segment_type'], first['is_expandable']) == (0x55aa00001234, 'large', True)
assert first['segment_pool_id'] == (0, 0) and first['frames'] == []
assert [b['state'] for b in first['blocks']] == ['active_allocated', 'active_pending_free', 'inactive']
assert [b['address'] for b in first['blocks']] == [base, base + 1024, base + 1536]
assert sum(b['size'] for b in first['blocks']) == first['total_size']
assert [b['requested_size'] for b in first['blocks']] == [1000, 512, 0]
stack = [{'name': 'forward', 'filename': 'train.py', 'line': 12}, {'name': 'main', 'filename': 'train.py', 'line': 99}]
other = [{'name': 'step', 'filename': '\u00f6ptim.py', 'line': 70000}]
assert [b['frames'] for b in first['blocks']] == [stack, other, []]
assert (second['device'], second['segment_type'], second['is_expandable']) == (1, 'small', False)
trace, empty = s['device_traces']
assert empty == [] and len(trace) == 20009
assert [e['action'] for e in trace[:9]] == ['segment_map', 'alloc', 'free_requested', 'free_completed',
    'segment_unmap', 'segment_alloc', 'segment_free', 'oom', 'snapshot']
oom = trace[7]
assert oom['device_free'] == 0x7f0000000200 and 'addr' not in oom
for i, e in enumerate(trace[:9]):
    assert (e['size'], e['stream'], e['time_us']) == (4096, 7, 1700000000000000 + i)
    assert e['frames'] == (other if i % 2 else stack)
assert [e['addr'] for e in trace[9:]] == [i * 512 for i in range(20000)]
assert trace[0]['frames'] is trace[-1]['frames']
settings = s['allocator_settings']
assert settings == {'allocator': 'forebay', 'expandable_segments': True, 'limit_bytes': 3 << 40, 'device': -1}
)";

TEST(MemorySnapshot, PythonReadsItLikePyTorchsOwn) {
  if (std::system("python3 -c 'import pickletools' >/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "python3 is not there to read the snapshot";
  }
  const TemporaryFile snapshot;
  const TemporaryFile script;
  ASSERT_TRUE(write_memory_snapshot(example(), snapshot.descriptor()).ok());
  std::ofstream(script.path()) << kPython;

  EXPECT_EQ(std::system(("python3 " + script.path() + " " + snapshot.path()).c_str()), 0);
}

}  // namespace
}  // namespace forebay
