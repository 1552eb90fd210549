#include "rendezvous_store.h"

#include "store_directory.h"

namespace forebay::internal {

Result<std::unique_ptr<RendezvousStore>> open_rendezvous(const RendezvousOptions& options) {
  Result<std::unique_ptr<StoreDirectory>> directory = StoreDirectory::open(options.where);
  FOREBAY_RETURN_IF_ERROR(directory.status());
  return std::unique_ptr<RendezvousStore>(std::move(directory).value());
}

}  // namespace forebay::internal
