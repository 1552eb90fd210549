// The Store in files: io_uring where the kernel allows it, otherwise threads; past the page cache where the
// file system allows it. The files have no name (nothing is left behind, however the process ends) and are as
// large as the ranges from the moment these are made.
//
// With several directories, the ranges are laid over them in stripes, one file in each, for several drives.
// What one drive loses is lost for all; nothing is kept twice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "forebay/store.h"

namespace forebay {

enum class FileEngine : std::uint8_t {
  kAuto,     // io_uring, or threads where it is refused, which is said once.
  kIoUring,  // io_uring, or an error.
  kThreads,  // Threads that read and write and wait for it.
};

struct FileStoreOptions {
  std::vector<std::string> directories;  // Where the files are; they must be there. At least one.
  FileEngine engine = FileEngine::kAuto;

  // The most that one operation moves; a multiple of the granule. Smaller: more system calls a byte. Larger:
  // fewer operations for the drive to overlap, and larger bounce buffers.
  std::size_t block_bytes = 4 << 20;
  // Operations in flight. Smaller: a drive with several channels is left idle. Larger: nothing, beyond what
  // the drive needs, but longer queues before a transfer that others wait for.
  unsigned depth = 8;
  unsigned thread_count = 8;  // Of the thread engine; at most depth are used.
  // What one directory holds before the next has its turn; a multiple of the granule; 0: block_bytes.
  std::size_t stripe_bytes = 0;
  // Smaller: more checksums in host memory (8 bytes each). Larger: less freedom where transfers begin. A
  // power of two and at least 4 KiB.
  std::size_t granule_bytes = 64 << 10;
  unsigned transfer_limit = 256;
  unsigned bounce_count = 4;  // Bounce buffers of block_bytes each, which take memory once they are used.
  bool checksums = true;      // Cost 0.1 to 0.15 CPU seconds a GiB each way.
  bool direct = true;         // Past the page cache where the file system can.
  bool registered = true;  // Files and memory known to the kernel beforehand where it allows that (io_uring).
};

// Takes no disk space yet. Errors: kInvalidArgument for options that contradict what their comments ask or a
// path that is not a directory; kIoError when a file cannot be made there; kUnavailable when kIoUring is
// asked for and refused or not part of this build.
Result<std::unique_ptr<Store>> make_file_store(const FileStoreOptions& options);

// Whether this build has the io_uring engine. Whether the kernel lets it run is known when a store is made.
bool has_io_uring() noexcept;

}  // namespace forebay
