// The directory of saved states: files below an open directory, and the lock of the one job that writes
// there.
//
// The directory is opened once, and everything in it is reached through that descriptor. A name that is
// written is never followed as a link. A file that is read is a regular file.
// Errors: every function throws Error: kIoError, or kCorruption where a file is not of the right kind or
// size.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "forebay/descriptor.h"

namespace forebay::internal {

class StateFile {
 public:
  StateFile(Descriptor descriptor, std::string path);

  const std::string& path() const { return path_; }
  std::uint64_t bytes() const;
  void write(const void* data, std::uint64_t bytes);
  // Lets writes go past the page cache, or no longer. It saves a copy by the kernel for data at a page of
  // memory that begins and ends at pages of the file; others go through the cache. False where it cannot.
  bool set_direct(bool direct) const;
  void read_at(std::uint64_t offset, void* data, std::uint64_t bytes) const;
  void sync() const;
  // Releases the lock of the file, which copies of the descriptor in other processes would keep.
  void unlock() const;

 private:
  bool is_direct() const;  // Writes go past the page cache.

  Descriptor descriptor_;
  std::string path_;
};

class StateDirectory {
 public:
  explicit StateDirectory(const std::string& path);
  // Makes the directory, and those above it, where they are missing.
  static StateDirectory make(const std::string& path);

  const std::string& path() const { return path_; }
  // The same for all names of one directory.
  std::pair<dev_t, ino_t> identity() const;
  StateDirectory subdirectory(const std::string& name) const;
  void make_subdirectory(const std::string& name) const;
  // A new file. An existing one of this name is removed first, unless it is a directory.
  StateFile create(const std::string& name) const;
  // An existing file for reading.
  StateFile open(const std::string& name) const;
  std::string read(const std::string& name, std::uint64_t most_bytes) const;
  void write_synced(const std::string& name, const std::string& text) const;
  bool has(const std::string& name) const;
  std::vector<std::string> names() const;
  // Text that changes when a file here is written, or has another name.
  std::string progress() const;
  void rename(const std::string& from, const std::string& to) const;
  // False where the file system renames no such directory, as an overlay does with one of a lower layer.
  bool rename_directory(const std::string& from, const std::string& to) const;
  void sync() const;
  // Removes the files of a saved state in a subdirectory, and the subdirectory unless it has others.
  void remove(const std::string& name) const noexcept;
  // Removes a symbolic link, and nothing of what it points to. False if it is none, or cannot be removed.
  bool remove_link(const std::string& name) const noexcept;

 private:
  friend class StateLock;
  StateDirectory(Descriptor descriptor, std::string path);

  Descriptor descriptor_;
  std::string path_;
};

// The right to save in a directory. It ends with the process, however that ends. In one process it may be
// taken several times, but for one save at a time.
class StateLock {
 public:
  // `saves`: for a save, which another engine of this process must not disturb. Errors: kUnavailable that
  // names the holder, as far as it is a job. Where the file system has no locks, a warning is logged.
  explicit StateLock(const StateDirectory& directory, bool saves = false);
  StateLock(const StateLock&) = delete;
  StateLock& operator=(const StateLock&) = delete;
  ~StateLock();

 private:
  std::pair<dev_t, ino_t> key_;
  const bool saves_;
  bool held_ = false;
};

}  // namespace forebay::internal
