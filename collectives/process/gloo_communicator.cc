// How ranks come to a mesh, and the communicator over it.
#include "forebay/gloo_communicator.h"

#include <string>
#include <utility>

#include "collectives/process/gloo_mesh.h"
#include "collectives/process/joining.h"
#include "collectives/rendezvous/store_address.h"
#include "collectives/rendezvous/wait_monitor.h"

namespace forebay {
namespace {

using internal::GlooMesh;
using internal::Membership;
using internal::Transport;
using internal::WaitMonitor;

// The numeric address of an interface or address; `interface` is empty for the loopback interface. Gloo gets
// no names, because that of Debian 12 reads an uninitialised pointer when a name has no address.
Result<std::string> address_to_listen_at(const std::string& interface) {
  const std::string wanted = interface.empty() ? "127.0.0.1" : interface;
  std::string address = internal::listening_address(wanted);
  if (address == "0.0.0.0" || address == "::") {
    return invalid_argument("cannot listen on \"", wanted,
                            "\": that stands for all addresses of this host; set FOREBAY_INTERFACE, or the "
                            "interface of the options, to the one that the hosts share");
  }
  if (!address.empty()) return address;
  return invalid_argument(
      "cannot listen on \"", wanted,
      "\": no interface or address of this host has that name; set FOREBAY_INTERFACE, or the "
      "interface of the options, to one of this host");
}

Result<std::shared_ptr<gloo::transport::tcp::Device>> create_device(const std::string& address) {
  try {
    return internal::create_gloo_device(address);
  } catch (const std::exception& error) {
    return Status(StatusCode::kUnavailable, "cannot start Gloo's thread: ", error.what(),
                  "; raise ulimit -u, -n or -v");
  }
}

}  // namespace

Result<std::shared_ptr<Transport>> internal::connect_gloo(const Joining& joining) {
  if (joining.interface.empty() && !joining.meeting.one_host) {
    const Meeting& meeting = joining.meeting;
    return invalid_argument(
        "ranks are on several hosts (rank 0 on ", meeting.first_host, ", rank ", meeting.other_host_rank,
        " on ", meeting.other_host,
        ") and the default is to listen on the loopback address only; give the address or interface "
        "that the hosts share");
  }
  FOREBAY_ASSIGN_OR_RETURN(std::string address, address_to_listen_at(joining.interface));
  FOREBAY_ASSIGN_OR_RETURN(std::shared_ptr<gloo::transport::tcp::Device> device, create_device(address));
  auto monitor = std::make_shared<WaitMonitor>(joining.membership.rank, joining.membership.deadline,
                                               joining.store, joining.name("wait."));
  FOREBAY_RETURN_IF_ERROR(monitor->start());
  auto mesh = std::make_shared<GlooMesh>(joining.membership, joining.store, device, std::move(address),
                                         std::move(monitor));
  FOREBAY_RETURN_IF_ERROR(mesh->connect(joining.limit));
  return mesh;
}

bool gloo_available() noexcept {
  return true;
}

Result<std::unique_ptr<Communicator>> create_gloo_communicator(const GlooOptions& options, Backend& backend) {
  if (!options.interface.empty()) FOREBAY_RETURN_IF_ERROR(address_to_listen_at(options.interface).status());
  if (options.size > 1) return internal::create_over("gloo", internal::connect_gloo, options, backend);
  FOREBAY_ASSIGN_OR_RETURN(
      Membership membership,
      internal::check_membership("gloo", options.rank, options.size, options.deadline, backend));
  return internal::create_process_communicator(
      std::make_shared<GlooMesh>(std::move(membership), nullptr, nullptr, std::string(), nullptr), backend);
}

}  // namespace forebay
