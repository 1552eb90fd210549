// The activation checkpointer.

#include <algorithm>

#include "runtime/api/objects.h"
#include "runtime/api/report.h"

using namespace forebay;       // NOLINT: the functions below are of the global namespace.
using namespace forebay::api;  // NOLINT

namespace {

ActivationCheckpointer& committed(Checkpointer& object) {
  if (!object.committed)
    misuse("the checkpointer is not committed; call forebay_checkpointer_commit() first");
  return *object.checkpointer;
}

Json report_of(Checkpointer& object) {
  ActivationCheckpointer& checkpointer = *object.checkpointer;
  if (!object.committed) return {{"plan", json_of(checkpointer.plan())}};
  const ActivationStatistics s = checkpointer.statistics();
  return {{"plan", json_of(checkpointer.committed_plan())},
          {"statistics",
           {{"device_bytes", s.device_bytes},
            {"host_bytes", s.host_bytes},
            {"file_bytes", s.file_bytes},
            {"traffic", json_of(s.traffic)},
            {"spilled_bytes", s.spilled_bytes},
            {"fetched_bytes", s.fetched_bytes},
            {"save_count", s.save_count},
            {"load_count", s.load_count},
            {"ahead_count", s.ahead_count},
            {"most_saved_bytes", s.most_saved_bytes},
            {"most_micro_batches", s.most_micro_batches}}}};
}

}  // namespace

std::int32_t forebay_checkpointer_create(forebay_device* device, forebay_communicator* communicator,
                                         forebay_timeline* timeline, forebay_options* options,
                                         forebay_checkpointer** checkpointer) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(checkpointer);
    auto made = std::make_shared<Checkpointer>();
    made->device = share(device).keep();
    made->ranks = share(communicator).keep();
    if (made->ranks->device != made->device)
      misuse("communicator is on another device; make both on the same one");
    made->timeline = keep_or_null(timeline);
    ActivationCheckpointerOptions given = options_of(options).activations;
    if (timeline != nullptr) given.timeline = &made->timeline->timeline;
    made->checkpointer = std::make_unique<ActivationCheckpointer>(
        *made->device->backend, *made->ranks->communicator, std::move(given));
    *checkpointer = make_handle<forebay_checkpointer>(std::move(made));
  });
}

std::int32_t forebay_checkpointer_declare(forebay_checkpointer* checkpointer, std::int32_t unit,
                                          std::int32_t slot, std::uint64_t bytes, forebay_options* options) {
  return guarded(__func__, [&] {
    ActivationSlot declared = options_of(options).slot;
    declared.unit = unit;
    declared.slot = slot;
    declared.bytes = bytes;
    hold(checkpointer)->checkpointer->declare(declared);
  });
}

std::int32_t forebay_checkpointer_commit(forebay_checkpointer* checkpointer, void* region) {
  return guarded(__func__, [&] {
    const auto held = hold(checkpointer);
    held->checkpointer->commit(static_cast<DevicePtr>(region));
    held->committed = true;
  });
}

std::int32_t forebay_checkpointer_save(forebay_checkpointer* checkpointer, std::int32_t unit,
                                       std::int32_t slot, std::int32_t micro_batch, const void* source,
                                       std::uint64_t bytes, const void* record, std::uint64_t record_bytes,
                                       void* stream) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(source);
    if (record == nullptr && record_bytes != 0)
      misuse("record is null and has bytes; give an address, or no bytes");
    const auto held = hold(checkpointer);
    committed(*held).save({unit, slot, micro_batch}, static_cast<const std::byte*>(source), bytes,
                          held->device->stream(stream),
                          {static_cast<const std::byte*>(record), record_bytes});
  });
}

std::int32_t forebay_checkpointer_load(forebay_checkpointer* checkpointer, std::int32_t unit,
                                       std::int32_t slot, std::int32_t micro_batch, void* stream, void** data,
                                       std::uint64_t* bytes, const void** record,
                                       std::uint64_t* record_bytes) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(data, bytes);
    const auto held = hold(checkpointer);
    const ActivationKey key{unit, slot, micro_batch};
    held->leases.reserve(held->leases.size() + 1);
    held->leases.emplace_back(key, committed(*held).load(key, held->device->stream(stream)));
    const ActivationLease& lease = held->leases.back().second;
    *data = lease.data();
    *bytes = lease.bytes();
    if (record != nullptr) *record = lease.state().data();
    if (record_bytes != nullptr) *record_bytes = lease.state().size();
  });
}

std::int32_t forebay_checkpointer_load_end(forebay_checkpointer* checkpointer, std::int32_t unit,
                                           std::int32_t slot, std::int32_t micro_batch) {
  return guarded(__func__, [&] {
    const auto held = hold(checkpointer);
    const ActivationKey key{unit, slot, micro_batch};
    const auto found = std::find_if(held->leases.begin(), held->leases.end(),
                                    [&](const auto& lease) { return lease.first == key; });
    if (found == held->leases.end())
      misuse("this activation is not loaded; call forebay_checkpointer_load() first");
    held->leases.erase(found);
  });
}

std::int32_t forebay_checkpointer_discard(forebay_checkpointer* checkpointer, std::int32_t unit,
                                          std::int32_t slot, std::int32_t micro_batch) {
  return guarded(__func__, [&] {
    const auto held = hold(checkpointer);
    committed(*held).discard({unit, slot, micro_batch});
  });
}

std::int32_t forebay_checkpointer_discard_all(forebay_checkpointer* checkpointer) {
  return guarded(__func__, [&] {
    const auto held = hold(checkpointer);
    committed(*held).discard_all();
  });
}

std::int32_t forebay_checkpointer_check(forebay_checkpointer* checkpointer) {
  return guarded(__func__, [&] {
    const auto held = hold(checkpointer);
    committed(*held).check();
  });
}

std::int32_t forebay_checkpointer_report(forebay_checkpointer* checkpointer, const char** json) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(json);
    const auto held = hold(checkpointer);
    *json = held->give(dump(report_of(*held)));
  });
}

std::int32_t forebay_checkpointer_number(forebay_checkpointer* checkpointer, const char* name,
                                         std::uint64_t* value) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(name, value);
    *value = number_at(report_of(*hold(checkpointer)), name);
  });
}

void forebay_checkpointer_destroy(forebay_checkpointer* checkpointer) {
  api::close(checkpointer, __func__);
}
