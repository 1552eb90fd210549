#include "runtime/api/options.h"

#include <charconv>
#include <nlohmann/json.hpp>
#include <span>
#include <variant>

#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/api/objects.h"

namespace forebay::api {
namespace {

using Milliseconds = std::chrono::milliseconds;

struct Words {
  std::span<const char* const> words;
  std::uint8_t* value;  // The number of the word in an enumeration.
};
// "cpu", or "nvme:DIR[,DIR...]".
struct TierPlace {
  Tier* tier;
  std::vector<std::string>* directories;
};
// The place of an option's value. A std::uint64_t is a number of bytes.
using Place = std::variant<std::uint64_t*, int*, unsigned*, double*, bool*, std::string*, Milliseconds*,
                           std::vector<std::string>*, Words, TierPlace>;

template <typename Enum>
Words words(std::span<const char* const> list, Enum& value) {
  static_assert(sizeof(Enum) == 1);
  return {list, reinterpret_cast<std::uint8_t*>(&value)};
}

constexpr const char* kSwitch[] = {"off", "on"};
constexpr const char* kCommunicators[] = {"auto", "shm", "gloo", "nccl"};
constexpr const char* kNcclOrders[] = {"rank", "fast"};
constexpr const char* kFileEngines[] = {"auto", "io_uring", "threads"};
constexpr const char* kPlacements[] = {"keep", "partition", "partition+spill", "auto"};

struct OwnRow {
  const char* name;
  const char* help;
  Place (*place)(Options& options);
};

#define FOREBAY_OPTION(name, help, member)                 \
  OwnRow {                                                 \
    name, help, [](Options& o) -> Place { return member; } \
  }
constexpr OwnRow kRows[] = {
    FOREBAY_OPTION("device-memory", "Device budget; 0: all memory of the device", &o.device_memory),
    FOREBAY_OPTION("granularity", "Smallest mapping of a host or model device; 0: 2MiB", &o.granularity),
    FOREBAY_OPTION("guard", "A host device on which the memory of a released unit is inaccessible; for tests",
                   &o.guard),

    FOREBAY_OPTION("rank", "This rank's number; -1: by the launcher's environment", &o.process.rank),
    FOREBAY_OPTION("size", "Number of ranks; 0: by the launcher's environment", &o.process.size),
    FOREBAY_OPTION("local-rank", "This rank's number among those of its host; -1: not known", &o.local_rank),
    FOREBAY_OPTION("store", "Rendezvous store: a directory that all ranks see, or tcp://HOST:PORT[/JOB]",
                   &o.process.store),
    FOREBAY_OPTION(
        "store-prefix",
        "Goes in front of each name in the program's own rendezvous store; empty: the option store",
        &o.store_prefix),
    FOREBAY_OPTION("interface", "Network address or interface to listen on", &o.process.interface),
    FOREBAY_OPTION("configuration", "Text that must be the same on every rank", &o.process.configuration),
    FOREBAY_OPTION("deadline", "For connecting and for each operation, in milliseconds", &o.process.deadline),
    FOREBAY_OPTION("join-deadline", "For meeting, in milliseconds; 0: as deadline", &o.process.join_deadline),
    FOREBAY_OPTION("communicator", "Transport between ranks; auto: NCCL on cuda, else shm or gloo by place",
                   words(kCommunicators, o.communicator)),
    FOREBAY_OPTION("nccl-library", "Path of libnccl.so.2, for a process that has none yet", &o.nccl.library),
    FOREBAY_OPTION("nccl-order", "rank: exact sums in rank order; fast: NCCL's own order",
                   words(kNcclOrders, o.nccl.order)),

    FOREBAY_OPTION("beta1", "AdamW's beta1", &o.engine.beta1),
    FOREBAY_OPTION("beta2", "AdamW's beta2", &o.engine.beta2),
    FOREBAY_OPTION("epsilon", "AdamW's epsilon", &o.engine.epsilon),
    FOREBAY_OPTION("loss-scale", "First loss scale; fp16 only", &o.engine.loss_scale.initial),
    FOREBAY_OPTION("loss-scale-growth-interval", "Applied steps in a row after which the loss scale doubles",
                   &o.engine.loss_scale.growth_interval),
    FOREBAY_OPTION("loss-scale-minimum", "Least loss scale", &o.engine.loss_scale.minimum),
    FOREBAY_OPTION("host-threads", "Threads of updates on the host; 0: one for each processor",
                   &o.engine.host_threads),
    FOREBAY_OPTION("near-device", "Host threads and pinned memory near the device", &o.engine.near_device),
    FOREBAY_OPTION("counts-replicated", "This tensor-parallel rank counts replicated parameters in the norm",
                   &o.engine.counts_replicated),
    FOREBAY_OPTION("optional-gradients", "The trainer may leave out the gradient of any parameter",
                   &o.engine.optional_gradients),
    FOREBAY_OPTION("find-non-finite", "Search each gradient for elements that are not finite; slow",
                   &o.engine.find_non_finite),

    FOREBAY_OPTION("arena-limit", "Most physical memory of an arena; 0: all of the device",
                   &o.arena.limit_bytes),
    FOREBAY_OPTION("arena-reserve", "Address range of an arena; 0: sixteen times the limit",
                   &o.arena.reserve_bytes),
    FOREBAY_OPTION("arena-chunk", "Smallest chunk of an arena; 0: the granularity", &o.arena.chunk_bytes),
    FOREBAY_OPTION("arena-growth", "Memory that transient blocks take at a time; 0: by the limit",
                   &o.arena.growth_bytes),
    FOREBAY_OPTION("arena-largest-chunk", "Largest chunk; 0: by use", &o.arena.largest_chunk_bytes),
    FOREBAY_OPTION("arena-history", "Latest events in a snapshot, a number", &o.arena.history_count),

    FOREBAY_OPTION("pinned-limit", "Most memory of a pinned pool; 0: all that the host can give",
                   &o.pinned.limit_bytes),
    FOREBAY_OPTION("pinned-slab", "Memory that a pinned pool takes at once", &o.pinned.slab_bytes),
    FOREBAY_OPTION("pinned-numa-node", "NUMA node of a pinned pool; -1: nearest to the device",
                   &o.pinned.numa_node),
    FOREBAY_OPTION("pinned-huge-pages", "Huge pages in a pinned pool", &o.pinned.huge_pages),

    FOREBAY_OPTION("activation-micro-batches", "Micro-batches with saved activations at the same time",
                   &o.activations.plan.micro_batches),
    FOREBAY_OPTION("activation-look-ahead", "Activations fetched ahead; -1: by the declared times",
                   &o.activations.plan.look_ahead),
    FOREBAY_OPTION("activation-fetch-bytes-per-second",
                   "Speed from the tier of spilled activations, for that choice",
                   &o.activations.plan.fetch_bytes_per_second),
    FOREBAY_OPTION("activation-gather-bytes-per-second",
                   "Speed of gathering partitioned activations, for that choice",
                   &o.activations.plan.gather_bytes_per_second),
    FOREBAY_OPTION("activation-leases", "Loaded activations alive at the same time",
                   &o.activations.plan.lease_limit),
    FOREBAY_OPTION("activation-staging-count", "Device buffers from which activations are spilled",
                   &o.activations.plan.staging_count),
    FOREBAY_OPTION("activation-tier", "Place of spilled activations",
                   (TierPlace{&o.activations.plan.tier, &o.activations.directories})),
    FOREBAY_OPTION("activation-device-memory", "Budget of a checkpointer on the device; 0: none",
                   &o.activations.plan.device_bytes),
    FOREBAY_OPTION("activation-host-memory", "Budget of a checkpointer in pinned memory; 0: none",
                   &o.activations.plan.host_bytes),
    FOREBAY_OPTION("activation-file-staging", "Pinned memory between the device and files",
                   &o.activations.plan.file_staging_bytes),
    FOREBAY_OPTION("activation-region", "The trainer gives the checkpointer its device memory",
                   &o.activations.in_region),
    FOREBAY_OPTION("activation-placement", "Where an activation waits for the backward pass",
                   words(kPlacements, o.slot.placement)),
    FOREBAY_OPTION("activation-shared", "All tensor-parallel ranks save the same bytes", &o.slot.shared),
    FOREBAY_OPTION("activation-spill-fraction", "Part of a slice to spill, 0 to 1", &o.slot.spill_fraction),
    FOREBAY_OPTION("activation-state-bytes", "Longest record that is saved with an activation",
                   &o.slot.state_bytes),
    FOREBAY_OPTION("activation-recompute-seconds", "Time of an activation's recomputation and backward pass",
                   &o.slot.recompute_seconds),

    FOREBAY_OPTION("store-directories", "Directories of a file store, separated by commas",
                   &o.store.directories),
    FOREBAY_OPTION("store-engine", "How a file store reads and writes", words(kFileEngines, o.store.engine)),
    FOREBAY_OPTION("store-block", "Most that one operation of a file store moves", &o.store.block_bytes),
    FOREBAY_OPTION("store-depth", "Operations of a file store in flight", &o.store.depth),
    FOREBAY_OPTION("store-checksums", "Bytes read are compared with bytes written", &o.store.checksums),
    FOREBAY_OPTION("store-direct", "A file store bypasses the page cache", &o.store.direct),
};
#undef FOREBAY_OPTION

// The names of agreement pairs.
constexpr std::string_view kAgree = "agree.";

const OwnRow* find_row(std::string_view name) {
  for (const OwnRow& row : kRows) {
    if (name == row.name) return &row;
  }
  return nullptr;
}

template <typename Number>
bool parse_number(const std::string& text, Number& number) {
  Number read{};
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, read);
  if (result.ec != std::errc() || result.ptr != end) return false;
  number = read;
  return true;
}

template <typename... Cases>
struct Overload : Cases... {
  using Cases::operator()...;
};
template <typename... Cases>
Overload(Cases...) -> Overload<Cases...>;

std::string list_of(std::span<const char* const> list) {
  std::string text;
  for (const char* const word : list) text += (text.empty() ? "" : "|") + std::string(word);
  return text;
}

std::string values_of(const Place& place) {
  return std::visit(
      Overload{[](std::uint64_t*) -> std::string { return "BYTES"; }, [](int*) -> std::string { return "N"; },
               [](unsigned*) -> std::string { return "N"; }, [](double*) -> std::string { return "NUMBER"; },
               [](bool*) { return list_of(kSwitch); }, [](std::string*) -> std::string { return "TEXT"; },
               [](Milliseconds*) -> std::string { return "MILLISECONDS"; },
               [](std::vector<std::string>*) -> std::string { return "DIR[,DIR...]"; },
               [](const Words& w) { return list_of(w.words); },
               [](const TierPlace&) -> std::string { return "cpu|nvme:DIR[,DIR...]"; }},
      place);
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

bool parse(const Place& place, const std::string& text) {
  return std::visit(Overload{[&](std::uint64_t* bytes) { return parse_bytes(text.c_str(), bytes); },
                             [&](bool* value) {
                               *value = text == kSwitch[1];
                               return *value || text == kSwitch[0];
                             },
                             [&](std::string* value) {
                               *value = text;
                               return true;
                             },
                             [&](Milliseconds* value) {
                               std::uint32_t count = 0;
                               if (!parse_number(text, count)) return false;
                               *value = Milliseconds(count);
                               return true;
                             },
                             [&](std::vector<std::string>* value) {
                               *value = split(text);
                               return !value->empty();
                             },
                             [&](const Words& w) {
                               for (std::size_t i = 0; i < w.words.size(); ++i) {
                                 if (text != w.words[i]) continue;
                                 *w.value = static_cast<std::uint8_t>(i);
                                 return true;
                               }
                               return false;
                             },
                             [&](const TierPlace& tier) {
                               ShardingOptions scratch;
                               if (!set_option(scratch, "offload-tier", text).ok()) return false;
                               *tier.tier = scratch.tier;
                               *tier.directories = scratch.offload_directories;
                               return true;
                             },
                             [&](auto* number) { return parse_number(text, *number); }},
                    place);
}

std::string print(const Place& place) {
  return std::visit(Overload{[](bool* value) -> std::string { return kSwitch[*value ? 1 : 0]; },
                             [](std::string* value) { return *value; },
                             [](Milliseconds* value) { return std::to_string(value->count()); },
                             [](double* value) { return nlohmann::json(*value).dump(); },
                             [](std::vector<std::string>* value) {
                               std::string text;
                               for (const std::string& part : *value)
                                 text += (text.empty() ? "" : ",") + part;
                               return text;
                             },
                             [](const Words& w) -> std::string { return w.words[*w.value]; },
                             [](const TierPlace& tier) {
                               ShardingOptions scratch;
                               scratch.tier = *tier.tier;
                               scratch.offload_directories = *tier.directories;
                               return option_text(scratch, "offload-tier");
                             },
                             [](auto* number) { return std::to_string(*number); }},
                    place);
}

std::vector<std::string> all_names() {
  std::vector<std::string> names;
  for (const OptionRow& row : sharding_option_table()) names.emplace_back(row.name);
  for (const OwnRow& row : kRows) names.emplace_back(row.name);
  return names;
}

Status unknown(std::string_view name) {
  for (const char* const value : {"lr", "weight-decay", "clip", "gradient-factor", "metric", "stop"}) {
    if (name == value) {
      return {StatusCode::kInvalidArgument, "there is no option " + std::string(name) +
                                                ", because it may change at each step; give it to "
                                                "forebay_hyperparameter() after forebay_engine_commit()"};
    }
  }
  const std::string nearest =
      name == "ranks" || name == "world-size" ? "size" : nearest_name(name, all_names());
  return {StatusCode::kInvalidArgument,
          "there is no option " + shown_value(name) + "; " +
              (nearest.empty() ? "forebay_options_report() lists all" : "did you mean " + nearest + "?")};
}

}  // namespace

Status Options::set(std::string_view name, const std::string& value) {
  if (find_option(name) != nullptr) return set_option(engine, name, value);
  if (name.starts_with(kAgree) && name.size() > kAgree.size()) {
    const std::string_view word = name.substr(kAgree.size());
    std::erase_if(engine.agreement, [&](const auto& pair) { return pair.first == word; });
    engine.agreement.emplace_back(word, value);
    return {};
  }
  const OwnRow* const row = find_row(name);
  if (row == nullptr) return unknown(name);
  Options changed = *this;
  const Place place = row->place(changed);
  if (!parse(place, value)) {
    return {StatusCode::kInvalidArgument,
            std::string(name) + " is " + shown_value(value) + "; use " + values_of(place)};
  }
  *this = std::move(changed);
  return {};
}

Result<std::string> Options::text(std::string_view name) const {
  if (find_option(name) != nullptr) return option_text(engine, name);
  for (const auto& [word, value] : engine.agreement) {
    if (name == std::string(kAgree) + word) return value;
  }
  const OwnRow* const row = find_row(name);
  if (row == nullptr) return unknown(name);
  Options copy = *this;
  return print(row->place(copy));
}

std::string Options::json() const {
  auto list = nlohmann::ordered_json::array();
  const auto add = [&](const char* name, const std::string& values, const char* help) {
    list.push_back({{"name", name}, {"value", text(name).value()}, {"values", values}, {"help", help}});
  };
  for (const OptionRow& row : sharding_option_table()) add(row.name, option_values(row), row.help);
  Options copy = *this;
  for (const OwnRow& row : kRows) add(row.name, values_of(row.place(copy)), row.help);
  return list.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

Status Options::read_environment() {
  Result<LaunchEnvironment> read = read_launch_environment();
  FOREBAY_RETURN_IF_ERROR(read.status());
  LaunchEnvironment& environment = read.value();
  process.rank = environment.rank;
  process.size = environment.size;
  local_rank = environment.local_rank;
  process.store = std::move(environment.store);
  process.interface = std::move(environment.interface);
  return {};
}

Options options_of(forebay_options* options) {
  return options == nullptr ? Options() : hold(options)->options;
}

}  // namespace forebay::api

using namespace forebay;       // NOLINT: the functions below are of the global namespace.
using namespace forebay::api;  // NOLINT

std::int32_t forebay_options_create(forebay_options** options) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(options);
    *options = make_handle<forebay_options>(std::make_shared<OptionsObject>());
  });
}

std::int32_t forebay_options_set(forebay_options* options, const char* name, const char* value) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(name, value);
    throw_if_error(hold(options)->options.set(name, value));
  });
}

std::int32_t forebay_options_get(forebay_options* options, const char* name, const char** value) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(name, value);
    const auto held = hold(options);
    *value = held->give(value_or_throw(held->options.text(name)));
  });
}

std::int32_t forebay_options_from_environment(forebay_options* options) {
  return guarded(__func__, [&] { throw_if_error(hold(options)->options.read_environment()); });
}

std::int32_t forebay_options_report(forebay_options* options, const char** json) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(json);
    const auto held = hold(options);
    *json = held->give(held->options.json());
  });
}

void forebay_options_destroy(forebay_options* options) {
  api::close(options, __func__);
}
