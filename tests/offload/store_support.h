// Shared by the tests of file stores: memory at a chosen distance from a page's begin, patterns that know
// their place, and seeds.
#pragma once

#include <dirent.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "forebay/store.h"

namespace forebay::testing {

inline constexpr std::chrono::milliseconds kSoon{60'000};  // Longer than any transfer here takes.
inline constexpr std::size_t kPage = 4096;

// Memory that begins `shift` bytes after a page does, and ends where the sanitizer watches.
class Memory {
 public:
  explicit Memory(std::size_t bytes, std::size_t shift = 0) : bytes_(bytes), shift_(shift) {
    base_.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, (bytes + shift + kPage) / kPage * kPage)));
    std::memset(base_.get(), 0xEE, (bytes + shift + kPage) / kPage * kPage);
  }
  std::byte* data() const { return base_.get() + shift_; }
  std::size_t size() const { return bytes_; }
  std::span<std::byte> bytes() const { return {data(), bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::size_t bytes_;
  std::size_t shift_;
  std::unique_ptr<std::byte, Free> base_;
};

// Bytes that differ with their place and with `salt`.
inline void fill_pattern(std::span<std::byte> bytes, std::uint64_t salt) {
  std::uint64_t state = salt * 0x9E3779B97F4A7C15u + 1;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<std::byte>(state >> 56);
  }
}

inline bool equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

inline std::uint64_t choose_seed() {
  const char* text = std::getenv("FOREBAY_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device{}();
}

inline Status write_all(Store& store, StoreRange range, std::uint64_t offset,
                        std::span<const std::byte> bytes) {
  auto ticket = store.write(range, offset, bytes.data(), bytes.size());
  return ticket.ok() ? store.wait(ticket.value(), kSoon) : ticket.status();
}

inline Status read_all(Store& store, StoreRange range, std::uint64_t offset, std::span<std::byte> bytes) {
  auto ticket = store.read(range, offset, bytes.data(), bytes.size());
  return ticket.ok() ? store.wait(ticket.value(), kSoon) : ticket.status();
}

inline std::size_t count_entries(const char* directory) {
  std::size_t count = 0;
  DIR* entries = ::opendir(directory);
  while (entries != nullptr && ::readdir(entries) != nullptr) ++count;
  if (entries != nullptr) ::closedir(entries);
  return count;
}

}  // namespace forebay::testing
