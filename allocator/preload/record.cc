#include "allocator/preload/record.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>

#include "forebay/descriptor.h"
#include "forebay/log.h"
#include "forebay/secrets.h"

namespace forebay {
namespace {

constexpr char kSuffix[] = ".record";

// Makes the record file of this process in the directory. On failure -1, and the reason is logged.
int make_file(const char* directory) noexcept {
  std::string path;
  int file = make_preload_file(directory, kSuffix, sizeof(PreloadRecord), &path);
  // Touching mapped memory without disk space behind it kills the process.
  if (file >= 0 && ::posix_fallocate(file, 0, sizeof(PreloadRecord)) != 0) {
    ::unlink(path.c_str());
    ::close(file);
    file = -1;
    errno = ENOSPC;
  }
  if (file < 0) {
    // `forebay run` may have ended before this process began, and removed its directory.
    const bool is_of_a_run = errno == ENOENT && std::strstr(directory, "/forebay-run-") != nullptr;
    log(is_of_a_run ? LogLevel::kInfo : LogLevel::kWarning,
        "cannot keep a record of this process in %s (%s): %s; name an existing directory by its absolute "
        "path, "
        "writable for this process: with forebay run by --records, made with mode 1777 for several users",
        directory, kPreloadRecordsVariable, std::strerror(errno));
  }
  return file;
}

void* map_record() noexcept {
  const char* directory = std::getenv(kPreloadRecordsVariable);
  const int file = directory != nullptr && directory[0] != '\0' ? make_file(directory) : -1;
  const int flags = file >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* memory = ::mmap(nullptr, sizeof(PreloadRecord), PROT_READ | PROT_WRITE, flags, file, 0);
  if (file >= 0) ::close(file);
  return memory == MAP_FAILED ? nullptr : memory;
}

// The command line, with spaces between its words and without secrets.
void read_program(char* text, std::size_t bytes) noexcept {
  const int file = ::open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  const ssize_t count = file < 0 ? 0 : ::read(file, text, bytes - 1);
  if (file >= 0) ::close(file);
  std::size_t length = count > 0 ? static_cast<std::size_t>(count) : 0;
  while (length > 0 && text[length - 1] == '\0') --length;
  mask_secrets(text, length);
  std::replace(text, text + length, '\0', ' ');
  text[length] = '\0';
}

// The rank that the launcher set; -1 without a launcher.
int rank_of_process() noexcept {
  for (const char* variable : {"RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK",
                               "FLUX_TASK_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    const char* value = std::getenv(variable);
    if (value == nullptr || value[0] == '\0') continue;
    char* end = nullptr;
    const long rank = std::strtol(value, &end, 10);
    if (*end == '\0' && rank >= 0 && rank <= INT32_MAX) return static_cast<int>(rank);
  }
  return -1;
}

PreloadRecord* make_record(PreloadMode mode) noexcept {
  void* memory = map_record();
  // Without memory for one page the process is about to fail anyway; its counts are then lost.
  alignas(PreloadRecord) static unsigned char last_resort[sizeof(PreloadRecord)];
  auto* record = new (memory != nullptr ? memory : last_resort) PreloadRecord();
  record->bytes = sizeof(PreloadRecord);
  record->mode = mode;
  record->process = static_cast<std::int32_t>(::getpid());
  record->parent = static_cast<std::int32_t>(::getppid());
  record->rank = rank_of_process();
  read_program(record->program, sizeof record->program);
  // Last: a reader that finds the magic number finds all else.
  std::atomic_ref(record->magic).store(kPreloadRecordMagic, std::memory_order_release);
  return record;
}

std::string text_of(const PreloadText& text) {
  if (text.state.load(std::memory_order_acquire) != 2) return {};
  return std::string(text.text, ::strnlen(text.text, sizeof text.text));
}

// A copy of the record in a file.
class RecordCopy {
 public:
  explicit RecordCopy(const PreloadFile& file) noexcept
      : usable_(file.bytes() == sizeof(PreloadRecord) && file.read(0, memory_, sizeof memory_) &&
                record().magic == kPreloadRecordMagic && record().bytes == sizeof(PreloadRecord)) {}
  bool is_of_this_build() const noexcept { return usable_; }
  const PreloadRecord& record() const noexcept { return *reinterpret_cast<const PreloadRecord*>(memory_); }

 private:
  alignas(PreloadRecord) unsigned char memory_[sizeof(PreloadRecord)] = {};
  bool usable_;
};

// Reads one record. Returns why it could not be read; empty: it was read.
std::string read_record(const std::string& path, PreloadReport* report) {
  const PreloadFile file(path);
  if (file.error() != 0) return std::string("it cannot be read: ") + std::strerror(file.error());
  if (file.bytes() != sizeof(PreloadRecord)) {
    return join_text("it is not a record of this build: it has ", file.bytes(), " bytes, not ",
                     sizeof(PreloadRecord));
  }
  const RecordCopy copy(file);
  if (!copy.is_of_this_build()) return "it is not a record of this build";
  const PreloadRecord& record = copy.record();
  report->path = path;
  report->mode = record.mode;
  report->process = record.process;
  report->parent = record.parent;
  report->rank = record.rank;
  report->program.assign(record.program, ::strnlen(record.program, sizeof record.program));
  for (std::size_t i = 0; i < kPreloadServerCount; ++i) {
    report->allocations[i] = record.served[i].allocations.load(std::memory_order_relaxed);
    report->bytes[i] = record.served[i].bytes.load(std::memory_order_relaxed);
  }
  report->refused = record.refused.load(std::memory_order_relaxed);
  report->unknown_frees = record.unknown_frees.load(std::memory_order_relaxed);
  report->live_bytes = record.live_bytes.load(std::memory_order_relaxed);
  report->peak_live_bytes = record.peak_live_bytes.load(std::memory_order_relaxed);
  report->problem = text_of(record.problem);
  report->around = text_of(record.around);
  if (const std::string events = text_of(record.events); !events.empty()) {
    report->events = path.substr(0, path.find_last_of('/') + 1) + events;
  }
  report->trims = record.trims.load(std::memory_order_acquire);
  report->trimmed_bytes = record.trimmed_bytes.load(std::memory_order_relaxed);
  return {};
}

}  // namespace

const char* preload_server_text(PreloadServer server) noexcept {
  static constexpr const char* kTexts[] = {
      "the arena",
      "only observed",
      "captured into a graph, which owns them",
      "from a memory pool of the program's own",
      "in a context of cuCtxCreate",
      "pitched",
      "managed memory",
      "mapped by the program itself (cuMemCreate), as PyTorch's expandable segments are",
      "where the arena could not serve",
  };
  static_assert(std::size(kTexts) == kPreloadServerCount);
  const auto index = static_cast<std::size_t>(server);
  return index < kPreloadServerCount ? kTexts[index] : "";
}

// Opening a pipe would wait for a writer.
PreloadFile::PreloadFile(const std::string& path, bool writable)
    : file_(::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK)) {
  struct stat facts {};
  if (!file_.valid() || ::fstat(file_.number(), &facts) != 0) {
    error_ = errno;
    return;
  }
  bytes_ = static_cast<std::uint64_t>(facts.st_size);
}

bool PreloadFile::read(std::uint64_t offset, void* target, std::size_t bytes) const noexcept {
  return file_.read_at(offset, target, bytes) == static_cast<ssize_t>(bytes);
}

PreloadRecord& preload_record_of_process(PreloadMode mode) noexcept {
  static PreloadRecord* const record = make_record(mode);
  return *record;
}

void set_preload_text(PreloadText& target, const std::string& text) noexcept {
  std::uint32_t empty = 0;
  if (!target.state.compare_exchange_strong(empty, 1, std::memory_order_acq_rel)) return;
  const std::size_t length = std::min(text.size(), sizeof target.text - 1);
  std::memcpy(target.text, text.data(), length);
  target.text[length] = '\0';
  target.state.store(2, std::memory_order_release);
}

int make_preload_file(const char* directory, const char* suffix, std::size_t bytes, std::string* path) {
  // Writing beyond that limit ends the process by a signal.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) {
    errno = EFBIG;
    return -1;
  }
  // The Xs tell it apart from the file of an earlier process with the same number.
  *path = std::string(directory) + "/" + std::to_string(::getpid()) + "-XXXXXX" + suffix;
  const int file = ::mkostemps(path->data(), static_cast<int>(std::strlen(suffix)), O_CLOEXEC);
  if (file < 0) return -1;
  // `forebay run` may run as another user.
  if (::fchmod(file, 0644) == 0 && ::ftruncate(file, static_cast<off_t>(bytes)) == 0) return file;
  const int error = errno;
  ::unlink(path->c_str());
  ::close(file);
  errno = error;
  return -1;
}

Result<std::vector<PreloadReport>> read_preload_records(const std::string& directory,
                                                        std::vector<PreloadLeftOut>* left_out) {
  DIR* entries = ::opendir(directory.c_str());
  if (entries == nullptr) {
    const int error = errno;
    return Status(StatusCode::kIoError, "cannot read the records in ", directory, ": ", std::strerror(error),
                  error == EACCES
                      ? "; use the account that the processes ran under"
                      : std::string("; name the directory that ") + kPreloadRecordsVariable + " had");
  }
  std::vector<PreloadReport> reports;
  while (const dirent* entry = ::readdir(entries)) {
    const std::string name = entry->d_name;
    if (name.size() < sizeof kSuffix ||
        name.compare(name.size() - (sizeof kSuffix - 1), std::string::npos, kSuffix) != 0) {
      continue;
    }
    PreloadReport report;
    const std::string path = directory + "/" + name;
    if (const std::string why = read_record(path, &report); why.empty()) {
      reports.push_back(std::move(report));
    } else if (left_out != nullptr) {
      left_out->push_back({path, why});
    }
  }
  ::closedir(entries);
  std::sort(reports.begin(), reports.end(), [](const PreloadReport& a, const PreloadReport& b) {
    return a.process != b.process ? a.process < b.process : a.path < b.path;
  });
  return reports;
}

Status request_preload_trim(const std::string& record_path) {
  const auto refusal = [&](const std::string& found) {
    return Status(StatusCode::kIoError, "cannot ask the process of ", record_path,
                  " to give memory back: ", found, "; use the account that the process runs under");
  };
  const PreloadFile file(record_path, true);
  if (file.error() != 0) return refusal(std::strerror(file.error()));
  const RecordCopy copy(file);
  if (!copy.is_of_this_build()) return refusal("it is not a record of this build");
  const std::uint32_t next = copy.record().trim_requests.load(std::memory_order_relaxed) + 1;
  if (::pwrite(file.descriptor().number(), &next, sizeof next, offsetof(PreloadRecord, trim_requests)) !=
      sizeof next) {
    return refusal(std::strerror(errno));
  }
  return {};
}

}  // namespace forebay
