// A saved state that a thread writes while training goes on.
//
// Each rank's thread writes the rank's file under a temporary name and renames it when it is on the drive. It
// comes behind all other threads. A caller that waits for the file writes the rest of it, so that a busy
// machine delays no one for long. Rank 0's thread waits for the files of all ranks and then publishes the
// state. So the threads communicate by the directory alone.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>

#include "forebay/status.h"
#include "runtime/engine/state/state_directory.h"
#include "runtime/engine/state/state_files.h"

namespace forebay::internal {

struct BackgroundSaveJob {
  std::string directory;
  std::string name;  // The state's: state_name().
  int rank = 0;
  int ranks = 1;
  // Waits until the values are copied.
  std::function<Status()> copied;
  // Begins this rank's file. Each call of the result writes more of it, and returns false when it is
  // complete.
  std::function<std::function<bool()>(StateFile)> write;
  // Rank 0 only. Held until the state has its name, or until what is left of a failed save is removed.
  std::unique_ptr<StateLock> lock;
  nlohmann::json manifest;  // Without its files.
  int keep = 1;
  std::function<void(const StateDirectory&)> published;  // Called when the state has its name.
};

class BackgroundSave {
 public:
  // Starts the thread. Without one the save has failed: see wait_for_file(). Requires: rank 0 has made the
  // temporary state.
  explicit BackgroundSave(BackgroundSaveJob job);
  // Waits for this rank's file, and rank 0 then at most `patience` for the others. Removes what a failed save
  // left: earlier, the threads of other ranks may still write into it.
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  // Waits for this rank's file, and writes what the thread has not written.
  Status wait_for_file();
  // Waits for the end: on rank 0, for the state. Requires: all ranks have their files, so one that is missing
  // has been removed, and is an error.
  Status wait();
  // Rank 0 waits no longer for files of other ranks.
  void give_up();

  // For the destructor. Smaller: a state that other ranks are still writing is lost. Larger: a program whose
  // other ranks were killed ends later.
  std::chrono::milliseconds patience{10'000};

 private:
  void run();
  bool write_more();
  void finish_file();
  void publish();

  BackgroundSaveJob job_;
  std::mutex writing_;  // Comes before mutex_.
  // Guarded by writing_ until the file is there, and used by the thread alone from then on.
  std::optional<StateDirectory> directory_;
  std::function<bool()> write_next_;      // Of job_.write, while the file is open.
  std::atomic<bool> is_awaited_ = false;  // The thread leaves the file to the caller.
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::optional<Status> file_;   // This rank's, when it is there.
  std::optional<Status> state_;  // When the thread has ended.
  bool gave_up_ = false;
  // Since then all ranks have their files.
  std::optional<std::chrono::steady_clock::time_point> files_there_;
  bool told_ = false;  // The caller was told how the save went.
  std::thread thread_;
};

}  // namespace forebay::internal
