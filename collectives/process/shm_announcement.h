// How rank 0 of a shm communicator tells the others where its memory is, as a text of the rendezvous store.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "collectives/process/shm_segment.h"

namespace forebay::internal {

struct ShmAnnouncement {
  std::string host;  // As host_identity() gives it.
  ProcessIdentity owner;
  int descriptor = -1;
};

std::string encode(const ShmAnnouncement& announcement);
// Nothing for a text that encode() did not make.
std::optional<ShmAnnouncement> decode_shm_announcement(std::string_view text);

}  // namespace forebay::internal
