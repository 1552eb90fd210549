// StoreServer: the server of a TCP store. One thread listens at one address, lets in ranks that know the
// secret, and keeps their texts in a StoreBook. A connection that has not yet proved that it knows the secret
// has a small fixed buffer and kAdmissionMax to do it. There are at most kStrangersMax of these, besides as
// many as there are ranks; for one more the oldest is closed. So strangers can neither use up memory nor keep
// a rank out.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "collectives/rendezvous/store_address.h"
#include "collectives/rendezvous/store_book.h"
#include "forebay/status.h"

namespace forebay::internal {

inline constexpr int kTcpStoreRanksMax = 4096;
inline constexpr std::chrono::milliseconds kAdmissionMax{2'000};
inline constexpr std::size_t kStrangersMax = 16;
// How long a rank may come back after the network broke its connection. (The end of a process closes it in
// order.) Smaller: a rank on a slow network is lost. Larger: a host that crashed is found later.
inline constexpr std::chrono::milliseconds kStoreReturnMax{1'000};

struct StoreServerOptions {
  std::string where;  // For messages.
  std::string secret;
  Greeting own;  // The greeting of rank 0.
};

class StoreServer {
 public:
  // Errors: kUnavailable when no thread can be started.
  static Result<std::unique_ptr<StoreServer>> start(Descriptor listener, StoreServerOptions options);
  // Ends at once.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  // Serves until all ranks that are here have said goodbye, at most `linger`. If the run has failed, it
  // serves at most two seconds, in which ranks that come late are told, and half a second once all have come.
  void finish(std::chrono::milliseconds linger);

 private:
  class Loop;
  explicit StoreServer(std::unique_ptr<Loop> loop);

  const std::unique_ptr<Loop> loop_;
  std::thread thread_;
};

}  // namespace forebay::internal
