// The server of a TCP store: one thread that listens at one address, lets in who knows the secret, and keeps
// what ranks say in a StoreBook.
//
// Who has not proved that it knows the secret has a small fixed buffer and kAdmissionMax to do it, and there
// are at most kStrangersMax of them besides as many as there are ranks; one more and the oldest goes. So
// strangers can neither use up memory nor keep a rank out.
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
// A connection that the network broke, which a process that ends does not do by itself, may be made anew for
// so long. Smaller: a slow network's rank is lost. Larger: a host that fell over is found that much later
// here.
inline constexpr std::chrono::milliseconds kStoreReturnMax{1'000};

struct StoreServerOptions {
  std::string where;  // For messages.
  std::string secret;
  Greeting own;  // What rank 0 says.
};

class StoreServer {
 public:
  // Errors: kUnavailable when there can be no thread.
  static Result<std::unique_ptr<StoreServer>> start(Descriptor listener, StoreServerOptions options);
  // Ends at once.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  // Serves until all ranks that are here have said goodbye, at most `linger`; of a run that is over (it
  // failed, or somebody said why it does) at most two seconds, in which ranks that come late hear of it, and
  // half a second once all have come.
  void finish(std::chrono::milliseconds linger);

 private:
  class Loop;
  explicit StoreServer(std::unique_ptr<Loop> loop);

  const std::unique_ptr<Loop> loop_;
  std::thread thread_;
};

}  // namespace forebay::internal
