// StoreDirectory: the RendezvousStore that keeps its texts as small files in one directory that all ranks
// see. A file appears whole or not at all: it is written under another name, then renamed. Each rank holds
// the lock of a file there as long as it lives. So the others learn when it was killed. A second process of
// the same rank finds the lock taken: both processes and the other ranks are told.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "collectives/rendezvous/rendezvous_store.h"
#include "forebay/descriptor.h"
#include "forebay/status.h"

namespace forebay::internal {

class StoreDirectory final : public RendezvousStore {
 public:
  // Makes the directory (and its parent, one level) with mode 0700 when it is missing.
  // Errors: kInvalidArgument when it is a link or no directory, or when it, or its parent, belongs to another
  // user or is writable by others; kIoError.
  static Result<std::unique_ptr<StoreDirectory>> open(const std::string& path);

  // Takes the lock of `who.rank` for this process. Errors: kInvalidArgument when another process has it. On a
  // file system without locks nobody can tell.
  Status come(const Participant& who);

  // The last rank to leave, as far as locks tell, removes the texts of ranks that died and those that the run
  // kept for ranks that look late; and the directory, if ranks made it and it is empty.
  ~StoreDirectory() override;
  StoreDirectory(const StoreDirectory&) = delete;
  StoreDirectory& operator=(const StoreDirectory&) = delete;

  const std::string& where() const noexcept override { return path_; }

  Status write(const std::string& name, std::string_view content) override;
  std::optional<std::string> read(const std::string& name) override;
  std::optional<std::string> write_once(const std::string& name, std::string_view content) override;
  void remove(const std::string& name) noexcept override;
  // Whether a rank that was here was killed or came twice, as of some tens of milliseconds ago. A rank was
  // here when its lock was seen, or when it is expected on this host. A file without a lock does not count:
  // it may be of an earlier run, or of a host with locks that this one does not see.
  Status status() override;
  std::string presence() const override;
  void expect(int rank, const std::string& presence) override;

 private:
  StoreDirectory(std::string path, bool made, bool made_parent)
      : path_(std::move(path)), made_(made), made_parent_(made_parent) {}

  std::string path_of(const std::string& name) const { return path_ + "/" + name; }
  Result<std::string> write_temporary(std::string_view content);
  void remember(const std::string& name);
  Status look();
  // False while another rank is here.
  bool sweep();
  Status came_twice(int rank, const std::string& first, const std::string& second) const;

  const std::string path_;
  const bool made_;
  const bool made_parent_;
  // Set by come(): this rank, and the file with its lock; none without locks.
  int rank_ = -1;
  int size_ = 0;
  Descriptor presence_;

  std::mutex names_mutex_;
  // Guarded by names_mutex_.
  std::set<std::string> known_;  // Texts that were read or written.
  bool keeps_ = false;           // A text was written once; it stays for ranks that look late.

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::map<int, std::string> seen_;  // By rank: the process that was seen here, this one too.
  Status status_;
  std::chrono::steady_clock::time_point next_look_;
};

}  // namespace forebay::internal
