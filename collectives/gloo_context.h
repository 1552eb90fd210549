// What differs between Gloo's releases.
#pragma once

#include <memory>

namespace gloo::transport {
class Device;
}

namespace forebay::internal {

// Debian 12's takes the store by reference, later ones share it.
template <typename Context, typename Store>
void connect_full_mesh(Context& context, const std::shared_ptr<Store>& store,
                       std::shared_ptr<gloo::transport::Device>& device) {
  if constexpr (requires { context.connectFullMesh(store, device); }) {
    context.connectFullMesh(store, device);
  } else {
    context.connectFullMesh(*store, device);
  }
}

}  // namespace forebay::internal
