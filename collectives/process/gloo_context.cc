#include "collectives/process/gloo_context.h"

#include <fcntl.h>
#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/pair.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <type_traits>
#include <utility>

#include "collectives/signal_mask.h"

namespace forebay::internal {
namespace {

namespace tcp = gloo::transport::tcp;

#ifdef FOREBAY_GLOO_DEVICE_LISTENS
constexpr std::size_t kLibraryPairBytes = 0x378;
#else
constexpr std::size_t kLibraryPairBytes = 0x380;
#endif

#if defined(FOREBAY_GLOO_STANDS_IN) && defined(__x86_64__) && defined(__GLIBCXX__)
// That of the library, which gloo_headers/ must not change.
static_assert(sizeof(tcp::Pair) == kLibraryPairBytes);
#endif

#ifdef FOREBAY_GLOO_DEVICE_LISTENS
// Gloo since 2023: each device listens at a port until it ends, and its pairs wait there for connections that
// name them. Nothing is connected through that port here, so it is closed at once.
class QuietDevice final : public tcp::Device {
 public:
  using tcp::Device::Device;

  static std::shared_ptr<tcp::Device> create(const tcp::attr& attributes) {
    const auto device = make<QuietDevice>(attributes);
    device->close_port();
    return device;
  }

 private:
  // Newer constructors have a second argument: connect when a pair is first used.
  template <typename Device>
  static std::shared_ptr<Device> make(const tcp::attr& attributes) {
    if constexpr (std::is_constructible_v<Device, const tcp::attr&, bool>) {
      return std::make_shared<Device>(attributes, false);
    } else {
      return std::make_shared<Device>(attributes);
    }
  }

  // Gloo unregisters and closes the descriptor when the device ends, so an eventfd that never fires takes its
  // place.
  void close_port() {
    const Descriptor silent(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!silent.valid()) throw std::system_error(errno, std::generic_category(), "eventfd");
    const int port = listening_descriptor();
    unregisterDescriptor(port, nullptr);
    if (dup3(silent.number(), port, O_CLOEXEC) < 0) {
      throw std::system_error(errno, std::generic_category(), "dup3 over the port of Gloo's device");
    }
    registerDescriptor(port, 0, nullptr);
  }

  int listening_descriptor() {
    const tcp::Address address = nextAddress();
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      const int descriptor = std::atoi(entry.path().filename().c_str());
      int listens = 0;
      socklen_t size = sizeof(listens);
      if (getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) continue;
      sockaddr_storage own{};
      size = sizeof(own);
      if (getsockname(descriptor, reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
          std::memcmp(&own, &address.getSockaddr(), size) == 0) {
        return descriptor;
      }
    }
    throw std::runtime_error("the port of Gloo's device is not among the descriptors of /proc/self/fd");
  }
};

class ConnectedPair final : public tcp::Pair {
 public:
  ConnectedPair(tcp::Context* context, tcp::Device* device, int peer, std::chrono::milliseconds timeout,
                Descriptor socket)
      : Pair(context, device, peer, timeout) {
    connectCallback(std::make_shared<tcp::Socket>(socket.release()), tcp::Error::kSuccess);
  }
};

void make_pairs(tcp::Device& /*device*/, const std::function<void()>& make) {
  make();
}
#else
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
    // It throws if the peer has reset the connection. ~Pair() unregisters the descriptor, and must find it.
    device_->registerDescriptor(fd_, 0, this);
    handleConnected();
  }
};

void make_pairs(tcp::Device& device, const std::function<void()>& make) {
  OnLoopThread::run(device, make);
}
#endif

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
#ifdef FOREBAY_GLOO_DEVICE_LISTENS
  return QuietDevice::create(tcp::CreateDeviceAttr(attributes));
#else
  return std::dynamic_pointer_cast<tcp::Device>(tcp::CreateDevice(attributes));
#endif
}

GlooContext::GlooContext(int rank, int size, const std::shared_ptr<tcp::Device>& device,
                         std::chrono::milliseconds timeout, const std::function<Descriptor(int peer)>& take)
    : gloo::Context(rank, size) {
  const auto context = std::make_shared<ConnectedContext>(device, rank, size);
  setTimeout(timeout);
  context->setTimeout(timeout);
  device_ = device;
  transportContext_ = context;
  make_pairs(*device, [&] {
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) context->add(peer, take(peer));
    }
  });
}

}  // namespace forebay::internal
