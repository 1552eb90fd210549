#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "forebay/check.h"
#include "runtime/command/simulate/machine.h"

namespace {

void check_message(const forebay::Status& status) {
  FOREBAY_CHECK(status.message().size() < 1000, "a message of %zu bytes", status.message().size());
  for (const char letter : status.message())
    FOREBAY_CHECK(static_cast<unsigned char>(letter) >= 0x20 && letter != 0x7f, "byte %d in a message",
                  letter);
}

}  // namespace

// Descriptions of clusters and devices, as simulate and compare read them.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto device = forebay::parse_device("mine.json", text); !device.ok())
    check_message(device.status());
  const auto cluster = forebay::parse_cluster("mine.json", text);
  if (!cluster.ok()) {
    check_message(cluster.status());
    return 0;
  }
  FOREBAY_CHECK(cluster.value().host_ranks > 0 && !cluster.value().links.empty(), "a cluster of nothing");
  FOREBAY_CHECK(std::isfinite(cluster.value().host_bytes_per_second), "an endless rate");
  const double part = forebay::matrix_efficiency(cluster.value().device, 64, 64, 64);
  FOREBAY_CHECK(part >= 0 && part <= 1, "an efficiency of %g", part);
  return 0;
}
