#include "collectives/nccl/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <mutex>

#include "forebay/log.h"

namespace forebay {
namespace internal {
namespace {

using nccl::NcclComm;
using nccl::NcclResult;

constexpr const char* kVariable = "FOREBAY_NCCL_LIBRARY";
constexpr const char* kSoname = "libnccl.so.2";

struct Opened {
  void* library = nullptr;
  std::string name;  // As it was requested.
  std::string why;   // The reason why it cannot be opened.
};

Opened open_file(const std::string& name, int more_flags) {
  Opened opened{.name = name};
  opened.library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | more_flags);
  if (opened.library == nullptr) {
    const char* why = ::dlerror();
    opened.why = why != nullptr ? why : "it cannot be opened";
  }
  return opened;
}

// The copy that the process has, else the configured one, else the system's.
Opened find_library(const std::string& path) {
  if (Opened present = open_file(kSoname, RTLD_NOLOAD); present.library != nullptr) return present;
  if (!path.empty()) return open_file(path, 0);
  const char* configured = std::getenv(kVariable);
  if (configured != nullptr && configured[0] != '\0') return open_file(configured, 0);
  return open_file(kSoname, 0);
}

// The file that a function of the library came from.
std::string path_of(const void* function, const std::string& name) {
  Dl_info info{};
  if (::dladdr(function, &info) != 0 && info.dli_fname != nullptr && info.dli_fname[0] != '\0')
    return info.dli_fname;
  return name;
}

Result<NcclLibrary> resolve(const Opened& opened) {
  if (opened.library == nullptr) {
    return Status(StatusCode::kUnavailable, "cannot open NCCL as ", opened.name, ": ", opened.why,
                  "; install NCCL 2.18 or newer, or have ", kVariable, " name its libnccl.so.2");
  }
  NcclLibrary library;
#define FOREBAY_NCCL_RESOLVE(symbol, result, parameters) \
  library.symbol = reinterpret_cast<nccl::symbol##_function*>(::dlsym(opened.library, #symbol));
  FOREBAY_NCCL_ENTRY_POINTS(FOREBAY_NCCL_RESOLVE)
#undef FOREBAY_NCCL_RESOLVE
  library.facts.path = path_of(reinterpret_cast<const void*>(library.ncclGetVersion), opened.name);
  const std::string try_this = join_text("; have ", kVariable, " name NCCL 2.18 or newer");
#define FOREBAY_NCCL_CHECK(symbol, result, parameters)                                   \
  if (library.symbol == nullptr) {                                                       \
    return Status(StatusCode::kUnsupported, "cannot use NCCL from ", library.facts.path, \
                  ": it has no " #symbol, try_this);                                     \
  }
  FOREBAY_NCCL_REQUIRED(FOREBAY_NCCL_CHECK)
#undef FOREBAY_NCCL_CHECK
  if (const NcclResult result = library.ncclGetVersion(&library.facts.version);
      result != NcclResult::kSuccess) {
    return nccl_failure(library, result, nullptr, "ncclGetVersion", "use NCCL from " + library.facts.path);
  }
  if (library.facts.version < nccl::kVersionMin) {
    return Status(StatusCode::kUnsupported, "cannot use NCCL from ", library.facts.path, ": it is version ",
                  nccl_version_text(library.facts.version), try_this);
  }
  library.facts.can_register = library.ncclCommRegister != nullptr && library.ncclCommDeregister != nullptr;
  library.facts.can_revoke = library.ncclCommRevoke != nullptr;
  return library;
}

struct Meaning {
  StatusCode code;
  const char* name;
  const char* try_this;
};

Meaning meaning(NcclResult result) noexcept {
  switch (result) {
    case NcclResult::kUnhandledCudaError:
      return {StatusCode::kInternal, "ncclUnhandledCudaError",
              "see that the device works (nvidia-smi), and the output of NCCL with NCCL_DEBUG=WARN"};
    case NcclResult::kSystemError:
      return {StatusCode::kIoError, "ncclSystemError",
              "see the network and the limits of this process, and the output of NCCL with NCCL_DEBUG=WARN"};
    case NcclResult::kInvalidArgument:
      return {StatusCode::kInvalidArgument, "ncclInvalidArgument",
              "see the output of NCCL with NCCL_DEBUG=WARN"};
    case NcclResult::kInvalidUsage:
      return {StatusCode::kInvalidArgument, "ncclInvalidUsage",
              "give each rank a device of its own, and see the output of NCCL with NCCL_DEBUG=WARN"};
    case NcclResult::kRemoteError:
      return {StatusCode::kPeerLost, "ncclRemoteError", "see why the other rank or the network failed"};
    default:
      return {StatusCode::kInternal, "ncclInternalError", "see the output of NCCL with NCCL_DEBUG=WARN"};
  }
}

}  // namespace

std::string nccl_version_text(int version) {
  return std::to_string(version / 10'000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Status nccl_failure(const NcclLibrary& library, NcclResult result, NcclComm comm, const char* call,
                    const std::string& what) {
  const Meaning known = meaning(result);
  const bool is_named = result >= NcclResult::kUnhandledCudaError && result <= NcclResult::kRemoteError;
  std::string found = is_named ? known.name : "NCCL's error " + std::to_string(static_cast<int>(result));
  for (const char* words : {library.ncclGetErrorString(result), library.ncclGetLastError(comm)}) {
    if (words != nullptr && words[0] != '\0') found += std::string(": ") + words;
  }
  return Status(known.code, "cannot " + what + ": " + call + ": " + found + "; " + known.try_this);
}

Result<NcclLibrary> NcclLibrary::open(const std::string& path) {
  return resolve(open_file(path, 0));
}

Result<const NcclLibrary*> NcclLibrary::get(const std::string& path) {
  static std::mutex mutex;
  static std::unique_ptr<NcclLibrary>& loaded = *new std::unique_ptr<NcclLibrary>;  // Until the process ends.
  const std::lock_guard lock(mutex);
  if (loaded == nullptr) {
    FOREBAY_ASSIGN_OR_RETURN(NcclLibrary library, resolve(find_library(path)));
    loaded = std::make_unique<NcclLibrary>(std::move(library));
    const NcclLibraryFacts& facts = loaded->facts;
    const bool is_unknown = facts.version > nccl::kVersionKnown;
    log(is_unknown ? LogLevel::kWarning : LogLevel::kInfo, "NCCL %s from %s%s",
        nccl_version_text(facts.version).c_str(), facts.path.c_str(),
        is_unknown ? ": newer than the versions that forebay was compared with" : "");
  }
  return const_cast<const NcclLibrary*>(loaded.get());
}

}  // namespace internal

Result<NcclLibraryFacts> nccl_library(const std::string& library) {
  FOREBAY_ASSIGN_OR_RETURN(const internal::NcclLibrary* loaded, internal::NcclLibrary::get(library));
  return loaded->facts;
}

}  // namespace forebay
