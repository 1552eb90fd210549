// AccessGuard: ranges of device memory that a program may use only while they are open. A use at another time
// ends the program with a report that names the range, where it would otherwise read bytes of something else.
// For tests and debugging.
//
// Only a host backend that was created with HostBackendOptions::guard has one; Backend::access_guard() is
// null elsewhere. The backend's own copies and kernels are a program's use too. Work that shall go on in a
// closed range uses another mapping of the same chunks.
#pragma once

#include <cstddef>
#include <string>

#include "forebay/backend.h"

namespace forebay {

class AccessGuard {
 public:
  enum class Access { kRead, kWrite };  // kWrite: read and write.

  // Closes a range until it is opened. The guard stays when other chunks are mapped there, and ends with the
  // reservation. `name` appears in reports: "parameters of unit block.3".
  //
  // Requires: the range is mapped, whole, and not guarded.
  // Errors:   kInvalidArgument naming the range; kIoError.
  virtual Status guard(DevicePtr address, std::size_t bytes, const std::string& name) = 0;

  // Opens the range that guard() got at `address`, or takes one such call back, in the order of `stream`. The
  // range is open while more opens than closes have run; calls on several streams add up.
  //
  // Errors: kInvalidArgument for a stream that does not exist. A range that is no longer guarded is no error.
  virtual Status open(DevicePtr address, Access access, Stream stream) = 0;
  virtual Status close(DevicePtr address, Access access, Stream stream) = 0;

 protected:
  ~AccessGuard() = default;
};

}  // namespace forebay
