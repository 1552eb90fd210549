// Communicators: ranks as processes, ranks as threads, and their operations.

#include <algorithm>
#include <limits>
#include <mutex>

#include "forebay/all_reduce.h"
#include "forebay/cuda_backend.h"
#include "forebay/gloo_communicator.h"
#include "forebay/nccl_communicator.h"
#include "forebay/shm_communicator.h"
#include "runtime/api/objects.h"
#include "runtime/api/report.h"

using namespace forebay;       // NOLINT: the functions below are of the global namespace.
using namespace forebay::api;  // NOLINT

namespace {

// The caller's functions as a rendezvous store.
class CalledTexts final : public RendezvousTexts {
 public:
  explicit CalledTexts(const forebay_store_calls& calls) : calls_(calls) {}
  ~CalledTexts() override {
    if (calls_.release != nullptr) calls_.release(calls_.user);
  }
  CalledTexts(const CalledTexts&) = delete;
  CalledTexts& operator=(const CalledTexts&) = delete;

  Status set(const std::string& name, std::string_view text) override {
    return status("set", name, calls_.set(calls_.user, name.c_str(), text.data(), text.size()));
  }

  std::optional<std::string> get(const std::string& name) override {
    std::string text(256, '\0');
    for (;;) {
      std::uint64_t bytes = FOREBAY_ABSENT;
      Status found =
          status("get", name, calls_.get(calls_.user, name.c_str(), text.data(), text.size(), &bytes));
      if (found.ok() && bytes != FOREBAY_ABSENT && bytes > kTextMax) found = too_long(name, bytes);
      const bool is_there = found.ok() && bytes != FOREBAY_ABSENT;
      {
        const std::lock_guard lock(mutex_);
        last_get_ = std::move(found);
      }
      if (!is_there) return std::nullopt;
      const bool fits = bytes <= text.size();
      text.resize(bytes);
      if (fits) return text;
    }
  }

  Status set_if_absent(const std::string& name, std::string_view text) override {
    return status("set_if_absent", name,
                  calls_.set_if_absent(calls_.user, name.c_str(), text.data(), text.size()));
  }

  void remove(const std::string& name) noexcept override { calls_.remove(calls_.user, name.c_str()); }

  // The failure of the last get(). A meeting takes a text that cannot be read for one that is absent.
  Status last_get() const {
    const std::lock_guard lock(mutex_);
    return last_get_;
  }

 private:
  static constexpr std::uint64_t kTextMax = 1u << 24;

  static Status status(const char* call, const std::string& name, std::int32_t code) {
    if (code == FOREBAY_OK) return {};
    return {StatusCode::kUnavailable,
            std::string("the program's rendezvous store failed: ") + call + "(" + name + ") returned " +
                std::to_string(code) +
                "; its host, which is rank 0 with torchrun, may have ended: look there first"};
  }

  static Status too_long(const std::string& name, std::uint64_t bytes) {
    return {StatusCode::kUnavailable, "the program's rendezvous store failed: get(" + name + ") gave " +
                                          std::to_string(bytes) + " bytes; use at most " +
                                          std::to_string(kTextMax) + ", or FOREBAY_ABSENT"};
  }

  const forebay_store_calls calls_;
  mutable std::mutex mutex_;
  Status last_get_;
};

std::shared_ptr<CalledTexts> texts_of(const forebay_store_calls* calls) {
  if (calls == nullptr) return nullptr;
  forebay_store_calls known{};
  constexpr std::uint64_t kLeast = offsetof(forebay_store_calls, release);
  if (calls->size < kLeast) {
    misuse("store->size is " + std::to_string(calls->size) +
           "; set it to sizeof(forebay_store_calls) and recompile");
  }
  std::memcpy(&known, calls, std::min<std::uint64_t>(calls->size, sizeof(known)));
  if (known.set == nullptr || known.get == nullptr || known.set_if_absent == nullptr ||
      known.remove == nullptr) {
    misuse("store lacks one of set, get, set_if_absent and remove; give all four");
  }
  return std::make_shared<CalledTexts>(known);
}

// The only rank.
std::unique_ptr<Communicator> alone(Device& device, const Options& options) {
  const auto group = LocalGroup::create(1, {.deadline = options.process.deadline});
  return value_or_throw(group->communicator(0, *device.backend, device.kernels()));
}

std::unique_ptr<Communicator> over_processes(const Options& options, Backend& backend) {
  switch (options.communicator) {
    case CommunicatorKind::kShm:
      return value_or_throw(create_shm_communicator(options.process, backend));
    case CommunicatorKind::kGloo:
      return value_or_throw(create_gloo_communicator(options.process, backend));
    default:
      return value_or_throw(create_process_communicator(options.process, backend));
  }
}

void open_nccl(const Options& options, void* adopted, Ranks& ranks) {
  if (ranks.device->backend->capabilities().kind != BackendKind::kCuda)
    misuse("communicator is nccl and the device is no cuda device; open \"cuda:N\"");
  // The core has no run-time types.
  auto& backend = static_cast<CudaBackend&>(*ranks.device->backend);
  ranks.control = std::make_shared<Device>("host", Options());
  auto control = options.process.size == 1 ? alone(*ranks.control, options)
                                           : over_processes(options, *ranks.control->backend);
  NcclOptions nccl = options.nccl;
  nccl.deadline = options.process.deadline;
  nccl.adopted = adopted;
  ranks.communicator =
      value_or_throw(create_nccl_communicator(std::move(control), backend, ranks.device->kernels(), nccl));
}

NcclCommunicator& nccl_of(Communicator& communicator) {
  auto* const nccl = dynamic_cast<NcclCommunicator*>(&communicator);
  if (nccl == nullptr) {
    throw Error(StatusCode::kUnsupported, std::string("memory is registered with NCCL only, and this "
                                                      "communicator is ") +
                                              communicator.name() + "; make it with communicator nccl");
  }
  return *nccl;
}

const std::byte* bytes_at(const void* address) {
  return static_cast<const std::byte*>(address);
}
std::byte* bytes_at(void* address) {
  return static_cast<std::byte*>(address);
}

const char* state_name(OperationState state) {
  constexpr const char* kNames[] = {"queued", "running", "done", "failed"};
  return kNames[static_cast<std::size_t>(state)];
}

}  // namespace

std::int32_t forebay_communicator_create(forebay_device* device, forebay_options* options,
                                         const forebay_store_calls* store, void* nccl,
                                         forebay_communicator** communicator) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(communicator);
    auto ranks = std::make_shared<Ranks>();
    ranks->device = share(device).keep();
    Options given = options_of(options);
    const auto texts = texts_of(store);
    given.process.texts = texts;
    if (store != nullptr && !given.store_prefix.empty()) given.process.store = given.store_prefix;
    if (given.process.rank < 0 || given.process.size == 0) {
      if (given.process.rank >= 0 || given.process.size != 0)
        misuse("only one of the options rank and size is set; set both, or none");
      Options environment;
      throw_if_error(environment.read_environment());
      given.process.rank = environment.process.rank;
      given.process.size = environment.process.size;
      if (given.process.interface.empty()) given.process.interface = environment.process.interface;
      if (given.process.store.empty() && store == nullptr) given.process.store = environment.process.store;
    }
    const bool on_cuda = ranks->device->backend->capabilities().kind == BackendKind::kCuda;
    const bool by_nccl = nccl != nullptr || given.communicator == CommunicatorKind::kNccl ||
                         (given.communicator == CommunicatorKind::kAuto && on_cuda && given.process.size > 1);
    try {
      if (by_nccl) {
        open_nccl(given, nccl, *ranks);
      } else if (given.process.size == 1) {
        if (given.process.rank != 0) misuse("rank is " + std::to_string(given.process.rank) + " of 1; use 0");
        ranks->communicator = alone(*ranks->device, given);
      } else {
        ranks->communicator = over_processes(given, *ranks->device->backend);
      }
    } catch (const Error&) {
      if (texts != nullptr) throw_if_error(texts->last_get());
      throw;
    }
    *communicator = make_handle<forebay_communicator>(std::move(ranks));
  });
}

std::int32_t forebay_local_group_create(std::int32_t size, forebay_options* options,
                                        forebay_local_group** group) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(group);
    constexpr std::int32_t kThreadsMax = 4096;
    if (size < 1 || size > kThreadsMax)
      misuse("size is " + std::to_string(size) + "; use 1 to " + std::to_string(kThreadsMax));
    auto made = std::make_shared<Group>();
    made->group = LocalGroup::create(size, {.deadline = options_of(options).process.deadline});
    *group = make_handle<forebay_local_group>(std::move(made));
  });
}

std::int32_t forebay_local_group_communicator(forebay_local_group* group, std::int32_t rank,
                                              forebay_device* device, forebay_communicator** communicator) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(communicator);
    auto ranks = std::make_shared<Ranks>();
    ranks->device = share(device).keep();
    ranks->communicator = value_or_throw(
        share(group)->group->communicator(rank, *ranks->device->backend, ranks->device->kernels()));
    *communicator = make_handle<forebay_communicator>(std::move(ranks));
  });
}

void forebay_local_group_destroy(forebay_local_group* group) {
  api::close(group, __func__);
}

std::int32_t forebay_communicator_split(forebay_communicator* communicator, std::int32_t color,
                                        std::int32_t key, forebay_communicator** part) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(part);
    const auto held = hold(communicator);
    auto made = std::make_shared<Ranks>();
    made->device = held->device;
    made->control = held->control;
    made->communicator = value_or_throw(held->communicator->split(color, key));
    *part = make_handle<forebay_communicator>(std::move(made));
  });
}

std::int32_t forebay_communicator_rank(forebay_communicator* communicator, std::int32_t* rank,
                                       std::int32_t* size) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(rank, size);
    const auto held = share(communicator);
    *rank = held->communicator->rank();
    *size = held->communicator->size();
  });
}

std::int32_t forebay_communicator_barrier(forebay_communicator* communicator) {
  return guarded(__func__, [&] { throw_if_error(hold(communicator)->communicator->barrier()); });
}

std::int32_t forebay_communicator_exchange(forebay_communicator* communicator, const void* mine,
                                           std::uint64_t bytes, void* all) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(mine, all);
    const auto held = hold(communicator);
    const auto size = static_cast<std::uint64_t>(held->communicator->size());
    constexpr std::uint64_t kBytesMax = 1u << 30;
    if (bytes > kBytesMax / size)
      misuse("bytes is " + std::to_string(bytes) + "; an exchange is for small values, up to 1 GiB of all");
    throw_if_error(held->communicator->exchange({bytes_at(mine), bytes}, {bytes_at(all), bytes * size}));
  });
}

std::int32_t forebay_communicator_all_gather(forebay_communicator* communicator, const void* source,
                                             void* target, std::uint64_t stride_bytes, std::uint64_t bytes,
                                             void* stream) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(source, target);
    const auto held = hold(communicator);
    throw_if_error(held->communicator->all_gather({bytes_at(source), bytes_at(target), stride_bytes, bytes},
                                                  held->device->stream(stream)));
  });
}

std::int32_t forebay_communicator_reduce_scatter(forebay_communicator* communicator, const void* source,
                                                 std::uint64_t stride_bytes, std::uint64_t count,
                                                 std::int32_t dtype, void* staging, float* target,
                                                 std::int32_t first, void* stream) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(source, staging, target);
    const auto held = hold(communicator);
    throw_if_error(held->communicator->reduce_scatter(
        {bytes_at(source), stride_bytes, count, data_type(dtype), bytes_at(staging), target, first != 0},
        held->device->stream(stream)));
  });
}

std::int32_t forebay_communicator_all_reduce(forebay_communicator* communicator, void* data,
                                             std::uint64_t count, std::int32_t dtype, void* staging,
                                             std::uint64_t bucket_bytes, void* stream) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(data, staging);
    const auto held = hold(communicator);
    const DataType type = data_type(dtype);
    if (bucket_bytes < element_bytes(type)) misuse("bucket_bytes is less than one element; give more");
    throw_if_error(all_reduce(*held->communicator, *held->device->backend, held->device->kernels(),
                              {bytes_at(data), count, type, bytes_at(staging), bucket_bytes},
                              held->device->stream(stream)));
  });
}

std::int32_t forebay_all_reduce_staging(std::int32_t ranks, std::uint64_t bucket_bytes, std::int32_t dtype,
                                        std::uint64_t* bytes) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(bytes);
    constexpr std::uint64_t kBucketMax = std::uint64_t{1} << 40;
    if (ranks < 1) misuse("ranks is " + std::to_string(ranks) + "; use 1 or more");
    if (bucket_bytes > kBucketMax) misuse("bucket_bytes is larger than 1 TiB; use 16 MiB or so");
    *bytes = all_reduce_staging_bytes(ranks, bucket_bytes, data_type(dtype));
  });
}

std::int32_t forebay_communicator_send(forebay_communicator* communicator, const void* source,
                                       std::uint64_t bytes, std::int32_t peer, std::uint32_t tag,
                                       void* stream) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(source);
    const auto held = hold(communicator);
    throw_if_error(
        held->communicator->send(bytes_at(source), bytes, peer, tag, held->device->stream(stream)));
  });
}

std::int32_t forebay_communicator_receive(forebay_communicator* communicator, void* target,
                                          std::uint64_t bytes, std::int32_t peer, std::uint32_t tag,
                                          void* stream) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(target);
    const auto held = hold(communicator);
    throw_if_error(
        held->communicator->recv(bytes_at(target), bytes, peer, tag, held->device->stream(stream)));
  });
}

std::int32_t forebay_communicator_register(forebay_communicator* communicator, void* address,
                                           std::uint64_t bytes) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(address);
    const auto held = hold(communicator);
    throw_if_error(nccl_of(*held->communicator).register_buffer(bytes_at(address), bytes));
  });
}

std::int32_t forebay_communicator_deregister(forebay_communicator* communicator, void* address) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(address);
    const auto held = hold(communicator);
    throw_if_error(nccl_of(*held->communicator).deregister_buffer(bytes_at(address)));
  });
}

std::int32_t forebay_communicator_status(forebay_communicator* communicator) {
  return guarded(__func__, [&] { throw_if_error(share(communicator)->communicator->status()); });
}

std::int32_t forebay_communicator_abort(forebay_communicator* communicator, std::int32_t code,
                                        const char* text) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(text);
    if (code <= FOREBAY_OK || code > FOREBAY_INTERNAL)
      misuse("code is " + std::to_string(code) + "; use one of the codes of an error");
    const char* const reason = text[0] != '\0' ? text : "the program gave no reason";
    share(communicator)->communicator->abort(Status(static_cast<StatusCode>(code), reason));
  });
}

std::int32_t forebay_communicator_report(forebay_communicator* communicator, const char** json) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(json);
    const auto held = share(communicator);
    const Communicator& c = *held->communicator;
    Json operations = Json::array();
    for (const OperationTraffic& one : c.operation_traffic()) {
      Json peers = Json::array();
      for (const Traffic& peer : one.peers) peers.push_back(json_of(peer));
      operations.push_back({{"operation", one.operation}, {"count", one.count}, {"peers", peers}});
    }
    Json last = Json::array();
    for (const OperationRecord& record : c.last_operations()) {
      last.push_back({{"operation", record.what},
                      {"state", state_name(record.state)},
                      {"queued_ns", record.queued.count()},
                      {"begun_ns", record.begun.count()},
                      {"ended_ns", record.ended.count()}});
    }
    const Traffic traffic = c.traffic();
    *json = held->give(dump({{"name", c.name()},
                             {"rank", c.rank()},
                             {"size", c.size()},
                             {"sent_bytes", traffic.sent_bytes},
                             {"received_bytes", traffic.received_bytes},
                             {"operations", operations},
                             {"last_operations", last}}));
  });
}

void forebay_communicator_destroy(forebay_communicator* communicator) {
  api::close(communicator, __func__);
}
