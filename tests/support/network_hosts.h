// Several hosts on one machine: network namespaces, each with a virtual cable to a bridge, in a network of
// the test's own that ends with the test's process. A process on a host sees the interface "eth0" and process
// ids of its own, so it cannot tell that another host is the same machine.
#pragma once

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/process.h"

namespace forebay::testing {

// Bytes that an interface of the host has sent and received, by the kernel's count.
struct InterfaceBytes {
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
};

// A cable in user space that delays and loses frames, which the kernel here may not be able to do.
class LossyCable {
 public:
  // Connects two tap devices, which it takes over.
  LossyCable(int one_end, int other_end, double loss, std::chrono::milliseconds delay, unsigned seed)
      : ends_{one_end, other_end}, loss_(loss), delay_(delay), random_(seed) {
    thread_ = std::thread([this] { carry(); });
  }
  LossyCable(const LossyCable&) = delete;
  LossyCable& operator=(const LossyCable&) = delete;
  ~LossyCable() {
    stop_ = true;
    thread_.join();
    for (const int end : ends_) ::close(end);
  }

  std::uint64_t lost_count() const { return lost_count_; }

 private:
  struct Frame {
    std::chrono::steady_clock::time_point due;
    int to;
    std::string bytes;
  };

  void carry() {
    std::deque<Frame> under_way;
    std::vector<char> buffer(70'000);
    std::bernoulli_distribution is_lost(loss_);
    while (!stop_) {
      pollfd ready[2] = {{ends_[0], POLLIN, 0}, {ends_[1], POLLIN, 0}};
      static_cast<void>(::poll(ready, 2, 1));
      const auto now = std::chrono::steady_clock::now();
      for (int from = 0; from < 2; ++from) {
        if ((ready[from].revents & POLLIN) == 0) continue;
        const ssize_t count = ::read(ends_[from], buffer.data(), buffer.size());
        if (count <= 0) continue;
        if (is_lost(random_)) {
          ++lost_count_;
        } else {
          under_way.push_back(
              {now + delay_, ends_[1 - from], {buffer.data(), static_cast<std::size_t>(count)}});
        }
      }
      for (; !under_way.empty() && under_way.front().due <= now; under_way.pop_front()) {
        const Frame& frame = under_way.front();
        static_cast<void>(!::write(frame.to, frame.bytes.data(), frame.bytes.size()));
      }
    }
  }

  const int ends_[2];
  const double loss_;
  const std::chrono::milliseconds delay_;
  std::mt19937 random_;
  std::atomic<bool> stop_{false};
  std::atomic<std::uint64_t> lost_count_{0};
  std::thread thread_;
};

class NetworkHosts {
 public:
  // The reason why this machine cannot have such hosts; empty if it can. The first call puts this process
  // into a network of its own, for good; the process must not have started a thread.
  static std::string unavailable() {
    static const std::string reason = enter_own_network();
    return reason;
  }

  // Requires: unavailable() is empty.
  explicit NetworkHosts(int count) {
    run("ip link add fbbridge type bridge");
    run("ip link set fbbridge up");
    for (int host = 0; host < count; ++host) {
      holders_.push_back(start_holder());
      run("ip link add " + cable(host) + " type veth peer name eth0 netns " +
          std::to_string(holders_.back()));
      plug_in(host);
    }
  }
  NetworkHosts(const NetworkHosts&) = delete;
  NetworkHosts& operator=(const NetworkHosts&) = delete;
  ~NetworkHosts() {
    lossy_.reset();  // Its ends are removed with it.
    // The kernel takes its time to end a network, and the cables would stay that long.
    for (std::size_t host = 0; host < holders_.size(); ++host)
      run("! ip link show " + cable(static_cast<int>(host)) + " > /dev/null 2>&1 || ip link del " +
          cable(static_cast<int>(host)));
    for (const pid_t holder : holders_) {
      ::kill(holder, SIGKILL);
      ::waitpid(holder, nullptr, 0);
    }
    run("ip link del fbbridge");
  }

  static std::string address(int host) { return "10.77.0." + std::to_string(host + 1); }

  // The command line that runs `command` as a process of the host.
  std::vector<std::string> on(int host, const std::vector<std::string>& command) const {
    // A shell in front, because the first process of a process namespace cannot kill or stop itself.
    std::vector<std::string> words{"/usr/bin/nsenter",
                                   "--net=" + network(host),
                                   "--",
                                   "/usr/bin/unshare",
                                   "--pid",
                                   "--ipc",
                                   "--fork",
                                   "--kill-child",
                                   "--mount-proc",
                                   "--",
                                   "/bin/sh",
                                   "-c",
                                   "\"$@\"; exit $?",
                                   "sh"};
    words.insert(words.end(), command.begin(), command.end());
    return words;
  }

  // Read at the bridge's end of the cable, which receives the bytes that the host sends.
  InterfaceBytes bytes(int host) const {
    const Finished shown = run_program({"/bin/sh", "-c", "exec ip -s -j link show " + cable(host)});
    const nlohmann::json link = nlohmann::json::parse(shown.output, nullptr, false);
    if (!link.is_array() || link.empty()) {
      ADD_FAILURE() << shown.output;
      return {};
    }
    return {link[0]["stats64"]["rx"]["bytes"].get<std::uint64_t>(),
            link[0]["stats64"]["tx"]["bytes"].get<std::uint64_t>()};
  }

  // A network partition: the host reaches no other host any more.
  void partition(int host) { run("ip link set " + cable(host) + " down"); }
  // Ends every connection of the host, as a router does that has lost its table.
  void reset_connections(int host) { run("nsenter --net=" + network(host) + " ss -K -t state established"); }
  void slow_down(int host, const std::string& rate) {
    run("tc qdisc add dev " + cable(host) + " root tbf rate " + rate + " burst 200kb latency 400ms");
    run("nsenter --net=" + network(host) + " tc qdisc add dev eth0 root tbf rate " + rate +
        " burst 200kb latency 400ms");
  }
  // Why make_lossy() cannot work here; empty if it can.
  static std::string lossy_unavailable() {
    const int device = ::open("/dev/net/tun", O_RDWR | O_CLOEXEC);
    if (device < 0) return std::string("/dev/net/tun, for a lossy cable: ") + std::strerror(errno);
    ::close(device);
    return {};
  }
  // Puts a lossy cable in place of the host's cable.
  void make_lossy(int host, double loss, std::chrono::milliseconds delay, unsigned seed) {
    run("ip link del " + cable(host));
    const int near = open_tap(cable(host), 0);
    const int far = open_tap("eth0", holders_[static_cast<std::size_t>(host)]);
    plug_in(host);
    // The other hosts know the old cable's address.
    for (const pid_t holder : holders_)
      run("nsenter --net=/proc/" + std::to_string(holder) + "/ns/net ip neigh flush all");
    lossy_ = std::make_unique<LossyCable>(near, far, loss, delay, seed);
  }
  std::uint64_t lost_count() const { return lossy_->lost_count(); }

 private:
  static std::string cable(int host) { return "fbcable" + std::to_string(host); }
  std::string network(int host) const {
    return "/proc/" + std::to_string(holders_[static_cast<std::size_t>(host)]) + "/ns/net";
  }

  static void run(const std::string& command) {
    const Finished finished = run_program({"/bin/sh", "-c", command});
    EXPECT_EQ(finished.exit_code, 0) << command << ": " << finished.output;
  }

  void plug_in(int host) const {
    const std::string inside = "nsenter --net=" + network(host) + " ip ";
    run("ip link set " + cable(host) + " master fbbridge up");
    run(inside + "addr add " + address(host) + "/24 dev eth0");
    run(inside + "link set eth0 up");
    run(inside + "link set lo up");
  }

  // Starts a process that only keeps a network namespace.
  static pid_t start_holder() {
    int ready[2];
    EXPECT_EQ(::pipe(ready), 0);
    const pid_t holder = ::fork();
    if (holder == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const char done = ::unshare(CLONE_NEWNET) == 0 ? 'y' : 'n';
      static_cast<void>(!::write(ready[1], &done, 1));
      for (;;) ::pause();
    }
    char done = 'n';
    EXPECT_EQ(::read(ready[0], &done, 1), 1);
    EXPECT_EQ(done, 'y') << "no network namespace";
    ::close(ready[0]);
    ::close(ready[1]);
    return holder;
  }

  // Opens a tap device in the network of process `holder`, or of this process for 0.
  static int open_tap(const std::string& name, pid_t holder) {
    int descriptor = -1;
    // A namespace belongs to a thread.
    std::thread([&] {
      if (holder != 0) {
        const int network = ::open(("/proc/" + std::to_string(holder) + "/ns/net").c_str(), O_RDONLY);
        EXPECT_EQ(::setns(network, CLONE_NEWNET), 0);
        ::close(network);
      }
      descriptor = ::open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
      ifreq request{};
      request.ifr_flags = IFF_TAP | IFF_NO_PI;
      std::strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
      EXPECT_EQ(::ioctl(descriptor, TUNSETIFF, &request), 0) << std::strerror(errno);
    }).join();
    return descriptor;
  }

  static std::string enter_own_network() {
    for (const char* tool : {"ip", "tc", "ss", "nsenter", "unshare"}) {
      const std::string look = std::string("command -v ") + tool + " > /dev/null";
      if (run_program({"/bin/sh", "-c", look}).exit_code != 0)
        return std::string(tool) + " is not installed (iproute2, util-linux)";
    }
    const uid_t user = ::geteuid();
    const gid_t group = ::getegid();
    const int flags = CLONE_NEWNET | CLONE_NEWNS | (user == 0 ? 0 : CLONE_NEWUSER);
    if (::unshare(flags) != 0)
      return std::string("this machine lets no process have a network of its own: ") + std::strerror(errno);
    if (user != 0) {
      std::ofstream("/proc/self/setgroups") << "deny";
      std::ofstream("/proc/self/uid_map") << "0 " << user << " 1";
      std::ofstream("/proc/self/gid_map") << "0 " << group << " 1";
    }
    const Finished bridge =
        run_program({"/bin/sh", "-c",
                     "ip link set lo up && ip link add fbtry type bridge && ip link add "
                     "fbone type veth peer name fbtwo && ip link del fbtry && ip link del "
                     "fbone && unshare --pid --ipc --fork --mount-proc true"});
    if (bridge.exit_code != 0)
      return "no bridges, virtual cables or process namespaces here: " + bridge.output;
    return {};
  }

  std::vector<pid_t> holders_;
  std::unique_ptr<LossyCable> lossy_;
};

}  // namespace forebay::testing
