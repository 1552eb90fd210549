// A program for meeting_process_test and launchers to start as the ranks of a run, which meet as their
// environment says.
//
//   meeting_probe DEADLINE_MS meet           meets, and leaves when all have
//   meeting_probe DEADLINE_MS hold           meets, and stays until the run has failed
//   meeting_probe DEADLINE_MS absent RANK    meets, but that rank ends with 0 before it begins
//   meeting_probe DEADLINE_MS different RANK meets, but that rank has another configuration
// Prints one line about its outcome, "met GENERATION of rank R at STORE" or "failed rank R: CAUSE", and
// ends with exit code 0 or 3. In a directory its text stays: a process that removes it must know that the
// others have read it.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "collectives/rendezvous/meeting.h"
#include "collectives/rendezvous/rendezvous_store.h"
#include "forebay/bootstrap.h"

namespace {

using namespace forebay;

Status run(const LaunchEnvironment& environment, std::chrono::milliseconds deadline, const std::string& mode,
           int chosen) {
  const auto limit = std::chrono::steady_clock::now() + deadline;
  const bool differs = mode == "different" && environment.rank == chosen;
  const internal::Participant me{environment.rank, environment.size, differs ? "other" : "same"};
  Result<std::unique_ptr<internal::RendezvousStore>> store =
      internal::open_rendezvous({environment.store, nullptr, me, environment.interface, limit});
  FOREBAY_RETURN_IF_ERROR(store.status());
  Result<internal::Meeting> meeting = internal::meet(*store.value(), me, limit, deadline);
  FOREBAY_RETURN_IF_ERROR(meeting.status());
  std::printf("met %s of rank %d at %s\n", meeting.value().generation.c_str(), environment.rank,
              store.value()->where().c_str());
  std::fflush(stdout);
  if (mode != "hold") return {};
  while (store.value()->status().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return store.value()->status();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 98;
  const std::string mode = argv[2];
  const int chosen = argc > 3 ? std::atoi(argv[3]) : -1;
  const Result<LaunchEnvironment> environment = read_launch_environment();
  if (!environment.ok()) {
    std::printf("failed: %s\n", environment.status().to_string().c_str());
    return 4;
  }
  if (mode == "absent" && environment.value().rank == chosen) return 0;
  const Status status = run(environment.value(), std::chrono::milliseconds(std::atoi(argv[1])), mode, chosen);
  if (status.ok()) return 0;
  std::printf("failed rank %d: %s\n", environment.value().rank, status.to_string().c_str());
  return 3;
}
