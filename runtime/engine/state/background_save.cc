#include "runtime/engine/state/background_save.h"

#include <exception>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "forebay/error.h"
#include "forebay/log.h"

namespace forebay::internal {
namespace {

// Between looks for files of other ranks. Smaller: more work for the file system. Larger: the state gets its
// name later.
constexpr std::chrono::milliseconds kLook{10};

// How long a file of another rank may be unseen when it is there, as on a network file system. Longer: other
// ranks reach their deadline before they learn that it was removed.
constexpr std::chrono::milliseconds kUnseen{2'000};

std::string unfinished(const std::string& file) {
  return "." + file;
}

// The exception that is being handled. One that left the thread would end the process.
Status error_of_save() {
  try {
    throw;
  } catch (const Error& error) {
    return error.status();
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory,
                  "the host has no memory to write a saved state; free some, or save less often");
  } catch (const std::exception& error) {
    return Status(StatusCode::kInternal, std::string("cannot write a saved state: ") + error.what());
  }
}

}  // namespace

BackgroundSave::BackgroundSave(BackgroundSaveJob job) : job_(std::move(job)) {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    // An error of the save, as those of the thread are, so that all ranks learn of it at its end.
    const Status status(StatusCode::kUnavailable, "there is no thread to write a saved state: ", error.what(),
                        "; raise ulimit -u or -v, or save without a thread");
    static_cast<void>(job_.copied());
    file_ = status;
    state_ = status;
  }
}

BackgroundSave::~BackgroundSave() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return file_.has_value(); });
    std::string seen = progress();
    while (!changed_.wait_for(lock, patience, [&] { return state_.has_value(); })) {
      std::string now = progress();
      if (now == seen) break;
      seen = std::move(now);
    }
    gave_up_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (!state_->ok() && job_.rank == 0) {
    try {
      if (!directory_) directory_.emplace(job_.directory);
      directory_->remove(job_.temporary);
    } catch (const Error&) {
      // The next save removes the temporary state.
    }
  }
  if (!state_->ok() && !told_)
    log(LogLevel::kWarning, "a state that was being saved is lost: %s", state_->message().c_str());
}

std::string BackgroundSave::progress() const {
  if (job_.rank != 0 || !directory_) return {};
  try {
    return directory_->subdirectory(job_.temporary).progress();
  } catch (const Error&) {
    return {};  // The state has its name, or something removed it.
  }
}

Status BackgroundSave::wait_for_file() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return file_.has_value(); });
  told_ = true;
  return *file_;
}

Status BackgroundSave::wait() {
  std::unique_lock lock(mutex_);
  files_there_ = std::chrono::steady_clock::now();
  changed_.wait(lock, [&] { return state_.has_value(); });
  return *state_;
}

void BackgroundSave::give_up() {
  const std::lock_guard lock(mutex_);
  gave_up_ = true;
  changed_.notify_all();
}

void BackgroundSave::run() {
  Status status = job_.copied();
  try {
    throw_if_error(status);
    directory_.emplace(job_.directory);
    const StateDirectory temporary = directory_->subdirectory(job_.temporary);
    const std::string file = state_file_name(job_.rank, job_.ranks);
    job_.write(temporary.create(unfinished(file)));
    temporary.rename(unfinished(file), file);
  } catch (...) {
    status = error_of_save();
  }
  {
    const std::lock_guard lock(mutex_);
    file_ = status;
  }
  changed_.notify_all();
  if (status.ok() && job_.rank == 0) {
    try {
      publish();
      job_.lock.reset();
    } catch (...) {
      status = error_of_save();
    }
  }
  {
    const std::lock_guard lock(mutex_);
    state_ = status;
  }
  changed_.notify_all();
}

void BackgroundSave::publish() {
  for (int r = 0; r < job_.ranks; ++r) {
    const std::string file = state_file_name(r, job_.ranks);
    for (;;) {
      // Opened again each time: a network file system then looks anew, and a directory that is gone is an
      // error.
      const StateDirectory temporary = directory_->subdirectory(job_.temporary);
      if (temporary.has(file)) break;
      std::unique_lock lock(mutex_);
      if (changed_.wait_for(lock, kLook, [&] { return gave_up_; })) {
        const std::string silence =
            patience.count() > 0 ? ", and no rank wrote there for " + std::to_string(patience.count()) + " ms"
                                 : "";
        throw Error(StatusCode::kIoError, "rank " + std::to_string(r) + " did not finish its file in " +
                                              temporary.path() + silence + "; see the error of that rank");
      }
      if (files_there_ && std::chrono::steady_clock::now() - *files_there_ > kUnseen) {
        throw Error(StatusCode::kIoError,
                    temporary.path() + "/" + file +
                        " is gone: something removed it while the state was being saved; "
                        "save again, and keep other programs out of that directory");
      }
    }
  }
  publish_state(*directory_, job_.temporary, job_.manifest, job_.keep);
  job_.published(*directory_);
}

}  // namespace forebay::internal
