// RendezvousStore: small named texts that all ranks of a run see, for what must be known before there are
// connections, and after they broke. A text appears whole or not at all. Not for data, and not for anything
// that is asked often.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "forebay/status.h"

namespace forebay::internal {

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

  // Ok, or why this store will not work again. Who waits for a text asks this too.
  virtual Status status() const { return {}; }
};

// One rank, as the others may compare it with themselves.
struct Participant {
  int rank = 0;
  int size = 1;
  std::string configuration;  // Must be the same text on every rank.
};

struct RendezvousOptions {
  std::string where;  // A directory.
  Participant me;
  std::string
      interface;  // Name or address, where the store has to listen and was not told at which; may be empty.
  std::chrono::steady_clock::time_point limit;  // For opening it.
};

// Errors: those of StoreDirectory::open.
Result<std::unique_ptr<RendezvousStore>> open_rendezvous(const RendezvousOptions& options);

}  // namespace forebay::internal
