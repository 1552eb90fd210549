// The controls of the fake NCCL, for tests. NCCL has no such entry points.
//
// The fake is a libnccl.so.2 on the fake CUDA driver (see README.md). A program reaches it
// as it reaches NCCL, by dlopen, and reaches these controls by dlsym in the same handle; FakeNccl does both.
// Programs that know nothing of it are steered by the environment variables named beside each option.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace forebay::fake_nccl {

// A rank's operations are its launches, a group being one, and are counted from 0. Its calls are those that
// take a communicator, questions for its state left out, and for rank 0 ncclGetUniqueId; they are counted
// from
// 1. Both count over all communicators in which it has that rank. -1: no rank.
struct FakeNcclOptions {
  int version = 22'809;  // FAKE_NCCL_VERSION
  // Calls that NCCL does not finish at once answer "in progress" so many times, and are done then.
  int in_progress = 0;      // FAKE_NCCL_IN_PROGRESS
  bool shared_gpu = false;  // FAKE_NCCL_SHARED_GPU: ranks may share a device, as with distinct NCCL_HOSTID.
  // A call that fails, and its ncclResult_t.
  int fail_rank = -1;           // FAKE_NCCL_FAIL_RANK
  std::uint64_t fail_call = 0;  // FAKE_NCCL_FAIL_CALL
  int fail_result = 2;          // FAKE_NCCL_FAIL_RESULT
  // An operation that never ends until its communicator is aborted; a result other than 0 is also the
  // answer of ncclCommGetAsyncError from then on.
  int hang_rank = -1;                // FAKE_NCCL_HANG_RANK
  std::uint64_t hang_operation = 0;  // FAKE_NCCL_HANG_OPERATION
  int hang_result = 0;               // FAKE_NCCL_HANG_RESULT
  bool hang_sends = false;           // FAKE_NCCL_HANG_SENDS: its peers are served; nothing arrives.
  bool quiet = false;                // FAKE_NCCL_QUIET: misuse is counted and not printed.
};

struct FakeNcclAccount {
  std::uint64_t comms;          // Alive.
  std::uint64_t registrations;  // Alive.
  std::uint64_t operations;     // Launched and not over.
  std::uint64_t launches;       // So far.
  std::uint64_t calls;          // So far, of all ranks, as they are counted for scripts.
  std::uint64_t faults;         // Scripted failures that happened, hanging operations included.
  // Calls that NCCL forbids: of two threads at once, on a communicator that is gone or busy, of a blocking
  // one.
  std::uint64_t misuses;
  std::uint64_t aborts, destroys;  // Communicators that ended so.
};

struct FakeNccl {
  void* library = nullptr;

  void (*configure)(const FakeNcclOptions& options) = nullptr;
  // Forgets counts, scripts and living objects. Nothing may be running.
  void (*reset)() = nullptr;
  void (*account)(FakeNcclAccount& account) = nullptr;

  template <typename Function>
  Function* symbol(const char* name) const {
    auto* const function = reinterpret_cast<Function*>(::dlsym(library, name));
    if (function == nullptr) {
      std::fprintf(stderr, "the fake NCCL has no symbol %s: %s\n", name, ::dlerror());
      std::abort();
    }
    return function;
  }

  // Opens the library at `path`; aborts with the loader's message when there is none.
  static FakeNccl open(const char* path) {
    FakeNccl fake;
    fake.library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (fake.library == nullptr) {
      std::fprintf(stderr, "cannot open the fake NCCL: %s\n", ::dlerror());
      std::abort();
    }
    fake.configure = fake.symbol<void(const FakeNcclOptions&)>("fake_nccl_configure");
    fake.reset = fake.symbol<void()>("fake_nccl_reset");
    fake.account = fake.symbol<void(FakeNcclAccount&)>("fake_nccl_account");
    return fake;
  }

  FakeNcclAccount accounts() const {
    FakeNcclAccount result{};
    account(result);
    return result;
  }
};

}  // namespace forebay::fake_nccl
