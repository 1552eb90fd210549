#include "collectives/process/process_identity.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <optional>
#include <string_view>

#include "forebay/descriptor.h"

namespace forebay::internal {
namespace {

// The content of a small file in /proc, or nothing when it cannot be read.
std::optional<std::string> read_small(const char* path) {
  const Descriptor file(::open(path, O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return std::nullopt;
  char buffer[1024];
  ssize_t count = 0;
  do {
    count = ::read(file.number(), buffer, sizeof(buffer));
  } while (count < 0 && errno == EINTR);
  if (count <= 0) return std::nullopt;
  return std::string(buffer, static_cast<std::size_t>(count));
}

struct ProcessFacts {
  char state = 0;
  std::uint64_t thread_count = 0;
  std::uint64_t start_time = 0;
};

// Reads /proc/ID/stat (proc(5)). The fields begin after the program's name, which is in brackets and may
// contain any character.
std::optional<ProcessFacts> read_process(std::int32_t id) {
  const std::optional<std::string> text = read_small(("/proc/" + std::to_string(id) + "/stat").c_str());
  if (!text) return std::nullopt;
  const std::size_t name_end = text->rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= text->size()) return std::nullopt;
  std::string_view rest = std::string_view(*text).substr(name_end + 2);
  constexpr int kState = 3, kThreadCount = 20, kStartTime = 22;
  ProcessFacts facts;
  for (int field = kState; field <= kStartTime; ++field) {
    const std::string_view word = rest.substr(0, rest.find(' '));
    if (word.empty()) return std::nullopt;
    if (field == kState) facts.state = word[0];
    std::uint64_t* number = field == kThreadCount ? &facts.thread_count
                            : field == kStartTime ? &facts.start_time
                                                  : nullptr;
    if (number != nullptr &&
        std::from_chars(word.data(), word.data() + word.size(), *number).ec != std::errc())
      return std::nullopt;
    rest.remove_prefix(std::min(word.size() + 1, rest.size()));
  }
  return facts;
}

Status no_proc(const std::string& what) {
  return Status(StatusCode::kUnsupported, "cannot share memory with other ranks: ", what,
                " cannot be read; mount /proc, or use another communicator");
}

}  // namespace

Result<ProcessIdentity> this_process() {
  const auto id = static_cast<std::int32_t>(getpid());
  const std::optional<ProcessFacts> facts = read_process(id);
  if (!facts) return no_proc("/proc/" + std::to_string(id) + "/stat");
  return ProcessIdentity{id, facts->start_time};
}

bool is_running(const ProcessIdentity& process) {
  const std::optional<ProcessFacts> facts = read_process(process.id);
  if (!facts) {
    // There is no such entry, or no descriptor left to read it: ask the kernel in another way.
    return kill(process.id, 0) == 0 || errno != ESRCH;
  }
  if (facts->start_time != process.start_time) return false;
  // A process with an ended first thread looks like one that was not reaped, but has other threads.
  const bool ended = facts->state == 'Z' || facts->state == 'X';
  return !ended || facts->thread_count > 1;
}

Result<std::string> host_identity() {
  const char* boot = "/proc/sys/kernel/random/boot_id";
  std::optional<std::string> identity = read_small(boot);
  if (!identity) return no_proc(boot);
  while (!identity->empty() && identity->back() == '\n') identity->pop_back();
  // The start times of processes depend on the last one. Linux has it since 5.6.
  constexpr std::string_view kTime = "/proc/self/ns/time";
  for (const char* space : {"/proc/self/ns/pid", "/proc/self/ns/user", kTime.data()}) {
    char name[64];
    const ssize_t length = readlink(space, name, sizeof(name));
    if (length <= 0 && space == kTime) continue;
    if (length <= 0) return no_proc(space);
    *identity += " " + std::string(name, static_cast<std::size_t>(length));
  }
  return *identity;
}

}  // namespace forebay::internal
