// The file store: a Store in anonymous files, which leave nothing behind however the process ends. It uses
// io_uring where the kernel allows it and threads otherwise, and bypasses the page cache where the file
// system allows it. A file has its full size as soon as its ranges are made.
//
// With several directories, each range is striped over one file in each, to use several drives. There is no
// redundancy: losing one drive loses all ranges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "forebay/store.h"

namespace forebay {

enum class FileEngine : std::uint8_t {
  kAuto,     // io_uring, or threads where io_uring is refused; the log says so once.
  kIoUring,  // io_uring, or an error.
  kThreads,  // Threads with blocking reads and writes.
};

struct FileStoreOptions {
  std::vector<std::string> directories;  // Existing directories for the files. At least one.
  FileEngine engine = FileEngine::kAuto;

  // The most that one operation moves; a multiple of the granule. Smaller: more system calls per byte.
  // Larger: fewer operations for the drive to overlap, and larger bounce buffers.
  std::size_t block_bytes = 4 << 20;
  // Operations in flight. Smaller: a drive with several channels idles. Larger than the drive needs: no gain,
  // and longer queues in front of an urgent transfer.
  unsigned depth = 8;
  unsigned thread_count = 8;  // Threads of the thread engine; at most depth are used.
  // Bytes in one directory before the next one follows; a multiple of the granule; 0: block_bytes.
  std::size_t stripe_bytes = 0;
  // A power of two of at least 4 KiB. Smaller: more checksums in host memory (8 bytes each). Larger: less
  // freedom where transfers begin.
  std::size_t granule_bytes = 64 << 10;
  unsigned transfer_limit = 256;
  unsigned bounce_count = 4;  // Bounce buffers of block_bytes each; they take memory once they are used.
  bool checksums = true;      // They cost 0.1 to 0.15 CPU seconds per GiB in each direction.
  bool direct = true;         // Bypasses the page cache where the file system can.
  bool registered = true;     // Registers files and memory with the kernel where it allows that (io_uring).
};

// Takes no disk space yet.
// Errors: kInvalidArgument for options that break the rules above or a path that is not a directory; kIoError
// when a file cannot be made there; kUnavailable for kIoUring when it is refused or not part of this build.
Result<std::unique_ptr<Store>> make_file_store(const FileStoreOptions& options);

// Whether this build has the io_uring engine. Whether the kernel allows it shows when a store is made.
bool has_io_uring() noexcept;

}  // namespace forebay
