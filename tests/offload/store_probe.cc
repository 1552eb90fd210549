// A process that store_process_test starts under conditions a test cannot have for itself:
//
//   store_probe hold ENGINE DIRECTORY   writes all the time and prints "ready" after the first; to be killed
//   store_probe forbidden DIRECTORY     with a filter that refuses io_uring, as containers have it
//   store_probe little-memlock DIRECTORY  may lock 8 MiB of memory and registers 16 MiB
//   store_probe full-disk DIRECTORY     on a file system of 8 MiB, mounted in a namespace of its own
//   store_probe full-second-disk DIRECTORY  deals stripes to two file systems, the second of 8 MiB
//   store_probe small-files DIRECTORY   may have files of 1 MiB at most
//
// Prints "done" and ends with 0 if everything came as it should, with 77 where the machine cannot show it.
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

#include "forebay/file_store.h"
#include "tests/offload/store_support.h"

namespace forebay {
namespace {

using testing::equal;
using testing::fill_pattern;
using testing::Memory;
using testing::read_all;
using testing::write_all;

constexpr int kSkipped = 77;
constexpr std::size_t kMiB = 1 << 20;

int failed(const char* what, const Status& status) {
  std::printf("failed: %s: %s\n", what, status.to_string().c_str());
  return 1;
}

int skipped(const char* what) {
  std::printf("skipped: %s: %s\n", what, std::strerror(errno));
  return kSkipped;
}

bool put(const char* path, const std::string& text) {
  const int file = ::open(path, O_WRONLY | O_CLOEXEC);
  const bool written =
      file >= 0 && ::write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  if (file >= 0) ::close(file);
  return written;
}

// Writes and reads some MiB.
int use(Store& store, Memory& memory) {
  auto range = store.create_range("used", memory.size());
  if (!range.ok()) return failed("create_range", range.status());
  fill_pattern(memory.bytes(), 1);
  if (Status status = write_all(store, range.value(), 0, memory.bytes()); !status.ok())
    return failed("write", status);
  Memory target(memory.size());
  if (Status status = read_all(store, range.value(), 0, target.bytes()); !status.ok())
    return failed("read", status);
  if (!equal(memory.bytes(), target.bytes()))
    return failed("compare", Status(StatusCode::kCorruption, "other bytes"));
  std::printf("done\n");
  return 0;
}

int hold(FileStoreOptions options, const std::string& engine) {
  options.engine = engine == "threads" ? FileEngine::kThreads : FileEngine::kAuto;
  auto store = make_file_store(options);
  if (!store.ok()) return failed("make_file_store", store.status());
  const StoreRange range = store.value()->create_range("held", 32 * kMiB).value();
  Memory memory(32 * kMiB);
  while (true) {
    if (Status status = write_all(*store.value(), range, 0, memory.bytes()); !status.ok())
      return failed("write", status);
    std::printf("ready\n");
    std::fflush(stdout);
  }
}

int forbidden(FileStoreOptions options) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{static_cast<unsigned short>(std::size(filter)), filter};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return skipped("PR_SET_NO_NEW_PRIVS");
  if (::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) return skipped("PR_SET_SECCOMP");

  options.engine = FileEngine::kIoUring;
  const auto refused = make_file_store(options);
  if (refused.ok() || refused.status().code() != StatusCode::kUnavailable)
    return failed("kIoUring", refused.status());
  options.engine = FileEngine::kAuto;
  auto store = make_file_store(options);
  if (!store.ok()) return failed("kAuto", store.status());
  std::printf("%s\n", store.value()->facts().description.c_str());
  Memory memory(4 * kMiB);
  return use(*store.value(), memory);
}

int little_memlock(FileStoreOptions options) {
  const rlimit limit{8 * kMiB, 8 * kMiB};
  if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return skipped("RLIMIT_MEMLOCK");
  if (::geteuid() == 0 && ::setuid(65534) != 0) return skipped("setuid");
  options.engine = FileEngine::kIoUring;
  auto store = make_file_store(options);
  if (!store.ok() && store.status().code() == StatusCode::kUnavailable) {
    std::printf("skipped: %s\n", store.status().message().c_str());
    return kSkipped;
  }
  if (!store.ok()) return failed("make_file_store", store.status());
  Memory memory(16 * kMiB);
  if (Status status = store.value()->register_memory(memory.data(), memory.size()); !status.ok()) {
    return failed("register_memory", status);
  }
  if (Status status = store.value()->register_memory(memory.data(), memory.size()); !status.ok()) {
    return failed("register_memory", status);
  }
  std::printf("registered %llu\n", static_cast<unsigned long long>(store.value()->facts().registered_bytes));
  return use(*store.value(), memory);
}

// Mounts of this process are seen by no other from then on. The step that the machine refuses, or null.
const char* leave_mounts_of_others() {
  if (::geteuid() == 0) {
    if (::unshare(CLONE_NEWNS) != 0) return "unshare";
  } else {
    const std::string user = "0 " + std::to_string(::geteuid()) + " 1\n";
    const std::string group = "0 " + std::to_string(::getegid()) + " 1\n";
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return "unshare";
    if (!put("/proc/self/setgroups", "deny") || !put("/proc/self/uid_map", user) ||
        !put("/proc/self/gid_map", group)) {
      return "namespace";
    }
  }
  return ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 ? nullptr : "private mounts";
}

int full_disk(const FileStoreOptions& options) {
  if (const char* refused = leave_mounts_of_others()) return skipped(refused);
  if (::mount("tmpfs", options.directories[0].c_str(), "tmpfs", 0, "size=8m") != 0) return skipped("mount");
  auto store = make_file_store(options);
  if (!store.ok()) return failed("make_file_store", store.status());
  if (auto fits = store.value()->create_range("fits", 3 * kMiB); !fits.ok())
    return failed("fits", fits.status());
  const auto refused = store.value()->create_range("too large", 6 * kMiB);
  if (refused.ok() || refused.status().code() != StatusCode::kOutOfMemory)
    return failed("too large", refused.status());
  std::printf("%s\n", refused.status().message().c_str());
  // The refused range took no space.
  Memory memory(5 * kMiB);
  return use(*store.value(), memory);
}

std::uint64_t free_bytes(const std::string& directory) {
  struct statvfs facts {};
  return ::statvfs(directory.c_str(), &facts) == 0 ? facts.f_bfree * facts.f_frsize : 0;
}

int full_second_disk(FileStoreOptions options) {
  if (const char* refused = leave_mounts_of_others()) return skipped(refused);
  const std::string first = options.directories[0] + "/first", second = options.directories[0] + "/second";
  if (::mount("tmpfs", options.directories[0].c_str(), "tmpfs", 0, "size=64m") != 0) return skipped("mount");
  if (::mkdir(first.c_str(), 0700) != 0 || ::mkdir(second.c_str(), 0700) != 0) return skipped("mkdir");
  if (::mount("tmpfs", second.c_str(), "tmpfs", 0, "size=8m") != 0) return skipped("mount");
  options.directories = {first, second};
  auto store = make_file_store(options);
  if (!store.ok()) return failed("make_file_store", store.status());
  const std::uint64_t before = free_bytes(first);
  const auto refused = store.value()->create_range("too large", 40 * kMiB);
  if (refused.ok() || refused.status().code() != StatusCode::kOutOfMemory)
    return failed("too large", refused.status());
  if (free_bytes(first) != before)
    return failed("too large", Status(StatusCode::kInternal, "it keeps space in the first directory"));
  Memory memory(5 * kMiB);
  return use(*store.value(), memory);
}

int small_files(const FileStoreOptions& options) {
  const rlimit limit{kMiB, kMiB};
  if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return skipped("RLIMIT_FSIZE");
  auto store = make_file_store(options);
  if (!store.ok()) return failed("make_file_store", store.status());
  const auto refused = store.value()->create_range("too large", kMiB + 1);
  if (refused.ok() || refused.status().code() != StatusCode::kOutOfMemory)
    return failed("too large", refused.status());
  std::printf("%s\n", refused.status().message().c_str());
  Memory memory(kMiB);
  return use(*store.value(), memory);
}

int run(int argc, char** argv) {
  const std::string what = argc > 2 ? argv[1] : "";
  FileStoreOptions options;
  options.directories = {argv[argc - 1]};
  if (what == "hold") return hold(options, argv[2]);
  if (what == "forbidden") return forbidden(options);
  if (what == "little-memlock") return little_memlock(options);
  if (what == "full-disk") return full_disk(options);
  if (what == "full-second-disk") return full_second_disk(options);
  if (what == "small-files") return small_files(options);
  return 2;
}

}  // namespace
}  // namespace forebay

int main(int argc, char** argv) {
  const int code = forebay::run(argc, argv);
  std::fflush(stdout);
  // Without the sanitizers' last look, which a process of another user or with a filter may not take.
  ::_exit(code);
}
