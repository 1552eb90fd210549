// The key-value space that a launcher (mpirun, srun --mpi=pmix) keeps for the processes of a job, through
// libpmix. The launcher has authenticated them, so every value there is from a process of the job.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "collectives/rendezvous/pmix_abi.h"
#include "forebay/status.h"

namespace forebay::internal {

class PmixSession {
 public:
  // Errors: kUnavailable without libpmix.so.2, or when no launcher answers.
  static Result<std::unique_ptr<PmixSession>> open();
  ~PmixSession();
  PmixSession(const PmixSession&) = delete;
  PmixSession& operator=(const PmixSession&) = delete;

  int rank() const noexcept;

  // Publishes a value for all processes of the job. Once for each key.
  Status publish(const std::string& key, const std::string& value);
  // The value that `rank` published, or publishes before `limit`. Errors: kTimeout; kUnavailable when the
  // launcher cannot tell.
  Result<std::string> fetch(int rank, const std::string& key, std::chrono::steady_clock::time_point limit);

 private:
  struct Library;
  struct Answer;
  static void take_answer(int status, pmix::Value* value, void* data);
  std::shared_ptr<Answer> ask(int rank, const std::string& key);

  explicit PmixSession(std::unique_ptr<Library> library);
  const std::unique_ptr<Library> library_;
};

}  // namespace forebay::internal
