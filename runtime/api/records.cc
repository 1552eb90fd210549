// Timelines and file stores.

#include <algorithm>

#include "runtime/api/objects.h"
#include "runtime/api/report.h"

using namespace forebay;       // NOLINT: the functions below are of the global namespace.
using namespace forebay::api;  // NOLINT

std::int32_t forebay_timeline_create(forebay_timeline** timeline) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(timeline);
    *timeline = make_handle<forebay_timeline>(std::make_shared<TimelineObject>());
  });
}

std::int32_t forebay_timeline_begin(forebay_timeline* timeline, const char* track) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(track);
    share(timeline)->timeline.begin(track);
  });
}

std::int32_t forebay_timeline_end(forebay_timeline* timeline, const char* track, const char* name) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(track, name);
    share(timeline)->timeline.end(track, name);
  });
}

std::int32_t forebay_timeline_report(forebay_timeline* timeline, const char** json) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(json);
    const auto held = share(timeline);
    const std::vector<Timeline::Span> spans = held->timeline.spans();
    *json = held->give(timeline_json({&spans, 1}));
  });
}

void forebay_timeline_destroy(forebay_timeline* timeline) {
  api::close(timeline, __func__);
}

std::int32_t forebay_file_store_create(forebay_options* options, forebay_file_store** store) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(store);
    const Options given = hold(options)->options;
    auto made = std::make_shared<StoreObject>();
    made->store = value_or_throw(make_file_store(given.store));
    *store = make_handle<forebay_file_store>(std::move(made));
  });
}

std::int32_t forebay_file_store_range(forebay_file_store* store, const char* name, std::uint64_t bytes,
                                      std::uint32_t* range) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(name, range);
    *range = value_or_throw(share(store)->store->create_range(name, bytes)).index;
  });
}

std::int32_t forebay_file_store_read(forebay_file_store* store, std::uint32_t range, std::uint64_t offset,
                                     void* memory, std::uint64_t bytes, std::uint64_t* ticket) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(memory, ticket);
    *ticket =
        value_or_throw(share(store)->store->read({range}, offset, static_cast<std::byte*>(memory), bytes)).id;
  });
}

std::int32_t forebay_file_store_write(forebay_file_store* store, std::uint32_t range, std::uint64_t offset,
                                      const void* memory, std::uint64_t bytes, std::uint64_t* ticket) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(memory, ticket);
    *ticket = value_or_throw(
                  share(store)->store->write({range}, offset, static_cast<const std::byte*>(memory), bytes))
                  .id;
  });
}

std::int32_t forebay_file_store_wait(forebay_file_store* store, std::uint64_t ticket,
                                     std::uint64_t deadline) {
  return guarded(__func__, [&] {
    constexpr std::uint64_t kDay = 86'400'000;
    const std::chrono::milliseconds limit(std::min(deadline, kDay));
    throw_if_error(share(store)->store->wait({ticket}, limit));
  });
}

std::int32_t forebay_file_store_report(forebay_file_store* store, const char** json) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(json);
    const auto held = share(store);
    const StoreFacts facts = held->store->facts();
    const StoreStatistics s = held->store->statistics();
    *json = held->give(dump({{"description", facts.description},
                             {"granule_bytes", facts.granule_bytes},
                             {"alignment_bytes", facts.alignment_bytes},
                             {"block_bytes", facts.block_bytes},
                             {"depth", facts.depth},
                             {"transfer_limit", facts.transfer_limit},
                             {"checksums", facts.checksums},
                             {"registered_bytes", facts.registered_bytes},
                             {"read_bytes", s.read_bytes},
                             {"written_bytes", s.written_bytes},
                             {"read_count", s.read_count},
                             {"write_count", s.write_count},
                             {"bounced_bytes", s.bounced_bytes},
                             {"failed_count", s.failed_count},
                             {"range_bytes", s.range_bytes}}));
  });
}

void forebay_file_store_destroy(forebay_file_store* store) {
  api::close(store, __func__);
}
