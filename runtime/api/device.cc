// Devices, streams, copies, and the library itself.

#include <algorithm>
#include <charconv>
#include <cstring>

#include "forebay/cuda_backend.h"
#include "forebay/cuda_devices.h"
#include "forebay/host_backend.h"
#include "forebay/model_backend.h"
#include "forebay/version.h"
#include "runtime/api/objects.h"
#include "runtime/api/report.h"

using namespace forebay;       // NOLINT: the functions below are of the global namespace.
using namespace forebay::api;  // NOLINT

namespace forebay::api {
namespace {

constexpr std::size_t kGranularity = 2u << 20;

template <typename Kind, typename Kindly>
std::unique_ptr<Backend> open(Kindly options, const Options& given) {
  if (given.device_memory != 0) options.memory_bytes = given.device_memory;
  if constexpr (std::is_same_v<Kind, CudaBackend>)
    options.room_bytes = given.engine.room_bytes;
  else
    options.granularity = given.granularity == 0 ? kGranularity : given.granularity;
  if constexpr (std::is_same_v<Kind, HostBackend>) options.guard = given.guard;
  return value_or_throw(Kind::create(options));
}

std::unique_ptr<Backend> open(const std::string& name, const Options& given) {
  if (name == "host") return open<HostBackend>(HostBackendOptions{}, given);
  if (name == "model") return open<ModelBackend>(ModelBackendOptions{}, given);
  constexpr std::string_view kCuda = "cuda";
  CudaBackendOptions cuda;
  if (name.starts_with(kCuda)) {
    const char* const end = name.data() + name.size();
    const char* const digits = name.data() + kCuda.size() + 1;
    if (name.size() == kCuda.size()) return open<CudaBackend>(cuda, given);
    if (name[kCuda.size()] == ':' && digits < end) {
      const auto read = std::from_chars(digits, end, cuda.ordinal);
      if (read.ec == std::errc() && read.ptr == end && cuda.ordinal >= 0)
        return open<CudaBackend>(cuda, given);
    }
  }
  misuse("there is no device \"" + name + "\"; use host, cuda, cuda:N or model");
}

const char* kind_name(BackendKind kind) {
  constexpr const char* kNames[] = {"host", "cuda", "model"};
  return kNames[static_cast<std::size_t>(kind)];
}

}  // namespace

Device::Device(const char* name, const Options& options) : backend(open(name, options)) {}

Device::~Device() {
  for (void* const handle : streams) static_cast<void>(backend->stream_destroy({handle}));
  if (default_stream.handle != nullptr) static_cast<void>(backend->stream_destroy(default_stream));
}

Stream Device::stream(void* handle) {
  const bool is_cuda = backend->capabilities().kind == BackendKind::kCuda;
  if (is_cuda) return handle != nullptr ? Stream{handle} : CudaBackend::default_stream();
  const std::lock_guard lock(mutex);
  if (handle != nullptr) {
    if (std::find(streams.begin(), streams.end(), handle) == streams.end())
      misuse(
          "there is no such stream on this device; give one of forebay_stream_create() that was not "
          "destroyed, or null");
    return {handle};
  }
  if (default_stream.handle == nullptr) default_stream = value_or_throw(backend->stream_create());
  return default_stream;
}

Stream Device::stream_or_none(void* handle) {
  return handle == FOREBAY_NO_STREAM ? Stream() : stream(handle);
}

Kernels& Device::kernels() {
  const std::lock_guard lock(mutex);
  if (made_kernels == nullptr) made_kernels = value_or_throw(Kernels::create(*backend));
  return *made_kernels;
}

DataType data_type(std::int32_t dtype) {
  if (dtype < FOREBAY_FP32 || dtype > FOREBAY_FP16)
    misuse("dtype is " + std::to_string(dtype) + "; use FOREBAY_FP32, FOREBAY_BF16 or FOREBAY_FP16");
  return static_cast<DataType>(dtype);
}

}  // namespace forebay::api

std::int32_t forebay_abi() {
  return FOREBAY_ABI;
}

const char* forebay_version() {
  return version();
}

const char* forebay_code_name(std::int32_t code) {
  constexpr const char* kNames[] = {
      "FOREBAY_OK",          "FOREBAY_INVALID_ARGUMENT", "FOREBAY_OUT_OF_MEMORY", "FOREBAY_UNSUPPORTED",
      "FOREBAY_UNAVAILABLE", "FOREBAY_IO_ERROR",         "FOREBAY_TIMEOUT",       "FOREBAY_PEER_LOST",
      "FOREBAY_CORRUPTION",  "FOREBAY_INTERNAL"};
  return code >= 0 && code <= FOREBAY_INTERNAL ? kNames[code] : "FOREBAY_UNKNOWN";
}

std::int32_t forebay_machine_report(const char** json) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(json);
    const CudaSystem system = value_or_throw(read_cuda_system());
    Json devices = Json::array();
    for (const CudaDevice& d : system.devices) {
      devices.push_back({{"ordinal", d.ordinal},
                         {"name", d.name},
                         {"uuid", d.uuid},
                         {"pci_bus_id", d.pci_bus_id},
                         {"compute_major", d.compute_major},
                         {"compute_minor", d.compute_minor},
                         {"multiprocessor_count", d.multiprocessor_count},
                         {"numa_node", d.numa_node},
                         {"memory_bytes", d.memory_bytes},
                         {"free_bytes", d.free_bytes},
                         {"granularity", d.granularity},
                         {"peers", d.peer_ordinals},
                         {"problem", d.problem}});
    }
    thread_local std::string text;
    text = dump({{"driver_path", system.driver_path},
                 {"driver_version", system.driver_version},
                 {"devices", devices}});
    *json = text.c_str();
  });
}

std::int32_t forebay_device_open(const char* name, forebay_options* options, forebay_device** device) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(name, device);
    *device = make_handle<forebay_device>(std::make_shared<Device>(name, options_of(options)));
  });
}

std::int32_t forebay_device_report(forebay_device* device, const char** json) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(json);
    const auto held = share(device);
    const Capabilities& facts = held->backend->capabilities();
    *json = held->give(dump({{"kind", kind_name(facts.kind)},
                             {"name", facts.name},
                             {"granularity", facts.granularity},
                             {"memory_bytes", facts.memory_bytes},
                             {"free_bytes", held->backend->memory_info().free_bytes},
                             {"host_accessible", facts.host_accessible},
                             {"numa_node", facts.numa_node},
                             {"multiprocessor_count", facts.multiprocessor_count}}));
  });
}

void forebay_device_close(forebay_device* device) {
  api::close(device, __func__);
}

std::int32_t forebay_stream_create(forebay_device* device, void** stream) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(stream);
    const auto held = share(device);
    const Stream made = value_or_throw(held->backend->stream_create());
    const std::lock_guard lock(held->mutex);
    held->streams.push_back(made.handle);
    *stream = made.handle;
  });
}

std::int32_t forebay_stream_synchronize(forebay_device* device, void* stream) {
  return guarded(__func__, [&] {
    const auto held = share(device);
    throw_if_error(held->backend->stream_synchronize(held->stream(stream)));
  });
}

std::int32_t forebay_stream_wait(forebay_device* device, void* stream, void* other) {
  return guarded(__func__, [&] {
    const auto held = share(device);
    Backend& backend = *held->backend;
    const Event event = value_or_throw(backend.event_create());
    Status status = backend.event_record(event, held->stream(other));
    if (status.ok()) status = backend.stream_wait(held->stream(stream), event);
    const Status destroyed = backend.event_destroy(event);
    throw_if_error(status);
    throw_if_error(destroyed);
  });
}

std::int32_t forebay_stream_call(forebay_device* device, void* stream, void (*function)(void* user),
                                 void* user) {
  return guarded(__func__, [&] {
    if (function == nullptr) misuse("function is null; give one to call");
    const auto held = share(device);
    throw_if_error(held->backend->call_host(held->stream(stream), function, user));
  });
}

void forebay_stream_destroy(forebay_device* device, void* stream) {
  if (device == nullptr || stream == nullptr) return;
  guarded(__func__, [&] {
    const auto held = share(device);
    {
      const std::lock_guard lock(held->mutex);
      if (std::erase(held->streams, stream) == 0)
        misuse("the stream was not made here, or was destroyed; destroy each once, on its device");
    }
    throw_if_error(held->backend->stream_destroy({stream}));
  });
}

std::int32_t forebay_copy(forebay_device* device, void* target, const void* source, std::uint64_t bytes,
                          void* stream) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(target, source);
    const auto held = share(device);
    throw_if_error(held->backend->copy_async(target, source, bytes, held->stream(stream)));
  });
}

std::int32_t forebay_fill(forebay_device* device, void* target, std::int32_t value, std::uint64_t bytes,
                          void* stream) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(target);
    if (value < 0 || value > 0xFF) misuse("value is " + std::to_string(value) + "; use 0 to 255");
    const auto held = share(device);
    throw_if_error(held->backend->fill_async(static_cast<std::byte*>(target),
                                             static_cast<std::uint8_t>(value), bytes, held->stream(stream)));
  });
}
