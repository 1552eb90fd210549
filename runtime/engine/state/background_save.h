// A saved state that a thread writes while training goes on.
//
// Each rank's thread writes the rank's file under a temporary name and renames it when it is on the drive.
// Rank 0's thread waits for the files of all ranks and then publishes the state. So the threads communicate
// by the directory alone. They have the priority of other threads: on a busy machine all ranks would wait
// long for one with less.
#pragma once

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
  std::string temporary;  // temporary_state()
  int rank = 0;
  int ranks = 1;
  // Waits until the values are copied.
  std::function<Status()> copied;
  // Writes the values to this rank's file.
  std::function<void(StateFile)> write;
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
  // Waits for this rank's file, and rank 0 then for the others, until none was written to for `patience`.
  // Removes what a failed save left: earlier, the threads of other ranks may still write into it.
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  // Waits for this rank's file.
  Status wait_for_file();
  // Waits for the end: on rank 0, for the state. Requires: all ranks have their files, so one that is missing
  // has been removed, and is an error.
  Status wait();
  // Rank 0 waits no longer for files of other ranks.
  void give_up();

  // For the destructor. Smaller: a state is lost when a rank waits long for its copy or its drive. Larger: a
  // program whose other ranks were killed ends later.
  std::chrono::milliseconds patience{10'000};

 private:
  void run();
  void publish();
  // Changes while a rank writes.
  std::string progress() const;

  BackgroundSaveJob job_;
  std::optional<StateDirectory> directory_;  // Constant from the thread's file on.
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
