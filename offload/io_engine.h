// IoEngine: performs the operations of a file store, each one read or write of one piece of one file. It
// knows no ranges, no checksums and no tickets, and it may return short.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "forebay/file_store.h"
#include "forebay/store_measurement.h"
#include "forebay/status.h"

namespace forebay::internal {

struct IoRequest {
  bool write = false;
  unsigned file = 0;         // Index into the engine's files.
  std::uint64_t offset = 0;  // In the file.
  std::byte* memory = nullptr;
  std::uint32_t bytes = 0;
  std::uint64_t tag = 0;  // Comes back with the result.
};

struct IoResult {
  std::uint64_t tag = 0;
  std::int32_t result = 0;  // Bytes moved, or a negated errno.
};

class IoEngine {
 public:
  // Requires: nothing is in flight.
  virtual ~IoEngine() = default;
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;

  // Begins an operation. The caller has at most `depth` in flight. Threads: one at a time; others may reap.
  // Returns 0, or an errno: it was not begun.
  virtual int submit(const IoRequest& request) = 0;

  // Waits until there is a result or `timeout` has passed, and takes as many as there are. Threads: one at a
  // time.
  virtual std::size_t reap(std::span<IoResult> results, std::chrono::nanoseconds timeout) = 0;

  // As Store::register_memory; returns the bytes that are registered. Requires: nothing is in flight.
  virtual std::uint64_t register_memory(std::byte* memory, std::size_t bytes) = 0;

  virtual std::string description() const = 0;

 protected:
  IoEngine() = default;
};

// The files stay the caller's and outlive the engine.
// Errors: kUnavailable when the kernel refuses or this build has no io_uring.
Result<std::unique_ptr<IoEngine>> make_io_uring_engine(std::vector<int> files, unsigned depth,
                                                       bool registered);
std::unique_ptr<IoEngine> make_thread_engine(std::vector<int> files, unsigned depth, unsigned thread_count);

// Puts an engine of the caller's around the store's: how tests script the failures and the speed of a drive.
using EngineWrap = std::function<std::unique_ptr<IoEngine>(std::unique_ptr<IoEngine>)>;
Result<std::unique_ptr<Store>> make_file_store(const FileStoreOptions& options, const EngineWrap& wrap);
Result<StoreMeasurement> measure_file_store(const FileStoreOptions& options,
                                            const StoreMeasurementOptions& measured, const EngineWrap& wrap);

}  // namespace forebay::internal
