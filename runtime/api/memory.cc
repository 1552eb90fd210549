// Arenas and pinned pools.

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "runtime/api/objects.h"
#include "runtime/api/report.h"

using namespace forebay;       // NOLINT: the functions below are of the global namespace.
using namespace forebay::api;  // NOLINT

namespace {

DevicePtr device_address(void* address) {
  return static_cast<DevicePtr>(address);
}

Tag tag_of(std::int32_t tag) {
  if (tag < 0 || static_cast<std::size_t>(tag) >= kTagLimit)
    misuse("tag is " + std::to_string(tag) + "; use 0, or one that forebay_arena_tag_create() gave");
  return static_cast<Tag>(tag);
}

void check_flags(std::int32_t flags, std::int32_t known) {
  if ((flags & ~known) != 0)
    misuse("flags is " + std::to_string(flags) + "; combine those of this function, or give 0");
}

Json json_of(const ArenaStatistics& s) {
  return {{"live_bytes", s.live_bytes},
          {"peak_live_bytes", s.peak_live_bytes},
          {"requested_bytes", s.requested_bytes},
          {"peak_requested_bytes", s.peak_requested_bytes},
          {"reserved_bytes", s.reserved_bytes},
          {"peak_reserved_bytes", s.peak_reserved_bytes},
          {"allocation_count", s.allocation_count},
          {"driver_call_count", s.driver_call_count},
          {"moved_chunk_count", s.moved_chunk_count},
          {"recalled_count", s.recalled_count},
          {"refinement_count", s.refinement_count}};
}

Json report_of(ArenaObject& arena) {
  Json json = json_of(arena.arena->statistics());
  json["chunk_bytes"] = arena.arena->chunk_bytes();
  json["tags"] = Json::object();
  const std::lock_guard lock(arena.mutex);
  for (const auto& [name, tag] : arena.tags) json["tags"][name] = json_of(arena.arena->statistics(tag));
  json["text"] = arena.arena->report();
  return json;
}

Json report_of(PoolObject& pool) {
  const PinnedPoolStatistics s = pool.pool->statistics();
  return {{"requested_bytes", s.requested_bytes},
          {"peak_requested_bytes", s.peak_requested_bytes},
          {"live_bytes", s.live_bytes},
          {"pending_bytes", s.pending_bytes},
          {"held_bytes", s.held_bytes},
          {"peak_held_bytes", s.peak_held_bytes},
          {"slab_count", s.slab_count},
          {"huge_page_bytes", s.huge_page_bytes},
          {"allocation_count", s.allocation_count},
          {"pin_count", s.pin_count},
          {"text", pool.pool->report()}};
}

}  // namespace

std::int32_t forebay_arena_create(forebay_device* device, forebay_options* options, forebay_arena** arena) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(arena);
    auto made = std::make_shared<ArenaObject>();
    made->device = share(device).keep();
    made->arena = value_or_throw(Arena::create(*made->device->backend, options_of(options).arena));
    *arena = make_handle<forebay_arena>(std::move(made));
  });
}

std::int32_t forebay_arena_allocate(forebay_arena* arena, std::uint64_t bytes, void* stream, std::int32_t tag,
                                    std::int32_t flags, void** block) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(block);
    check_flags(flags, FOREBAY_PERSISTENT | FOREBAY_FIXED);
    const auto held = share(arena);
    AllocationRequest request{.bytes = bytes, .tag = tag_of(tag)};
    request.region = (flags & FOREBAY_PERSISTENT) != 0 ? Region::kPersistent : Region::kTransient;
    request.fixed = (flags & FOREBAY_FIXED) != 0;
    request.stream = held->device->stream_or_none(stream);
    *block = value_or_throw(held->arena->allocate(request));
  });
}

std::int32_t forebay_arena_free(forebay_arena* arena, void* block, void* stream) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(block);
    const auto held = share(arena);
    throw_if_error(held->arena->free(device_address(block), held->device->stream_or_none(stream)));
  });
}

std::int32_t forebay_arena_record_stream(forebay_arena* arena, void* block, void* stream) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(block);
    const auto held = share(arena);
    throw_if_error(held->arena->record_stream(device_address(block), held->device->stream(stream)));
  });
}

std::int32_t forebay_arena_retire_stream(forebay_arena* arena, void* stream) {
  return guarded(__func__, [&] {
    const auto held = share(arena);
    throw_if_error(held->arena->stream_retire(held->device->stream(stream)));
  });
}

std::int32_t forebay_arena_block_bytes(forebay_arena* arena, void* block, std::uint64_t* bytes) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(block, bytes);
    *bytes = share(arena)->arena->block_bytes(device_address(block));
  });
}

std::int32_t forebay_arena_tag_create(forebay_arena* arena, const char* name, std::uint64_t limit_bytes,
                                      std::int32_t flags, std::int32_t* tag) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(name, tag);
    check_flags(flags, FOREBAY_PAUSABLE);
    const auto held = share(arena);
    const Tag made =
        value_or_throw(held->arena->tag_create(TagOptions{name, limit_bytes, flags == FOREBAY_PAUSABLE}));
    const std::lock_guard lock(held->mutex);
    held->tags.emplace_back(name, made);
    *tag = made;
  });
}

std::int32_t forebay_arena_pause(forebay_arena* arena, std::int32_t tag, std::int32_t keep) {
  return guarded(__func__, [&] { throw_if_error(share(arena)->arena->pause(tag_of(tag), keep != 0)); });
}

std::int32_t forebay_arena_resume(forebay_arena* arena, std::int32_t tag) {
  return guarded(__func__, [&] { throw_if_error(share(arena)->arena->resume(tag_of(tag))); });
}

std::int32_t forebay_arena_slot_create(forebay_arena* arena, std::uint64_t bytes, std::int32_t tag,
                                       std::uint32_t* slot) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(slot);
    *slot = value_or_throw(share(arena)->arena->slot_create(bytes, tag_of(tag))).index;
  });
}

std::int32_t forebay_arena_slot_destroy(forebay_arena* arena, std::uint32_t slot) {
  return guarded(__func__, [&] { throw_if_error(share(arena)->arena->slot_destroy({slot})); });
}

std::int32_t forebay_arena_alias_create(forebay_arena* arena, std::uint32_t slot, std::uint64_t bytes,
                                        void** alias) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(alias);
    *alias = value_or_throw(share(arena)->arena->alias_create({slot}, bytes));
  });
}

std::int32_t forebay_arena_alias_move(forebay_arena* arena, void* alias, std::uint32_t slot) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(alias);
    throw_if_error(share(arena)->arena->alias_move(device_address(alias), {slot}));
  });
}

std::int32_t forebay_arena_alias_destroy(forebay_arena* arena, void* alias) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(alias);
    throw_if_error(share(arena)->arena->alias_destroy(device_address(alias)));
  });
}

std::int32_t forebay_arena_capture_begin(forebay_arena* arena, void* stream, std::uint32_t* capture) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(capture);
    const auto held = share(arena);
    *capture = value_or_throw(held->arena->capture_begin(held->device->stream(stream))).index;
  });
}

std::int32_t forebay_arena_capture_end(forebay_arena* arena, std::uint32_t capture) {
  return guarded(__func__, [&] { throw_if_error(share(arena)->arena->capture_end({capture})); });
}

std::int32_t forebay_arena_capture_release(forebay_arena* arena, std::uint32_t capture) {
  return guarded(__func__, [&] { throw_if_error(share(arena)->arena->capture_release({capture})); });
}

std::int32_t forebay_arena_trim(forebay_arena* arena, std::uint64_t* freed_bytes) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(freed_bytes);
    *freed_bytes = share(arena)->arena->trim();
  });
}

std::int32_t forebay_arena_reset_peaks(forebay_arena* arena) {
  return guarded(__func__, [&] { share(arena)->arena->reset_peaks(); });
}

std::int32_t forebay_arena_number(forebay_arena* arena, const char* name, std::uint64_t* value) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(name, value);
    *value = number_at(report_of(*share(arena)), name);
  });
}

std::int32_t forebay_arena_report(forebay_arena* arena, const char** json) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(json);
    const auto held = share(arena);
    *json = held->give(dump(report_of(*held)));
  });
}

std::int32_t forebay_arena_snapshot(forebay_arena* arena, const char* path) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(path);
    const MemorySnapshot snapshot = share(arena)->arena->snapshot();
    const int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file < 0) {
      throw Error(StatusCode::kIoError, std::string("cannot write ") + path + ": " + std::strerror(errno) +
                                            "; give a path in a directory that may be written");
    }
    const Status status = write_memory_snapshot(snapshot, file);
    const bool is_closed = ::close(file) == 0;
    throw_if_error(status);
    if (!is_closed) {
      throw Error(StatusCode::kIoError, std::string("cannot write ") + path + ": " + std::strerror(errno) +
                                            "; give a path on a file system that works and has room");
    }
  });
}

void forebay_arena_destroy(forebay_arena* arena) {
  api::close(arena, __func__);
}

std::int32_t forebay_pinned_pool_create(forebay_device* device, forebay_options* options,
                                        forebay_pinned_pool** pool) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(pool);
    auto made = std::make_shared<PoolObject>();
    made->device = share(device).keep();
    made->pool = value_or_throw(PinnedPool::create(*made->device->backend, options_of(options).pinned));
    *pool = make_handle<forebay_pinned_pool>(std::move(made));
  });
}

std::int32_t forebay_pinned_pool_allocate(forebay_pinned_pool* pool, std::uint64_t bytes, void** block) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(block);
    *block = value_or_throw(share(pool)->pool->allocate(bytes));
  });
}

std::int32_t forebay_pinned_pool_free(forebay_pinned_pool* pool, void* block, void* stream) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(block);
    const auto held = share(pool);
    throw_if_error(held->pool->free(block, held->device->stream_or_none(stream)));
  });
}

std::int32_t forebay_pinned_pool_prewarm(forebay_pinned_pool* pool, std::uint64_t bytes,
                                         std::uint64_t block_bytes) {
  return guarded(__func__, [&] { throw_if_error(share(pool)->pool->prewarm(bytes, block_bytes)); });
}

std::int32_t forebay_pinned_pool_trim(forebay_pinned_pool* pool, std::uint64_t* freed_bytes) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(freed_bytes);
    *freed_bytes = share(pool)->pool->trim();
  });
}

std::int32_t forebay_pinned_pool_block_bytes(forebay_pinned_pool* pool, const void* block,
                                             std::uint64_t* bytes) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(block, bytes);
    *bytes = share(pool)->pool->block_bytes(block);
  });
}

std::int32_t forebay_pinned_pool_reset_peaks(forebay_pinned_pool* pool) {
  return guarded(__func__, [&] { share(pool)->pool->reset_peaks(); });
}

std::int32_t forebay_pinned_pool_number(forebay_pinned_pool* pool, const char* name, std::uint64_t* value) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(name, value);
    *value = number_at(report_of(*share(pool)), name);
  });
}

std::int32_t forebay_pinned_pool_report(forebay_pinned_pool* pool, const char** json) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(json);
    const auto held = share(pool);
    *json = held->give(dump(report_of(*held)));
  });
}

void forebay_pinned_pool_destroy(forebay_pinned_pool* pool) {
  api::close(pool, __func__);
}
