// GlooContext: one plane of Gloo's connections, made one by one. Gloo's own way to make them all cannot be
// interrupted when a peer is gone.
#pragma once

#include <gloo/context.h>
#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace forebay::internal {

// Errors: throws Gloo's exceptions.
class GlooContext final : public gloo::Context {
 public:
  // When this returns, every pair listens. One connect() takes at most `timeout`.
  GlooContext(int rank, int size, const std::shared_ptr<gloo::transport::Device>& device,
              std::chrono::milliseconds timeout)
      : gloo::Context(rank, size) {
    // Gloo waits up to five times a context's timeout for one connection.
    constexpr int kGloosFactor = 5;
    const auto own = std::max(timeout / kGloosFactor, std::chrono::milliseconds(1));
    setTimeout(own);
    device_ = device;
    transportContext_ = device->createContext(rank, size);
    transportContext_->setTimeout(own);
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) transportContext_->createPair(peer);
    }
  }

  // The addresses of this rank's pairs, for the peers to read.
  std::string addresses() {
    std::string text;
    for (int peer = 0; peer < size; ++peer) {
      const std::vector<char> address = peer == rank ? std::vector<char>() : getPair(peer)->address().bytes();
      const auto bytes = static_cast<std::uint32_t>(address.size());
      text.append(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
      text.append(address.data(), address.size());
    }
    return text;
  }

  // `addresses` are those of `peer`; false when they cannot be read. Returns early when the connections are
  // closed meanwhile.
  bool connect(int peer, std::string_view addresses) {
    for (int reader = 0;; ++reader) {
      std::uint32_t bytes = 0;
      if (addresses.size() < sizeof(bytes)) return false;
      std::memcpy(&bytes, addresses.data(), sizeof(bytes));
      addresses.remove_prefix(sizeof(bytes));
      if (addresses.size() < bytes) return false;
      if (reader == rank) {
        getPair(peer)->connect(std::vector<char>(addresses.begin(), addresses.begin() + bytes));
        return true;
      }
      addresses.remove_prefix(bytes);
    }
  }
};

}  // namespace forebay::internal
