// GlooContext: one plane of Gloo's connections, over sockets that were connected and proven before. Gloo's
// own way to connect takes the first connection that comes to a port.
#pragma once

#include <gloo/context.h>
#include <gloo/transport/tcp/device.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "forebay/descriptor.h"

namespace forebay::internal {

// Its I/O thread starts here. `address`: numeric, of this host. Errors: throws Gloo's exceptions.
std::shared_ptr<gloo::transport::tcp::Device> create_gloo_device(const std::string& address);

// Errors: throws Gloo's exceptions.
class GlooContext final : public gloo::Context {
 public:
  // `take(peer)` gives the connected socket to a peer, once for each.
  GlooContext(int rank, int size, const std::shared_ptr<gloo::transport::tcp::Device>& device,
              std::chrono::milliseconds timeout, const std::function<Descriptor(int peer)>& take);
};

}  // namespace forebay::internal
