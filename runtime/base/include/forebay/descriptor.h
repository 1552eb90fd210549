// A file descriptor, closed with its owner.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "forebay/language.h"

namespace forebay::internal {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) noexcept : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  int number() const noexcept { return number_; }
  bool valid() const noexcept { return number_ >= 0; }
  void reset() noexcept { *this = Descriptor(); }
  // Reads so many bytes of a file. Returns their number, fewer at its end, or -1 with errno.
  ssize_t read_at(std::uint64_t offset, void* data, std::size_t bytes) const noexcept {
    std::size_t done = 0;
    while (done < bytes) {
      const ssize_t count =
          ::pread(number_, static_cast<char*>(data) + done, bytes - done, static_cast<off_t>(offset + done));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return -1;
      if (count == 0) break;
      done += static_cast<std::size_t>(count);
    }
    return static_cast<ssize_t>(done);
  }
  // The caller closes it.
  int release() noexcept { return std::exchange(number_, -1); }

 private:
  int number_ = -1;
};

}  // namespace forebay::internal
