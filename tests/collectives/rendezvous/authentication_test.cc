#include "collectives/rendezvous/authentication.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <vector>

namespace forebay::internal {
namespace {

// From here on the system refuses `calls` of this process, as a strict sandbox does.
bool refuse(const std::vector<unsigned>& calls) {
  std::vector<sock_filter> program{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const unsigned call : calls) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

// The exit code of a child that runs `body`, or -1 if it did not end by itself; 77: it cannot be run here.
int run_in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(body());
  }
  int state = 0;
  return waitpid(child, &state, 0) == child && WIFEXITED(state) ? WEXITSTATUS(state) : -1;
}

TEST(Randomness, ComesFromTheDeviceIfTheCallIsRefused) {
  const int code = run_in_child([] {
    if (!refuse({SYS_getrandom})) return 77;
    if (!check_randomness().ok()) return 1;
    return equal_digests(random_digest(), random_digest()) ? 2 : 0;
  });
  if (code == 77) GTEST_SKIP() << "seccomp filters cannot be set here";
  EXPECT_EQ(code, 0);
}

TEST(Randomness, WithoutAnySourceIsAnErrorAndNoEndlessLoop) {
  const int code = run_in_child([] {
    if (!refuse({SYS_getrandom, SYS_openat})) return 77;
    const Status status = check_randomness();
    return status.code() == StatusCode::kUnsupported &&
                   status.message().find("getrandom") != std::string::npos
               ? 0
               : 1;
  });
  if (code == 77) GTEST_SKIP() << "seccomp filters cannot be set here";
  EXPECT_EQ(code, 0);
}

}  // namespace
}  // namespace forebay::internal
