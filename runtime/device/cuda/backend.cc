#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "forebay/cuda_backend.h"
#include "forebay/host_room.h"
#include "forebay/log.h"
#include "forebay/units.h"
#include "runtime/device/address_book.h"
#include "runtime/device/address_text.h"
#include "runtime/device/backend_checks.h"
#include "runtime/device/cuda/device.h"
#include "runtime/device/cuda/driver.h"
#include "runtime/device/cuda/host_calls.h"
#include "runtime/device/cuda/image_version.h"
#include "runtime/device/cuda/order_book.h"
#include "runtime/device/cuda/scope.h"

namespace forebay {
namespace {

using cuda::CuResult;
using StreamKind = CudaOrderBook::StreamKind;

// Blocks of alloc are charged in multiples of their alignment.
constexpr std::size_t kBlockAlignment = 512;

cuda::CuDevicePtr device_address(const void* pointer) noexcept {
  return static_cast<cuda::CuDevicePtr>(reinterpret_cast<std::uintptr_t>(pointer));
}
DevicePtr device_pointer(cuda::CuDevicePtr address) noexcept {
  return reinterpret_cast<DevicePtr>(static_cast<std::uintptr_t>(address));
}
cuda::CuStream native(Stream stream) noexcept {
  return static_cast<cuda::CuStream>(stream.handle);
}
cuda::CuEvent native(Event event) noexcept {
  return static_cast<cuda::CuEvent>(event.handle);
}
cuda::CuModule native(Module module) noexcept {
  return static_cast<cuda::CuModule>(module.handle);
}
cuda::CuFunction native(Kernel kernel) noexcept {
  return static_cast<cuda::CuFunction>(kernel.handle);
}

bool is_binary_image(const void* image, std::size_t bytes) noexcept {
  static constexpr unsigned char kElf[] = {0x7F, 'E', 'L', 'F'};
  static constexpr unsigned char kFatbin[] = {0x50, 0xED, 0x55, 0xBA};
  return bytes >= sizeof(kElf) &&
         (std::memcmp(image, kElf, sizeof(kElf)) == 0 || std::memcmp(image, kFatbin, sizeof(kFatbin)) == 0);
}

// Lower than the lowest number of any device: the driver takes its highest priority for it.
constexpr int kUrgent = -1000;
// The part of a small device that is kept for the driver, at most.
constexpr std::size_t kRoomDivisor = 8;

// Requested properties of chunks. A failed trial drops some.
struct ChunkKind {
  bool posix_fd = false;
  bool rdma = false;

  friend bool operator==(const ChunkKind&, const ChunkKind&) = default;
};

class CudaBackendImpl final : public CudaBackend {
 public:
  CudaBackendImpl(const CudaDriver& driver, const CudaDevice& device, const CudaBackendOptions& options,
                  ChunkKind kind)
      : driver_(driver),
        ordinal_(device.ordinal),
        peer_ordinals_(device.peer_ordinals),
        kind_(kind),
        room_bytes_(std::min(options.room_bytes, device.memory_bytes / kRoomDivisor)),
        opens_to_peers_(options.open_to_peers),
        properties_(cuda_chunk_properties(device.ordinal, kind.posix_fd, kind.rdma)),
        allowed_bytes_(device.granularity),
        addresses_({.name = "cuda:" + std::to_string(device.ordinal) + " " + device.name,
                    .granularity = device.granularity,
                    .budget_bytes = options.memory_bytes == 0 ? SIZE_MAX : options.memory_bytes}),
        order_(CudaOrderBook::of_process()),
        host_calls_(driver) {
    std::snprintf(capabilities_.name, sizeof(capabilities_.name), "cuda:%d %s", device.ordinal,
                  device.name.c_str());
    capabilities_.kind = BackendKind::kCuda;
    capabilities_.granularity = device.granularity;
    capabilities_.memory_bytes = device.memory_bytes - room_bytes_;
    if (options.memory_bytes != 0)
      capabilities_.memory_bytes = std::min(capabilities_.memory_bytes, options.memory_bytes);
    capabilities_.numa_node = device.numa_node;
    capabilities_.multiprocessor_count = device.multiprocessor_count;
    add_access(ordinal_);
  }

  ~CudaBackendImpl() override {
    if (context_ == nullptr || cuda_lost_in_fork()) return;
    {
      const std::lock_guard lock(all_mutex());
      std::erase(all(), this);
    }
    const std::size_t leaked = live_handle_count();
    give_everything_back();
    if (leaked == 0) return;
    // A refusal to give back in a destructor has no caller to report to.
    if (!refusal_.ok()) {
      log(LogLevel::kWarning, "%s: %zu handles were not given back before the backend ended: %s",
          capabilities_.name, leaked, refusal_.message().c_str());
    } else {
      log(LogLevel::kDebug, "%s: %zu handles were not given back before the backend ended",
          capabilities_.name, leaked);
    }
  }

  // Both once, in this order, before anything else. After a failure the object is destroyed, which undoes
  // them.
  Status retain_context() {
    const auto what = [] { return std::string("make a backend"); };
    FOREBAY_RETURN_IF_ERROR(check(driver_.cuDeviceGet(&device_, ordinal_), "cuDeviceGet", what));
    cuda::CuContext context = nullptr;
    FOREBAY_RETURN_IF_ERROR(
        check(driver_.cuDevicePrimaryCtxRetain(&context, device_), "cuDevicePrimaryCtxRetain", what));
    context_ = context;
    return {};
  }
  // One chunk of the kind, through all that chunks go through.
  Status try_chunk() {
    const std::size_t bytes = capabilities_.granularity;
    FOREBAY_ASSIGN_OR_RETURN(const DevicePtr base, reserve(bytes, 0));
    FOREBAY_ASSIGN_OR_RETURN(const Chunk chunk, chunk_create(bytes));
    FOREBAY_RETURN_IF_ERROR(map(base, chunk));
    FOREBAY_RETURN_IF_ERROR(set_access(base, bytes));
    FOREBAY_RETURN_IF_ERROR(unmap(base, bytes));
    FOREBAY_RETURN_IF_ERROR(chunk_destroy(chunk));
    return release(base, bytes);
  }

  // Makes this one known to the other backends of this process.
  void meet_peers() {
    const std::lock_guard lock(all_mutex());
    for (CudaBackendImpl* const other : all()) {
      if (!opens_to_peers_ || !other->opens_to_peers_ || other->ordinal_ == ordinal_) continue;
      for (const Status& opened : {open_to_peer(other->ordinal_), other->open_to_peer(ordinal_)}) {
        if (!opened.ok()) log(LogLevel::kInfo, "%s", opened.message().c_str());
      }
    }
    all().push_back(this);
  }

  // --- CudaBackend ---

  bool chunks_have_posix_fd() const noexcept override { return kind_.posix_fd; }
  bool chunks_have_rdma() const noexcept override { return kind_.rdma; }
  int peer_count() const noexcept override { return static_cast<int>(peer_ordinals_.size()); }
  Status open_to_peer(int ordinal) override {
    const auto what = [=] { return "give cuda:" + std::to_string(ordinal) + " access"; };
    FOREBAY_RETURN_IF_ERROR(enter("open_to_peer", what));
    const std::lock_guard lock(mapping_mutex_);
    const auto is_it = [=](const cuda::CuMemAccessDesc& open) { return open.location.id == ordinal; };
    if (std::any_of(access_.begin(), access_.end(), is_it)) return {};
    if (std::find(peer_ordinals_.begin(), peer_ordinals_.end(), ordinal) == peer_ordinals_.end()) {
      return {StatusCode::kUnsupported,
              "cannot " + what() + " to " + capabilities_.name +
                  ": it cannot reach this device (nvidia-smi topo -p2p r); copy through host memory"};
    }
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    add_access(ordinal);
    for (const auto& [address, bytes] : addresses_.left().mappings) {
      if (!addresses_.mapping_at(address).accessible) continue;
      const Status given = give_access(address, bytes, what);
      if (given.ok()) continue;
      access_.pop_back();
      return given;
    }
    return {};
  }
  Status call_in_context(HostFunction function, void* argument) override {
    const auto what = [] { return std::string("call a function in the context"); };
    FOREBAY_RETURN_IF_ERROR(enter("call_in_context", what));
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    function(argument);
    return {};
  }
  std::size_t charged_bytes() const override { return addresses_.charged_bytes(); }
  std::size_t live_handle_count() const override {
    const std::lock_guard lock(handles_mutex_);
    return addresses_.live_count() + order_.live_count(this) + modules_.size();
  }

  // --- Backend ---

  const Capabilities& capabilities() const noexcept override { return capabilities_; }

  Result<DevicePtr> reserve(std::size_t bytes, std::size_t alignment) override {
    const auto what = [bytes] { return "reserve " + format_bytes(bytes) + " of addresses"; };
    FOREBAY_RETURN_IF_ERROR(enter("reserve", what));
    FOREBAY_RETURN_IF_ERROR(addresses_.check_reserve(bytes, alignment));
    alignment = std::max(alignment, capabilities_.granularity);
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    cuda::CuDevicePtr address = 0;
    FOREBAY_RETURN_IF_ERROR(
        check(driver_.cuMemAddressReserve(&address, bytes, alignment, 0, 0), "cuMemAddressReserve", what));
    addresses_.add_reservation(device_pointer(address), bytes);
    return device_pointer(address);
  }
  Status release(DevicePtr base, std::size_t bytes) override {
    const auto what = [=] { return "release " + range_text(base, bytes); };
    FOREBAY_RETURN_IF_ERROR(enter("release", what));
    const std::lock_guard lock(mapping_mutex_);
    FOREBAY_RETURN_IF_ERROR(addresses_.check_release(base, bytes));
    const CudaScope scope(driver_, context_, has_reported_state_);
    if (scope.result() == CuResult::kDeinitialized) return {};
    FOREBAY_RETURN_IF_ERROR(check_given_back(scope, what));
    // Out of the book first: once the driver has it, another thread may be given the same address.
    addresses_.remove_reservation(base);
    const Status status =
        check_given_back(driver_.cuMemAddressFree(device_address(base), bytes), "cuMemAddressFree", what);
    if (!status.ok()) addresses_.add_reservation(base, bytes);
    return status;
  }
  Result<Chunk> chunk_create(std::size_t bytes) override {
    const auto what = [bytes] { return "create a chunk of " + format_bytes(bytes); };
    FOREBAY_RETURN_IF_ERROR(enter("chunk_create", what));
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    FOREBAY_RETURN_IF_ERROR(check_room(bytes, what));
    FOREBAY_RETURN_IF_ERROR(addresses_.charge_chunk(bytes));
    cuda::CuMemHandle handle = 0;
    const CuResult result = driver_.cuMemCreate(&handle, bytes, &properties_, 0);
    if (result != CuResult::kSuccess) {
      addresses_.refund(bytes);
      return check_allocated(result, "cuMemCreate", what);
    }
    return addresses_.add_chunk(handle, bytes);
  }
  Status chunk_destroy(Chunk chunk) override {
    const auto what = [] { return std::string("destroy a chunk"); };
    FOREBAY_RETURN_IF_ERROR(enter("chunk_destroy", what));
    const std::lock_guard lock(mapping_mutex_);
    FOREBAY_ASSIGN_OR_RETURN(const AddressBook::ChunkFacts facts, addresses_.check_destroy(chunk));
    const CudaScope scope(driver_, context_, has_reported_state_);
    if (scope.result() == CuResult::kDeinitialized) return {};
    FOREBAY_RETURN_IF_ERROR(check_given_back(scope, what));
    FOREBAY_RETURN_IF_ERROR(check_given_back(driver_.cuMemRelease(facts.resource), "cuMemRelease", what));
    addresses_.remove_chunk(chunk);
    return {};
  }
  Status map(DevicePtr address, Chunk chunk) override {
    const auto what = [=] { return "map a chunk at " + hex(numeric(address)); };
    FOREBAY_RETURN_IF_ERROR(enter("map", what));
    const std::lock_guard lock(mapping_mutex_);
    FOREBAY_ASSIGN_OR_RETURN(const AddressBook::ChunkFacts facts, addresses_.check_map(address, chunk));
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    FOREBAY_RETURN_IF_ERROR(check(
        driver_.cuMemMap(device_address(address), facts.bytes, 0, facts.resource, 0), "cuMemMap", what));
    addresses_.add_mapping(address, chunk);
    return {};
  }
  Status unmap(DevicePtr address, std::size_t bytes) override {
    const auto what = [=] { return "unmap " + range_text(address, bytes); };
    FOREBAY_RETURN_IF_ERROR(enter("unmap", what));
    const std::lock_guard lock(mapping_mutex_);
    FOREBAY_RETURN_IF_ERROR(addresses_.check_mappings(address, bytes, "unmap"));
    const CudaScope scope(driver_, context_, has_reported_state_);
    if (scope.result() == CuResult::kDeinitialized) return {};
    FOREBAY_RETURN_IF_ERROR(check_given_back(scope, what));
    const CuResult result = driver_.cuMemUnmap(device_address(address), bytes);
    // Drivers are not bound to take several mappings at once; one at a time is always right.
    if (result == CuResult::kInvalidValue && addresses_.mapping_at(address).bytes < bytes) {
      return unmap_mappings(address, bytes);
    }
    FOREBAY_RETURN_IF_ERROR(check_given_back(result, "cuMemUnmap", what));
    addresses_.remove_mappings(address, bytes);
    return {};
  }
  Status set_access(DevicePtr address, std::size_t bytes) override {
    const auto what = [=] { return "set access to " + range_text(address, bytes); };
    FOREBAY_RETURN_IF_ERROR(enter("set_access", what));
    const std::lock_guard lock(mapping_mutex_);
    FOREBAY_RETURN_IF_ERROR(addresses_.check_mappings(address, bytes, "set access to"));
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    FOREBAY_RETURN_IF_ERROR(give_access(address, bytes, what));
    addresses_.set_accessible(address, bytes);
    return {};
  }

  Result<DevicePtr> alloc(std::size_t bytes) override {
    const auto what = [bytes] { return "allocate " + format_bytes(bytes); };
    FOREBAY_RETURN_IF_ERROR(enter("alloc", what));
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    FOREBAY_ASSIGN_OR_RETURN(const std::size_t charged, addresses_.charge_block(bytes, kBlockAlignment));
    cuda::CuDevicePtr address = 0;
    const CuResult result = driver_.cuMemAlloc_v2(&address, charged);
    if (result != CuResult::kSuccess) {
      addresses_.refund(charged);
      return check_allocated(result, "cuMemAlloc", what);
    }
    addresses_.add_block(device_pointer(address), {.bytes = charged});
    return device_pointer(address);
  }
  Status free(DevicePtr address) override {
    const auto what = [=] { return "free " + hex(numeric(address)); };
    FOREBAY_RETURN_IF_ERROR(enter("free", what));
    const CudaScope scope(driver_, context_, has_reported_state_);
    if (scope.result() == CuResult::kDeinitialized) return {};
    FOREBAY_RETURN_IF_ERROR(check_given_back(scope, what));
    // Out of the book first: once the driver has it, another thread may be given the same address.
    FOREBAY_ASSIGN_OR_RETURN(const AddressBook::BlockFacts block, addresses_.remove_block(address));
    const Status status = check_given_back(driver_.cuMemFree_v2(device_address(address)), "cuMemFree", what);
    if (status.ok()) {
      addresses_.refund(block.bytes);
    } else {
      addresses_.add_block(address, block);
    }
    return status;
  }
  Status pin(void* address, std::size_t bytes) override {
    const auto what = [=] { return "pin " + range_text(address, bytes); };
    FOREBAY_RETURN_IF_ERROR(enter("pin", what));
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    // Into the book first, so that two threads cannot both pin a page. Pinning gigabytes takes seconds, in
    // which no mutex is held.
    FOREBAY_RETURN_IF_ERROR(addresses_.add_pinned(address, bytes));
    const Status status = check(driver_.cuMemHostRegister_v2(address, bytes, cuda::kHostRegisterPortable),
                                "cuMemHostRegister", what);
    if (!status.ok()) static_cast<void>(addresses_.remove_pinned(address));
    return status;
  }
  Status unpin(void* address) override {
    const auto what = [=] { return "unpin " + hex(numeric(address)); };
    FOREBAY_RETURN_IF_ERROR(enter("unpin", what));
    const CudaScope scope(driver_, context_, has_reported_state_);
    if (scope.result() == CuResult::kDeinitialized) return {};
    FOREBAY_RETURN_IF_ERROR(check_given_back(scope, what));
    FOREBAY_ASSIGN_OR_RETURN(const std::size_t bytes, addresses_.remove_pinned(address));
    const Status status = check_given_back(driver_.cuMemHostUnregister(address), "cuMemHostUnregister", what);
    if (!status.ok()) static_cast<void>(addresses_.add_pinned(address, bytes));
    return status;
  }
  MemoryInfo memory_info() override {
    const auto what = [] { return std::string("read the free memory"); };
    MemoryInfo info{.free_bytes = 0, .total_bytes = capabilities_.memory_bytes};
    // Without an answer nothing is free as far as anybody knows. A host function's stream tells of its
    // defect.
    if (!enter("memory_info", what).ok()) return info;
    const CudaScope scope(driver_, context_, has_reported_state_);
    Status status = check(scope, what);
    std::size_t total_bytes = 0;
    if (status.ok()) {
      status = check(driver_.cuMemGetInfo_v2(&info.free_bytes, &total_bytes), "cuMemGetInfo", what);
    }
    if (!status.ok()) {
      info.free_bytes = 0;
      if (!has_reported_memory_info_.exchange(true, std::memory_order_relaxed)) {
        log(LogLevel::kWarning, "%s; said once", status.message().c_str());
      }
      return info;
    }
    const auto less = [](std::size_t bytes, std::size_t taken) { return bytes - std::min(bytes, taken); };
    info.free_bytes = less(info.free_bytes, room_bytes_);
    if (addresses_.budget_bytes() != SIZE_MAX)
      info.free_bytes = std::min(info.free_bytes, less(info.total_bytes, addresses_.charged_bytes()));
    return info;
  }

  Status copy_async(void* target, const void* source, std::size_t bytes, Stream stream) override {
    const auto what = [=] { return "copy " + range_text(source, bytes) + " to " + hex(numeric(target)); };
    FOREBAY_RETURN_IF_ERROR(enter("copy_async", what));
    FOREBAY_RETURN_IF_ERROR(check_stream(stream, what));
    if (bytes == 0) return {};
    FOREBAY_RETURN_IF_ERROR(addresses_.check_usable(target, bytes, "copy to"));
    FOREBAY_RETURN_IF_ERROR(addresses_.check_usable(source, bytes, "copy from"));
    if (overlap(target, source, bytes)) return refused(what, kOverlap);
    FOREBAY_RETURN_IF_ERROR(open_to_this(target));
    FOREBAY_RETURN_IF_ERROR(open_to_this(source));
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    return check(driver_.cuMemcpyAsync(device_address(target), device_address(source), bytes, native(stream)),
                 "cuMemcpyAsync", what);
  }
  Status fill_async(DevicePtr target, std::uint8_t value, std::size_t bytes, Stream stream) override {
    const auto what = [=] { return "fill " + range_text(target, bytes); };
    FOREBAY_RETURN_IF_ERROR(enter("fill_async", what));
    FOREBAY_RETURN_IF_ERROR(check_stream(stream, what));
    if (bytes == 0) return {};
    FOREBAY_RETURN_IF_ERROR(addresses_.check_usable(target, bytes, "fill"));
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    return check(driver_.cuMemsetD8Async(device_address(target), value, bytes, native(stream)),
                 "cuMemsetD8Async", what);
  }

  Result<Stream> stream_create() override { return create_stream(false); }
  Result<Stream> urgent_stream_create() override { return create_stream(true); }
  Status stream_destroy(Stream stream) override {
    const auto what = [] { return std::string("destroy a stream"); };
    FOREBAY_RETURN_IF_ERROR(enter("stream_destroy", what));
    FOREBAY_RETURN_IF_ERROR(check_stream(stream, what));
    if (!order_.is_owner(native(stream), this)) {
      return refused(what, "this backend did not make it; let its owner destroy it");
    }
    const CudaScope scope(driver_, context_, has_reported_state_);
    if (scope.result() == CuResult::kDeinitialized) return {};
    FOREBAY_RETURN_IF_ERROR(check_given_back(scope, what));
    bool is_capturing = false;
    const char* call = "cuStreamIsCapturing";
    CuResult result = ask_capturing(stream, &is_capturing);
    if (is_capturing) return captured(what);
    if (result == CuResult::kSuccess) {
      call = "cuStreamSynchronize";
      result = driver_.cuStreamSynchronize(native(stream));
    }
    if (is_context_lost(result)) {
      // There is nothing to wait for, and nothing to use again. Waiting for the work reports its failure.
      host_calls_.forget(native(stream));
      order_.forget_stream(native(stream));
      static_cast<void>(driver_.cuStreamDestroy_v2(native(stream)));
      return {};
    }
    FOREBAY_RETURN_IF_ERROR(check_given_back(result, call, what));
    if (order_.park_stream(native(stream))) return {};
    host_calls_.forget(native(stream));
    return check_given_back(driver_.cuStreamDestroy_v2(native(stream)), "cuStreamDestroy", what);
  }
  Status stream_synchronize(Stream stream) override {
    const auto what = [] { return std::string("synchronize a stream"); };
    FOREBAY_RETURN_IF_ERROR(enter("stream_synchronize", what));
    FOREBAY_RETURN_IF_ERROR(check_stream(stream, what));
    {
      const CudaScope scope(driver_, context_, has_reported_state_);
      FOREBAY_RETURN_IF_ERROR(check(scope, what));
      FOREBAY_RETURN_IF_ERROR(check_not_capturing(stream, what));
      const CuResult result = driver_.cuStreamSynchronize(native(stream));
      if (result != CuResult::kSuccess) host_calls_.wait_for_begun(native(stream));
      FOREBAY_RETURN_IF_ERROR(check(result, "cuStreamSynchronize", what));
    }
    return order_.failure(native(stream));
  }
  Result<Event> event_create() override { return create_event(cuda::kEventDisableTiming); }
  Result<Event> timed_event_create() override { return create_event(0); }
  Status event_destroy(Event event) override {
    const auto what = [] { return std::string("destroy an event"); };
    FOREBAY_RETURN_IF_ERROR(enter("event_destroy", what));
    FOREBAY_RETURN_IF_ERROR(check_event(event, what));
    const CudaScope scope(driver_, context_, has_reported_state_);
    if (scope.result() == CuResult::kDeinitialized) return {};
    FOREBAY_RETURN_IF_ERROR(check_given_back(scope, what));
    // Out of the book first: once the driver has it, another thread may be given the same handle.
    order_.remove_event(native(event));
    const Status status = check_given_back(driver_.cuEventDestroy_v2(native(event)), "cuEventDestroy", what);
    if (!status.ok()) order_.add_event(native(event), this);
    return status;
  }
  Status event_record(Event event, Stream stream) override {
    const auto what = [] { return std::string("record an event"); };
    FOREBAY_RETURN_IF_ERROR(enter("event_record", what));
    FOREBAY_RETURN_IF_ERROR(check_event(event, what));
    FOREBAY_RETURN_IF_ERROR(check_stream(stream, what));
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    FOREBAY_RETURN_IF_ERROR(check_not_capturing(stream, what));
    FOREBAY_RETURN_IF_ERROR(
        check(driver_.cuEventRecord(native(event), native(stream)), "cuEventRecord", what));
    // A capture that another thread began meanwhile may have taken the event, and a query would end it.
    FOREBAY_RETURN_IF_ERROR(check_not_capturing(stream, what));
    order_.record(native(event), native(stream));
    return {};
  }
  Result<bool> event_query(Event event) override {
    const auto what = [] { return std::string("query an event"); };
    FOREBAY_RETURN_IF_ERROR(enter("event_query", what));
    FOREBAY_RETURN_IF_ERROR(check_event(event, what));
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    const CuResult result = driver_.cuEventQuery(native(event));
    if (result == CuResult::kNotReady) return false;
    FOREBAY_RETURN_IF_ERROR(check(result, "cuEventQuery", what));
    return true;
  }
  Status event_synchronize(Event event) override {
    const auto what = [] { return std::string("synchronize an event"); };
    FOREBAY_RETURN_IF_ERROR(enter("event_synchronize", what));
    FOREBAY_RETURN_IF_ERROR(check_event(event, what));
    {
      const CudaScope scope(driver_, context_, has_reported_state_);
      FOREBAY_RETURN_IF_ERROR(check(scope, what));
      FOREBAY_RETURN_IF_ERROR(check(driver_.cuEventSynchronize(native(event)), "cuEventSynchronize", what));
    }
    return order_.failure(native(event));
  }
  Result<std::chrono::nanoseconds> elapsed(Event begin, Event end) override {
    const auto what = [] { return std::string("read a time"); };
    FOREBAY_RETURN_IF_ERROR(enter("elapsed", what));
    FOREBAY_RETURN_IF_ERROR(check_event(begin, what));
    FOREBAY_RETURN_IF_ERROR(check_event(end, what));
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    float milliseconds = 0;
    const CuResult result = driver_.cuEventElapsedTime(&milliseconds, native(begin), native(end));
    if (result == CuResult::kInvalidHandle) return refused(what, kNotRecorded);
    if (result == CuResult::kNotReady)
      return Status(StatusCode::kUnavailable, "cannot read a time on ", capabilities_.name, kNotReached);
    FOREBAY_RETURN_IF_ERROR(check(result, "cuEventElapsedTime", what));
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::duration<double, std::milli>(milliseconds));
  }
  Status stream_wait(Stream stream, Event event) override {
    const auto what = [] { return std::string("wait for an event"); };
    FOREBAY_RETURN_IF_ERROR(enter("stream_wait", what));
    FOREBAY_RETURN_IF_ERROR(check_event(event, what));
    FOREBAY_RETURN_IF_ERROR(check_stream(stream, what));
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    FOREBAY_RETURN_IF_ERROR(check_not_capturing(stream, what));
    return check(driver_.cuStreamWaitEvent(native(stream), native(event), 0), "cuStreamWaitEvent", what);
  }
  Status call_host(Stream stream, HostFunction function, void* argument) override {
    const auto what = [] { return std::string("call a host function"); };
    FOREBAY_RETURN_IF_ERROR(enter("call_host", what));
    FOREBAY_RETURN_IF_ERROR(check_stream(stream, what));
    if (function == nullptr) return refused(what, "it is null; give one");
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    // A graph would call it as often as it is launched.
    FOREBAY_RETURN_IF_ERROR(check_not_capturing(stream, what));
    const bool is_foreign = !order_.is_owner(native(stream), this);
    const CudaHostCalls::Answer queued =
        host_calls_.queue(native(stream), is_foreign, order_.state(native(stream)), function, argument);
    if (const CudaHostCalls::Answer refusal = host_calls_.take_refusal();
        refusal.result != CuResult::kSuccess) {
      log(refusal.result == CuResult::kNotSupported ? LogLevel::kInfo : LogLevel::kWarning,
          "%s: host functions run on the driver's thread, where one may hold others back: %s",
          capabilities_.name,
          cuda_failure(driver_, refusal.result, refusal.call, "let a stream wait for a value")
              .message()
              .c_str());
    }
    return check(queued.result, queued.call, what);
  }

  Result<Module> load_module(const ModuleImage& image) override {
    const auto what = [] { return std::string("load a module"); };
    FOREBAY_RETURN_IF_ERROR(enter("load_module", what));
    if (image.image == nullptr || image.image_bytes == 0) {
      if (image.host_kernels == nullptr)
        return refused(what, "the image is empty; give a cubin, fatbin or PTX");
      return Status(StatusCode::kUnsupported,
                    "cannot load a module on " + std::string(capabilities_.name) +
                        ": the image is for the host backend; give a cubin, fatbin or PTX image");
    }
    // The driver reads PTX, which is text, up to a zero byte.
    std::string text;
    const void* data = image.image;
    if (!is_binary_image(data, image.image_bytes)) {
      text.assign(static_cast<const char*>(data), image.image_bytes);
      data = text.c_str();
    }
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    char compiler_says[1024] = {};
    cuda::CuJitOption options[] = {cuda::CuJitOption::kErrorLogBuffer,
                                   cuda::CuJitOption::kErrorLogBufferSizeBytes};
    void* values[] = {compiler_says, reinterpret_cast<void*>(sizeof(compiler_says) - 1)};
    cuda::CuModule module = nullptr;
    Status status =
        check(driver_.cuModuleLoadDataEx(&module, data, 2, options, values), "cuModuleLoadDataEx", what);
    if (!status.ok()) {
      int release = 0;
      const int needed = needed_cuda_driver(image.image, image.image_bytes);
      if (driver_.cuDriverGetVersion(&release) == CuResult::kSuccess && release < needed) {
        return Status(
            StatusCode::kUnsupported,
            status.message() + ". The driver is too old for the image: the driver has CUDA " +
                cuda_release_text(release) + ", the image was made for CUDA " + cuda_release_text(needed) +
                " and newer; install a newer driver (580 for CUDA 13, 550 for CUDA 12.4), or compile "
                "the image for CUDA 12.4 (FOREBAY_NVCC=cmake/nvcc-cuda12; ./dev gpu-bundle --cuda 12)");
      }
      if (compiler_says[0] == '\0') return status;
      return Status(status.code(), status.message() + " (the driver's compiler says: " + compiler_says + ")");
    }
    const std::lock_guard lock(handles_mutex_);
    modules_.push_back(module);
    return Module{module};
  }
  Status unload_module(Module module) override {
    const auto what = [] { return std::string("unload a module"); };
    FOREBAY_RETURN_IF_ERROR(enter("unload_module", what));
    const std::lock_guard lock(handles_mutex_);
    const auto found = std::find(modules_.begin(), modules_.end(), native(module));
    if (found == modules_.end()) return refused(what, kNoModuleTwice);
    const CudaScope scope(driver_, context_, has_reported_state_);
    if (scope.result() == CuResult::kDeinitialized) return {};
    FOREBAY_RETURN_IF_ERROR(check_given_back(scope, what));
    FOREBAY_RETURN_IF_ERROR(check_given_back(driver_.cuModuleUnload(native(module)), "cuModuleUnload", what));
    modules_.erase(found);
    std::erase_if(kernels_, [&](const auto& kernel) { return kernel.second == native(module); });
    return {};
  }
  Result<Kernel> get_kernel(Module module, const char* name) override {
    const auto what = [=] { return std::string("get kernel ") + (name == nullptr ? "" : name); };
    FOREBAY_RETURN_IF_ERROR(enter("get_kernel", what));
    if (name == nullptr) return refused(what, "its name is null; give one");
    const std::lock_guard lock(handles_mutex_);
    if (std::find(modules_.begin(), modules_.end(), native(module)) == modules_.end())
      return refused(what, kNoModule);
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    cuda::CuFunction function = nullptr;
    const CuResult result = driver_.cuModuleGetFunction(&function, native(module), name);
    if (result == CuResult::kNotFound) {
      return refused(what,
                     "cuModuleGetFunction: CUDA_ERROR_NOT_FOUND: the module has none of that name; check the "
                     "spelling, and that it is extern \"C\"");
    }
    FOREBAY_RETURN_IF_ERROR(check(result, "cuModuleGetFunction", what));
    kernels_.insert_or_assign(function, native(module));
    return Kernel{function};
  }
  Status launch(Kernel kernel, Dimensions grid, Dimensions block, const void* const* arguments,
                const std::size_t* argument_bytes, std::size_t argument_count, Stream stream) override {
    const auto what = [] { return std::string("launch a kernel"); };
    FOREBAY_RETURN_IF_ERROR(enter("launch", what));
    FOREBAY_RETURN_IF_ERROR(check_stream(stream, what));
    if (const std::string problem = launch_problem(grid, block, arguments, argument_bytes, argument_count);
        !problem.empty()) {
      return refused(what, problem);
    }
    {
      const std::lock_guard lock(handles_mutex_);
      if (!kernels_.contains(native(kernel))) return refused(what, kNoKernel);
    }
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    // The driver knows each argument's size from the kernel and reads the values before it returns.
    return check(driver_.cuLaunchKernel(native(kernel), grid.x, grid.y, grid.z, block.x, block.y, block.z, 0,
                                        native(stream), const_cast<void**>(arguments), nullptr),
                 "cuLaunchKernel", what);
  }

 private:
  // `what` below is a function for the words after "cannot", so that they are made only for a failure.

  // May `function` be called on this thread?
  template <typename What>
  Status enter(const char* function, const What& what) const {
    if (CudaHostCalls::note_forbidden_call(function)) [[unlikely]] {
      return {StatusCode::kInternal, std::string("cannot call ") + function + " on " + capabilities_.name +
                                         " from a host function: its stream would wait for itself; call it "
                                         "from the thread that queues the work"};
    }
    if (cuda_lost_in_fork()) [[unlikely]]
      return cuda_fork_status(what() + " on " + capabilities_.name);
    return {};
  }

  template <typename What>
  Status check(CuResult result, const char* call, const What& what) const {
    if (result == CuResult::kSuccess) [[likely]]
      return {};
    if (!internal::has_text_room()) return {StatusCode::kOutOfMemory, internal::kNoHostMemory};
    return cuda_failure(driver_, result, call, what() + " on " + capabilities_.name);
  }
  template <typename What>
  Status check(const CudaScope& scope, const What& what) const {
    return check(scope.result(), scope.call(), what);
  }
  // For giving back: when the driver is gone, its resources are too. The first refusal is remembered.
  template <typename What>
  Status check_given_back(CuResult result, const char* call, const What& what) {
    if (result == CuResult::kDeinitialized) return {};
    Status status = check(result, call, what);
    if (!status.ok() && !is_context_lost(result)) {
      const std::lock_guard lock(refusal_mutex_);
      if (refusal_.ok()) refusal_ = status;
    }
    return status;
  }
  template <typename What>
  Status check_given_back(const CudaScope& scope, const What& what) {
    return check_given_back(scope.result(), scope.call(), what);
  }
  template <typename What>
  Status refused(const What& what, const std::string& found_and_try) const {
    return {StatusCode::kInvalidArgument,
            "cannot " + what() + " on " + capabilities_.name + ": " + found_and_try};
  }

  template <typename What>
  Status check_stream(Stream stream, const What& what) const {
    if (stream == Stream()) {
      return refused(
          what, "the stream is null; give one of stream_create, your own, or CudaBackend::default_stream()");
    }
    if (order_.kind(native(stream)) != StreamKind::kEnded) [[likely]]
      return {};
    return refused(what, "the stream was destroyed; give one that stream_destroy has not had");
  }
  template <typename What>
  Status check_event(Event event, const What& what) const {
    if (order_.has_event(native(event))) [[likely]]
      return {};
    return refused(what, kNoEvent);
  }
  // Requires: a CudaScope.
  CuResult ask_capturing(Stream stream, bool* is_capturing) const {
    cuda::CuCaptureStatus status = cuda::CuCaptureStatus::kNone;
    const CuResult result = driver_.cuStreamIsCapturing(native(stream), &status);
    // The legacy stream while a stream that waits for it is being captured: as good as captured itself.
    const bool is_implicit = result == CuResult::kStreamCaptureImplicit;
    *is_capturing = is_implicit || (result == CuResult::kSuccess && status != cuda::CuCaptureStatus::kNone);
    return is_implicit ? CuResult::kSuccess : result;
  }
  template <typename What>
  Status captured(const What& what) const {
    return {StatusCode::kUnavailable,
            "cannot " + what() + " on " + capabilities_.name +
                ": the stream is being captured into a CUDA graph; do it before or after the capture"};
  }
  // Refuses calls that would invalidate a capture, before the driver sees them. Requires: a CudaScope.
  template <typename What>
  Status check_not_capturing(Stream stream, const What& what) const {
    bool is_capturing = false;
    FOREBAY_RETURN_IF_ERROR(check(ask_capturing(stream, &is_capturing), "cuStreamIsCapturing", what));
    return is_capturing ? captured(what) : Status();
  }

  Result<Stream> create_stream(bool urgent) {
    const auto what = [] { return std::string("create a stream"); };
    FOREBAY_RETURN_IF_ERROR(enter("stream_create", what));
    if (const cuda::CuStream parked = order_.take_parked(this, urgent)) return Stream{parked};
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    cuda::CuStream stream = nullptr;
    const CuResult result =
        urgent ? driver_.cuStreamCreateWithPriority(&stream, cuda::kStreamNonBlocking, kUrgent)
               : driver_.cuStreamCreate(&stream, cuda::kStreamNonBlocking);
    FOREBAY_RETURN_IF_ERROR(check(result, urgent ? "cuStreamCreateWithPriority" : "cuStreamCreate", what));
    order_.add_stream(stream, this, urgent);
    return Stream{stream};
  }
  Result<Event> create_event(unsigned flags) {
    const auto what = [] { return std::string("create an event"); };
    FOREBAY_RETURN_IF_ERROR(enter("event_create", what));
    const CudaScope scope(driver_, context_, has_reported_state_);
    FOREBAY_RETURN_IF_ERROR(check(scope, what));
    cuda::CuEvent event = nullptr;
    FOREBAY_RETURN_IF_ERROR(
        check(driver_.cuEventCreate(&event, flags | cuda::kEventBlockingSync), "cuEventCreate", what));
    order_.add_event(event, this);
    return Event{event};
  }

  // The backends of this process, which give each other access.
  static std::vector<CudaBackendImpl*>& all() {
    static auto* const backends = new std::vector<CudaBackendImpl*>;  // Guarded by all_mutex().
    return *backends;
  }
  // Taken before a mapping_mutex_.
  static std::mutex& all_mutex() {
    static auto* const mutex = new std::mutex;
    return *mutex;
  }
  // Requires: mapping_mutex_, or that no other thread knows this.
  void add_access(int ordinal) {
    access_.push_back({{cuda::CuMemLocationType::kDevice, ordinal}, cuda::CuMemAccessFlags::kReadWrite});
  }
  // Requires: mapping_mutex_, a CudaScope.
  template <typename What>
  Status give_access(DevicePtr address, std::size_t bytes, const What& what) {
    return check(driver_.cuMemSetAccess(device_address(address), bytes, access_.data(), access_.size()),
                 "cuMemSetAccess", what);
  }
  // Gives this device access to an address of another device's backend.
  Status open_to_this(const void* address) {
    if (peer_ordinals_.empty() || addresses_.holds(address)) return {};
    const std::lock_guard lock(all_mutex());
    for (CudaBackendImpl* const other : all()) {
      if (other->ordinal_ != ordinal_ && other->addresses_.holds(address))
        return other->open_to_peer(ordinal_);
    }
    return {};
  }

  // Whether a chunk leaves the driver its room. Asks the driver only when half of the memory that was free at
  // the last question has been taken. Requires: a CudaScope.
  template <typename What>
  Status check_room(std::size_t bytes, const What& what) {
    if (room_bytes_ == 0) return {};
    std::size_t allowed = allowed_bytes_.load(std::memory_order_relaxed);
    while (allowed >= bytes) {
      if (allowed_bytes_.compare_exchange_weak(allowed, allowed - bytes, std::memory_order_relaxed))
        return {};
    }
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    FOREBAY_RETURN_IF_ERROR(check(driver_.cuMemGetInfo_v2(&free_bytes, &total_bytes), "cuMemGetInfo", what));
    const std::size_t spare = free_bytes - std::min(free_bytes, room_bytes_);
    if (bytes > spare) {
      return {StatusCode::kOutOfMemory,
              "cannot " + what() + " on " + capabilities_.name + ": " + format_bytes(free_bytes) + " of " +
                  format_bytes(total_bytes) + " free, and " + format_bytes(room_bytes_) +
                  " are kept for the driver; free some first, end other users of the device (nvidia-smi), or "
                  "lower CudaBackendOptions::room_bytes"};
    }
    allowed_bytes_.store((spare - bytes) / 2, std::memory_order_relaxed);
    return {};
  }

  // As check, with the free memory of the device. Requires: a CudaScope.
  template <typename What>
  Status check_allocated(CuResult result, const char* call, const What& what) const {
    if (result != CuResult::kOutOfMemory) return check(result, call, what);
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    if (driver_.cuMemGetInfo_v2(&free_bytes, &total_bytes) != CuResult::kSuccess) {
      return check(result, call, what);
    }
    return {StatusCode::kOutOfMemory,
            "cannot " + what() + " on " + capabilities_.name + ": " + call + ": " +
                cuda_error_name(driver_, result) + ": " + format_bytes(free_bytes) + " of " +
                format_bytes(total_bytes) +
                " free; free some first, or end other users of the device (nvidia-smi)"};
  }

  // Requires: mapping_mutex_ is held, the range is made of whole mappings, a CudaScope.
  Status unmap_mappings(DevicePtr address, std::size_t bytes) {
    const DevicePtr end = address + bytes;
    while (address != end) {
      const std::size_t mapping_bytes = addresses_.mapping_at(address).bytes;
      const auto what = [&] { return "unmap " + range_text(address, mapping_bytes); };
      FOREBAY_RETURN_IF_ERROR(
          check_given_back(driver_.cuMemUnmap(device_address(address), mapping_bytes), "cuMemUnmap", what));
      addresses_.remove_mappings(address, mapping_bytes);
      address += mapping_bytes;
    }
    return {};
  }
  // In the order of dependence: work, then the memory it used, then the addresses.
  void give_everything_back() noexcept {
    {
      const CudaScope scope(driver_, context_, has_reported_state_);
      if (scope.result() == CuResult::kDeinitialized) return;
      report_leak(scope.result(), scope.call());
      const CudaOrderBook::Left left = order_.take_all(this);
      for (const cuda::CuStream stream : left.in_use) {
        report_leak(driver_.cuStreamSynchronize(stream), "cuStreamSynchronize");
        report_leak(driver_.cuStreamDestroy_v2(stream), "cuStreamDestroy");
      }
      for (const cuda::CuStream stream : left.parked) {
        report_leak(driver_.cuStreamDestroy_v2(stream), "cuStreamDestroy");
      }
      give_back_host_calls();
      for (const cuda::CuEvent event : left.events) {
        report_leak(driver_.cuEventDestroy_v2(event), "cuEventDestroy");
      }
      for (const cuda::CuModule module : modules_) {
        report_leak(driver_.cuModuleUnload(module), "cuModuleUnload");
      }
      const AddressBook::Left memory = addresses_.left();
      for (const auto& [address, bytes] : memory.pinned) {
        report_leak(driver_.cuMemHostUnregister(address), "cuMemHostUnregister");
      }
      for (const auto& [address, bytes] : memory.blocks) {
        report_leak(driver_.cuMemFree_v2(device_address(address)), "cuMemFree");
      }
      for (const auto& [address, bytes] : memory.mappings) {
        report_leak(driver_.cuMemUnmap(device_address(address), bytes), "cuMemUnmap");
      }
      for (const std::uint64_t handle : memory.chunks)
        report_leak(driver_.cuMemRelease(handle), "cuMemRelease");
      for (const auto& [address, bytes] : memory.reservations) {
        report_leak(driver_.cuMemAddressFree(device_address(address), bytes), "cuMemAddressFree");
      }
    }
    report_leak(driver_.cuDevicePrimaryCtxRelease_v2(device_), "cuDevicePrimaryCtxRelease");
  }
  void give_back_host_calls() noexcept {
    if (host_calls_.has_foreign()) {
      const CuResult result = driver_.cuCtxSynchronize();
      report_leak(result, "cuCtxSynchronize");
      // Without an answer streams of others may still wait for values: the pages stay, until the context
      // ends.
      if (result != CuResult::kSuccess && !is_context_lost(result)) return;
    }
    for (void* const page : host_calls_.take_pages()) {
      report_leak(driver_.cuMemFreeHost(page), "cuMemFreeHost");
    }
  }
  void report_leak(CuResult result, const char* call) noexcept {
    if (result == CuResult::kSuccess || result == CuResult::kDeinitialized) return;
    if (has_reported_leak_.exchange(true, std::memory_order_relaxed)) return;
    log(LogLevel::kWarning, "%s: cannot give everything back: %s: %s; said once", capabilities_.name, call,
        cuda_error_name(driver_, result).c_str());
  }

  const CudaDriver& driver_;
  const int ordinal_;
  const std::vector<int> peer_ordinals_;
  const ChunkKind kind_;
  const std::size_t room_bytes_;
  const bool opens_to_peers_;
  const cuda::CuMemAllocationProp properties_;
  Capabilities capabilities_;
  // This device and the peers that have access. Guarded by mapping_mutex_.
  std::vector<cuda::CuMemAccessDesc> access_;
  // Bytes of chunks that may be made before the driver is asked again for its free memory. At first that of
  // try_chunk(), which gives it back.
  std::atomic<std::size_t> allowed_bytes_;
  cuda::CuDevice device_ = 0;
  cuda::CuContext context_ = nullptr;  // Null until open() has retained it.

  AddressBook addresses_;
  CudaOrderBook& order_;  // The process's.
  CudaHostCalls host_calls_;
  // Held over a question to addresses_, the driver's call and the change that follows. Taken before its
  // mutex.
  std::mutex mapping_mutex_;
  // Failures without a caller are logged, once each.
  mutable std::atomic<bool> has_reported_state_{false};
  std::atomic<bool> has_reported_leak_{false};
  std::atomic<bool> has_reported_memory_info_{false};

  std::mutex refusal_mutex_;  // Taken last.
  // Guarded by refusal_mutex_: the first error of giving something back, unless the context was lost.
  Status refusal_;

  mutable std::mutex handles_mutex_;
  // Guarded by handles_mutex_.
  std::vector<cuda::CuModule> modules_;
  std::map<cuda::CuFunction, cuda::CuModule> kernels_;
};

Status check_options(const CudaBackendOptions& options, const CudaDevice& device) {
  const std::string what =
      "cannot make a backend on cuda:" + std::to_string(device.ordinal) + " " + device.name;
  if (device.granularity == 0) {
    return {StatusCode::kUnsupported,
            what + ": the device has no virtual memory management; use another device or the host backend"};
  }
  if (options.memory_bytes != 0 && options.memory_bytes < device.granularity) {
    return {StatusCode::kInvalidArgument, what + ": a budget of " + format_bytes(options.memory_bytes) +
                                              " is less than one chunk; give at least " +
                                              format_bytes(device.granularity)};
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<CudaBackend>> CudaBackend::create(const CudaBackendOptions& options) {
  FOREBAY_ASSIGN_OR_RETURN(const CudaDriver* const driver, CudaDriver::get());
  FOREBAY_ASSIGN_OR_RETURN(const int count, cuda_device_count(*driver));
  if (options.ordinal < 0 || options.ordinal >= count) {
    const std::string what = "cannot make a backend on cuda:" + std::to_string(options.ordinal) + ": ";
    if (count == 0) {
      return Status(StatusCode::kUnavailable,
                    what + "the driver " + driver->path +
                        " has no device; see nvidia-smi and CUDA_VISIBLE_DEVICES, or use the host backend");
    }
    return Status(StatusCode::kInvalidArgument,
                  what + (count == 1 ? "there is 1 device; give 0"
                                     : "there are " + std::to_string(count) + " devices; give 0 to " +
                                           std::to_string(count - 1)));
  }
  FOREBAY_ASSIGN_OR_RETURN(const CudaDevice device, read_cuda_device(*driver, options.ordinal));
  FOREBAY_RETURN_IF_ERROR(check_options(options, device));
  if (!device.problem.empty()) log(LogLevel::kInfo, "%s", device.problem.c_str());

  // From all that the device claims down to the plain chunk that every driver gives: containers, virtual
  // functions and older kernels take claims back only when they are tried.
  const ChunkKind claimed{.posix_fd = device.has_posix_fd, .rdma = device.has_rdma};
  const ChunkKind without_rdma{.posix_fd = claimed.posix_fd, .rdma = false};
  const ChunkKind tried[] = {claimed, without_rdma, ChunkKind{}};
  Status first;
  const ChunkKind* last = nullptr;
  for (const ChunkKind& kind : tried) {
    if (last != nullptr && kind == *last) continue;
    last = &kind;
    auto backend = std::make_unique<CudaBackendImpl>(*driver, device, options, kind);
    FOREBAY_RETURN_IF_ERROR(backend->retain_context());
    Status status = backend->try_chunk();
    if (status.ok()) {
      if (!first.ok()) {
        log(LogLevel::kInfo, "%s: chunks are made without %s, because: %s", backend->capabilities().name,
            kind.posix_fd ? "GPUDirect RDMA" : "file descriptors and GPUDirect RDMA",
            first.message().c_str());
      }
      backend->meet_peers();
      return std::unique_ptr<CudaBackend>(std::move(backend));
    }
    if (first.ok()) first = status;
    // Less would not help.
    if (status.code() == StatusCode::kOutOfMemory || status.code() == StatusCode::kUnavailable) break;
  }
  return first;
}

Result<int> CudaBackend::device_count() {
  FOREBAY_ASSIGN_OR_RETURN(const CudaDriver* const driver, CudaDriver::get());
  return cuda_device_count(*driver);
}

Stream CudaBackend::default_stream() noexcept {
  return Stream{cuda::legacy_stream()};
}
Stream CudaBackend::per_thread_stream() noexcept {
  return Stream{cuda::per_thread_stream()};
}

}  // namespace forebay
