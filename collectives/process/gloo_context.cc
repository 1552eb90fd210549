#include "collectives/process/gloo_context.h"

#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/pair.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <future>
#include <mutex>
#include <system_error>
#include <utility>

#include "collectives/signal_mask.h"

namespace forebay::internal {
namespace {

namespace tcp = gloo::transport::tcp;

// Runs a function on the device's I/O thread, while that thread handles no connection.
class OnLoopThread final : public tcp::Handler {
 public:
  static void run(tcp::Device& device, const std::function<void()>& function) {
    OnLoopThread handler(device, function);
    std::future<void> done = handler.task_.get_future();
    device.registerDescriptor(handler.bell_.number(), EPOLLIN, &handler);
    done.get();
  }

  void handleEvents(int /*events*/) override {
    device_.unregisterDescriptor(bell_.number(), this);
    task_();
  }

 private:
  OnLoopThread(tcp::Device& device, const std::function<void()>& function)
      : device_(device), task_(function), bell_(eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!bell_.valid()) throw std::system_error(errno, std::generic_category(), "eventfd");
  }

  tcp::Device& device_;
  std::packaged_task<void()> task_;
  const Descriptor bell_;
};

#if defined(FOREBAY_GLOO_STANDS_IN) && defined(__x86_64__)
// That of the library, which gloo_headers/ must not change.
static_assert(sizeof(tcp::Pair) == 0x380);
#endif

// Gloo's pair listens at a port from its constructor on, and would take the first connection that comes. This
// one closes that port before anybody can accept. Requires: the I/O thread, which alone accepts.
class ConnectedPair final : public tcp::Pair {
 public:
  ConnectedPair(tcp::Context* context, tcp::Device* device, int peer, std::chrono::milliseconds timeout,
                Descriptor socket)
      : Pair(context, device, peer, timeout) {
    const std::lock_guard lock(m_);
    device_->unregisterDescriptor(fd_, this);
    ::close(std::exchange(fd_, socket.release()));
    handleConnected();
  }
};

class ConnectedContext final : public tcp::Context {
 public:
  ConnectedContext(const std::shared_ptr<tcp::Device>& device, int rank, int size)
      : tcp::Context(device, rank, size) {}
  void add(int peer, Descriptor socket) {
    pairs_[static_cast<std::size_t>(peer)] =
        std::make_unique<ConnectedPair>(this, device_.get(), peer, getTimeout(), std::move(socket));
  }
};

}  // namespace

std::shared_ptr<tcp::Device> create_gloo_device(const std::string& address) {
  tcp::attr attributes;
  attributes.hostname = address;
  const BlockedSignals blocked;
  return std::dynamic_pointer_cast<tcp::Device>(tcp::CreateDevice(attributes));
}

GlooContext::GlooContext(int rank, int size, const std::shared_ptr<tcp::Device>& device,
                         std::chrono::milliseconds timeout, const std::function<Descriptor(int peer)>& take)
    : gloo::Context(rank, size) {
  const auto context = std::make_shared<ConnectedContext>(device, rank, size);
  setTimeout(timeout);
  context->setTimeout(timeout);
  device_ = device;
  transportContext_ = context;
  OnLoopThread::run(*device, [&] {
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) context->add(peer, take(peer));
    }
  });
}

}  // namespace forebay::internal
