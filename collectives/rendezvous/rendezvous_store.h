// RendezvousStore: small named texts that all ranks of a run see. Ranks use it before they are connected, and
// after their connections broke. A text appears whole or not at all. It is not for data, nor for texts that
// are read often.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "forebay/process_communicator.h"
#include "forebay/status.h"

namespace forebay::internal {

// The ranks that have come.
struct Attendance {
  std::string generation;          // Empty until all ranks are here; then a word that no other run has.
  std::vector<bool> came;          // By rank.
  std::vector<std::string> hosts;  // By rank, once all ranks are here.
  std::string doubt;               // The connections that were refused, to add to a message; may be empty.
};

// Threads: any, also at the same time.
class RendezvousStore {
 public:
  virtual ~RendezvousStore() = default;

  // The name that the user gave, for messages.
  virtual const std::string& where() const noexcept = 0;
  // The address at which the other ranks can reach this host, if the store knows one; else empty.
  virtual std::string local_address() const { return {}; }
  // The secret that keeps others out; empty for a store that others cannot read.
  virtual std::string secret() const { return {}; }

  // Replaces the text if it is there already.
  virtual Status write(const std::string& name, std::string_view content) = 0;
  // Nothing when the text is not there or cannot be read.
  virtual std::optional<std::string> read(const std::string& name) = 0;
  // Writes the text unless it is there already. Returns the content after this call: ours, or that of the
  // rank that was first. Nothing when the store does not work.
  virtual std::optional<std::string> write_once(const std::string& name, std::string_view content) = 0;
  virtual void remove(const std::string& name) noexcept = 0;

  // As write(), for a text that the next one soon replaces and that may be lost. Where a rank serves the
  // store, this does not wait for it, and the text is sent to all ranks that are here.
  virtual void post(const std::string& name, std::string_view content) noexcept {
    static_cast<void>(write(name, content));
  }
  // The text last posted, or written once, under `name`, as far as it is known here without asking another
  // rank.
  virtual std::optional<std::string> posted(const std::string& name) { return read(name); }
  // The rank that serves the store, or -1.
  virtual int server_rank() const noexcept { return -1; }
  // Asks the rank that serves the store nothing more. `cause` becomes status(), unless there is an error
  // already.
  virtual void abandon(const Status& cause) noexcept { static_cast<void>(cause); }
  // The run has failed. A rank that serves the store then waits in the destructor at most `linger` for ranks
  // that do not leave, since one may be stopped.
  virtual void stay_at_most(std::chrono::milliseconds linger) noexcept { static_cast<void>(linger); }

  // Whether texts can still be shared. They can after a failure too, but not once the rank that serves the
  // store has ended or was given up.
  virtual bool answers() { return true; }

  // Ok, or the reason why the run has failed, as far as the store knows. A thread that waits for a text asks
  // this too.
  virtual Status status() { return {}; }
  // The ranks that are here, if the store lets in the ranks of one run only. Nothing for a store that anybody
  // may write to.
  virtual std::optional<Attendance> attendance() { return std::nullopt; }
  // Whether the store knows that this rank of the run has ended. Such a rank writes no more texts.
  virtual bool is_lost(int rank) {
    static_cast<void>(rank);
    return false;
  }
  // The word by which the store knows this process, if it can tell that a process of this host has ended;
  // else empty.
  virtual std::string presence() const { return {}; }
  // `rank` of this run has given its presence(). From now on status() tells when that process has ended.
  virtual void expect(int rank, const std::string& presence) {
    static_cast<void>(rank);
    static_cast<void>(presence);
  }
  // Tells the other ranks, if the store can, that this one gives up. Returns the first failure of all ranks,
  // which is `cause` unless a rank failed before.
  virtual Status fail(const Status& cause) noexcept { return cause; }
};

// One rank: the facts that the others compare with their own.
struct Participant {
  int rank = 0;
  int size = 1;
  std::string configuration;  // Must be the same text on every rank.
};

struct RendezvousOptions {
  std::string where;                       // A directory, tcp://HOST:PORT[/JOB], or pmix://[JOB].
  std::shared_ptr<RendezvousTexts> texts;  // The caller's store, in place of `where`; may be null.
  Participant me;
  std::string interface;  // Name or address, for a store that has to choose where to listen; may be empty.
  std::chrono::steady_clock::time_point limit;  // For opening the store.
};

// Errors: kUnsupported without random numbers; those of StoreDirectory::open, of PmixSession or of
// TcpStore::open.
Result<std::unique_ptr<RendezvousStore>> open_rendezvous(const RendezvousOptions& options);

}  // namespace forebay::internal
