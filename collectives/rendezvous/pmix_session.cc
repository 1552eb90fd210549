#include "collectives/rendezvous/pmix_session.h"

#include <dlfcn.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>

namespace forebay::internal {
namespace {

constexpr char kLibrary[] = "libpmix.so.2";
constexpr char kAdvice[] = "; set FOREBAY_STORE to tcp://HOST:PORT or to a directory that all hosts share";

// A missing value is asked for again after a pause that doubles from the first to the second of these.
constexpr std::chrono::milliseconds kPollMin{2};
constexpr std::chrono::milliseconds kPollMax{100};

}  // namespace

// Shared by a question and the launcher's answer, which may come when nobody waits for it any more.
struct PmixSession::Answer {
  std::mutex mutex;
  std::condition_variable arrived;
  // Guarded by mutex.
  bool there = false;
  int status = 0;
  std::optional<std::string> text;
};

void PmixSession::take_answer(int status, pmix::Value* value, void* data) {
  const std::unique_ptr<std::shared_ptr<Answer>> answer(static_cast<std::shared_ptr<Answer>*>(data));
  const std::lock_guard lock((*answer)->mutex);
  (*answer)->there = true;
  (*answer)->status = status;
  if (status == pmix::kSuccess && value != nullptr && value->type == pmix::kString &&
      value->data.string != nullptr) {
    (*answer)->text = value->data.string;
  }
  (*answer)->arrived.notify_all();
}

struct PmixSession::Library {
  pmix::Init* init;
  pmix::Finalize* finalize;
  pmix::Put* put;
  pmix::Commit* commit;
  pmix::GetNonBlocking* get;
  pmix::ErrorString* error_string;
  pmix::Process me{};

  Status unavailable(const std::string& what, int status) const {
    return Status(StatusCode::kUnavailable, what, ": PMIx says ", error_string(status), " (", status, ")",
                  kAdvice);
  }
};

PmixSession::PmixSession(std::unique_ptr<Library> library) : library_(std::move(library)) {}

Result<std::unique_ptr<PmixSession>> PmixSession::open() {
  // Never closed: the library has threads of its own, which may run until the process ends.
  void* handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    return Status(StatusCode::kUnavailable, "cannot ask the launcher where the ranks meet: ", dlerror(),
                  "; install libpmix2", kAdvice);
  }
  auto library = std::make_unique<Library>();
  const char* missing = nullptr;
  const auto find = [&](const char* name, auto** function) {
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(dlsym(handle, name));
    if (*function == nullptr) missing = name;
  };
  find("PMIx_Init", &library->init);
  find("PMIx_Finalize", &library->finalize);
  find("PMIx_Put", &library->put);
  find("PMIx_Commit", &library->commit);
  find("PMIx_Get_nb", &library->get);
  find("PMIx_Error_string", &library->error_string);
  if (missing != nullptr) {
    return Status(StatusCode::kUnavailable, "cannot ask the launcher where the ranks meet: ", kLibrary,
                  " has no ", missing, kAdvice);
  }
  if (const int status = library->init(&library->me, nullptr, 0); status != pmix::kSuccess)
    return library->unavailable("cannot ask the launcher where the ranks meet", status);
  return std::unique_ptr<PmixSession>(new PmixSession(std::move(library)));
}

PmixSession::~PmixSession() {
  static_cast<void>(library_->finalize(nullptr, 0));
}

int PmixSession::rank() const noexcept {
  return static_cast<int>(library_->me.rank);
}

Status PmixSession::publish(const std::string& key, const std::string& value) {
  std::string text = value;
  pmix::Value given{};
  given.type = pmix::kString;
  given.data.string = text.data();
  int status = library_->put(pmix::kGlobal, key.c_str(), &given);
  if (status == pmix::kSuccess) status = library_->commit();
  if (status == pmix::kSuccess) return {};
  return library_->unavailable("cannot tell the other ranks where to meet", status);
}

Result<std::string> PmixSession::fetch(int rank, const std::string& key,
                                       std::chrono::steady_clock::time_point limit) {
  const std::string what = "cannot learn from rank " + std::to_string(rank) + " where the ranks meet";
  for (auto pause = kPollMin;; pause = std::min(pause * 2, kPollMax)) {
    const std::shared_ptr<Answer> answer = ask(rank, key);
    std::unique_lock lock(answer->mutex);
    const bool arrived = answer->arrived.wait_until(lock, limit, [&] { return answer->there; });
    if (answer->text) return *answer->text;
    // Some launchers wait for a value that is not there yet, others answer at once.
    if (arrived && answer->status != pmix::kNotFound) return library_->unavailable(what, answer->status);
    if (!arrived || std::chrono::steady_clock::now() >= limit) {
      return Status(StatusCode::kTimeout, what,
                    ": it has not said so within the deadline; see whether it runs");
    }
    lock.unlock();
    std::this_thread::sleep_for(pause);
  }
}

std::shared_ptr<PmixSession::Answer> PmixSession::ask(int rank, const std::string& key) {
  pmix::Process other = library_->me;
  other.rank = static_cast<std::uint32_t>(rank);
  // Shared with take_answer(), which releases its part.
  auto answer = std::make_shared<Answer>();
  auto given = std::make_unique<std::shared_ptr<Answer>>(answer);
  const int status = library_->get(&other, key.c_str(), nullptr, 0, take_answer, given.get());
  if (status == pmix::kSuccess) {
    static_cast<void>(given.release());
    return answer;
  }
  const std::lock_guard lock(answer->mutex);
  answer->there = true;
  answer->status = status;
  return answer;
}

}  // namespace forebay::internal
