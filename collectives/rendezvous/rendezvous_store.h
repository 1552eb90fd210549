// RendezvousStore: small named texts that all ranks of a run see, for what must be known before there are
// connections, and after they broke. A text appears whole or not at all. Not for data, and not for anything
// that is asked often.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "forebay/status.h"

namespace forebay::internal {

// Who of the ranks is here.
struct Attendance {
  std::string generation;          // Not empty once all are here: a word that no other run has.
  std::vector<bool> came;          // By rank.
  std::vector<std::string> hosts;  // By rank, once all are here.
  std::string doubt;               // Who was not let in, to add to a message; may be empty.
};

// Threads: any, also at the same time.
class RendezvousStore {
 public:
  virtual ~RendezvousStore() = default;

  // What a user gave to name it: for messages.
  virtual const std::string& where() const noexcept = 0;
  // The address of this host at which the other ranks can reach it, where the store knows one; else empty.
  virtual std::string local_address() const { return {}; }

  // Replaces the text if there is one.
  virtual Status write(const std::string& name, std::string_view content) = 0;
  // Nothing when there is no such text or it cannot be read.
  virtual std::optional<std::string> read(const std::string& name) const = 0;
  // The content that is there after this call: ours when we were the first to give one, else the first one's.
  // Nothing when the store does not work.
  virtual std::optional<std::string> write_once(const std::string& name, std::string_view content) = 0;
  virtual void remove(const std::string& name) noexcept = 0;

  // As write(), of what is soon replaced by the next and may be lost: where a rank serves the store, nobody
  // waits for it, and it goes to all ranks that are here.
  virtual void post(const std::string& name, std::string_view content) noexcept {
    static_cast<void>(write(name, content));
  }
  // What was posted last under `name`, or written once, as far as it is known here without asking a rank.
  virtual std::optional<std::string> posted(const std::string& name) { return read(name); }
  // The rank that serves the store; -1: none.
  virtual int server_rank() const noexcept { return -1; }
  // Asks the rank that serves the store nothing more: `cause` becomes status(), unless there is one.
  virtual void abandon(const Status& cause) noexcept { static_cast<void>(cause); }
  // The run has failed. A rank that serves the store stays, when this is destroyed, no longer than `linger`
  // for ranks that do not leave: one may be stopped.
  virtual void stay_at_most(std::chrono::milliseconds linger) noexcept { static_cast<void>(linger); }

  // Whether texts can still be shared, as they can when the run has failed: false once the rank that serves
  // the store is gone or was given up.
  virtual bool answers() const { return true; }

  // Ok, or why the run has failed as far as the store knows. Who waits for a text asks this too.
  virtual Status status() const { return {}; }
  // Where the store lets in the ranks of one run only: who of them is here. A store that anybody may write to
  // cannot tell.
  virtual std::optional<Attendance> attendance() { return std::nullopt; }
  // Whether the store knows that this rank of the run has ended: what it has not written it will not write.
  virtual bool is_lost(int rank) {
    static_cast<void>(rank);
    return false;
  }
  // Where a store that anybody may write to can tell that a process of this host has ended: the word by which
  // it knows this one; else empty.
  virtual std::string presence() const { return {}; }
  // `rank` of this run has given its presence(): status() tells from now on when that process has ended.
  virtual void expect(int rank, const std::string& presence) {
    static_cast<void>(rank);
    static_cast<void>(presence);
  }
  // Tells the other ranks, where the store can, that this one gives up. Returns the first failure of all,
  // which is `cause` if nobody was faster.
  virtual Status fail(const Status& cause) noexcept { return cause; }
};

// One rank, as the others may compare it with themselves.
struct Participant {
  int rank = 0;
  int size = 1;
  std::string configuration;  // Must be the same text on every rank.
};

struct RendezvousOptions {
  std::string where;  // A directory, tcp://HOST:PORT[/JOB], or pmix://[JOB].
  Participant me;
  std::string
      interface;  // Name or address, where the store has to listen and was not told at which; may be empty.
  std::chrono::steady_clock::time_point limit;  // For opening it.
};

// Errors: those of StoreDirectory::open, of PmixSession or of TcpStore::open.
Result<std::unique_ptr<RendezvousStore>> open_rendezvous(const RendezvousOptions& options);

}  // namespace forebay::internal
