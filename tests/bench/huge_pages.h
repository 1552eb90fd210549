// Memory like that of the tiers: in huge pages if the system gives them, zeroed, and touched before use.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace forebay::bench {

template <typename T>
class HugePages {
 public:
  explicit HugePages(std::size_t count) : bytes_((count * sizeof(T) + kPage - 1) / kPage * kPage) {
    start_ = std::aligned_alloc(kPage, bytes_);
    if (start_ == nullptr) {
      std::fprintf(stderr, "cannot allocate %zu MiB; pass fewer elements\n", bytes_ >> 20);
      std::exit(1);
    }
    madvise(start_, bytes_, MADV_HUGEPAGE);
    std::memset(start_, 0, bytes_);
  }
  ~HugePages() { std::free(start_); }
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

  T* data() const noexcept { return static_cast<T*>(start_); }

 private:
  static constexpr std::size_t kPage = std::size_t{2} << 20;
  std::size_t bytes_;
  void* start_;
};

}  // namespace forebay::bench
