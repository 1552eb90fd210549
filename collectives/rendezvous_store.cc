#include "rendezvous_store.h"

#include <algorithm>

#include "store_directory.h"
#include "tcp_store.h"

namespace forebay::internal {
namespace {

Result<std::unique_ptr<RendezvousStore>> open_tcp(const RendezvousOptions& options) {
  Result<StoreAddress> address = parse_store_address(options.where);
  FOREBAY_RETURN_IF_ERROR(address.status());
  Result<std::string> secret = read_store_secret();
  FOREBAY_RETURN_IF_ERROR(secret.status());
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(options.limit - std::chrono::steady_clock::now());
  Result<std::unique_ptr<TcpStore>> store =
      TcpStore::open({.where = options.where,
                      .address = std::move(address).value(),
                      .secret = std::move(secret).value(),
                      .me = options.me,
                      .deadline = std::max(left, std::chrono::milliseconds(1))});
  FOREBAY_RETURN_IF_ERROR(store.status());
  return std::unique_ptr<RendezvousStore>(std::move(store).value());
}

}  // namespace

Result<std::unique_ptr<RendezvousStore>> open_rendezvous(const RendezvousOptions& options) {
  if (is_store_address(options.where)) return open_tcp(options);
  Result<std::unique_ptr<StoreDirectory>> directory = StoreDirectory::open(options.where);
  FOREBAY_RETURN_IF_ERROR(directory.status());
  return std::unique_ptr<RendezvousStore>(std::move(directory).value());
}

}  // namespace forebay::internal
