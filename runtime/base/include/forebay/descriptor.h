// A file descriptor, closed with its owner.
#pragma once

#include <unistd.h>

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
  // The caller closes it.
  int release() noexcept { return std::exchange(number_, -1); }

 private:
  int number_ = -1;
};

}  // namespace forebay::internal
