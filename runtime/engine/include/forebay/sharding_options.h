// ShardingOptions: how a model's states are divided over ranks, host memory and files. The options of a plan,
// of an engine and of forebay-gpt contain them.
//
// One table describes every option: its name, its values, the text that explains it, and where it counts.
// Command lines, the agreement between ranks, the fingerprint of a plan and the JSON of reports are made from
// it. A new option is a member of ShardingOptions and a row of the table (sharding_options.cc).
//
//   ShardingOptions options;
//   throw_if_error(set_option(options, "order", "group:4"));
//   option_text(options, "bucket");  // "16MiB"
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "forebay/data_type.h"
#include "forebay/moments.h"
#include "forebay/optimizer.h"
#include "forebay/span.h"
#include "forebay/status.h"

namespace forebay {

// A step of more micro-steps would not end in a day; a plan walks through all of them.
constexpr std::uint64_t kMicroStepsMost = 1'000'000;

// Where the gradients of micro-steps are added (ARCHITECTURE.md, "The numeric contract").
enum class Accumulate : std::uint8_t {
  kShard,  // Every micro-step is reduced; the owner adds in fp32. All stages.
  kLocal,  // Each rank adds locally in the gradient type; one reduction a step. Stages 0 and 1.
};

// Which states are offloaded.
enum class Offload : std::uint8_t {
  kNone,
  kOptimizer,               // fp32 master, m and v: the update runs on the host.
  kOptimizerAndParameters,  // Stage 3: the parameter shard too, which is copied to the device for each
                            // gather.
};

// Where offloaded states are kept.
enum class Tier : std::uint8_t {
  kPinned,  // Pinned host memory.
  kFile,    // Files. Gradients still wait for their unit's update in pinned memory.
};

// The order in which a trainer may lease units (engine.h, "Order").
enum class OrderOfUnits : std::uint8_t {
  kStrict,    // Forward in order of registration, backward in the reverse order, one lease at a time.
  kRecorded,  // Any order, and several leases at once. The first step's order is recorded.
};

// The number that the sum of a step's gradients is divided by.
enum class Average : std::uint8_t {
  kRanksAndMicroSteps,  // Ranks times micro-steps: the trainer does not divide.
  kRanks,               // Ranks: the trainer divides its losses by the number of micro-steps.
};

struct ShardingOptions {
  int stage = 0;  // ZeRO stage: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 parameters too.
  DataType dtype = DataType::kFloat32;  // Type of parameters and gradients. 2-byte types get an fp32 master.
  // SGD and Lion have no v: 8 bytes of master and m for each element, where the formulas have 12. Adafactor
  // has a master alone, 4 bytes, and a few factors for each parameter (adafactor.h). Muon has master and
  // m for matrices, and v too for other parameters.
  Optimizer optimizer = Optimizer::kAdamW;
  // Muon: steps of matrices have the size of AdamW's, so its learning rates fit. False: the original factor
  // (muon.h).
  bool muon_matches_rms = false;
  // How m and v are kept between steps, on the device, on the host and in files. Formats narrower than fp32
  // are rounded by dithering (moments.h). Each format gives its own result.
  MomentFormat moments = MomentFormat::kFloat32;
  // False: a bf16 parameter is its own master, rounded by dithering (HalfMaster). bf16 only.
  bool master_weights = true;
  // The decay of an exponential moving average of the masters, up to below 1; 0: none. It is in fp32, lies
  // where m and v lie, and every applied step moves it: average = fma(1 - ema, master - average, average).
  double ema = 0.0;
  // K: forward and backward passes per step. In recorded order it is the most; step() takes those that were.
  int micro_steps = 1;
  // Forward passes that run ahead of an earlier micro-step's backward pass (engine.h). At stage 3 they change
  // how often units are gathered.
  int forwards_ahead = 0;
  Accumulate accumulate = Accumulate::kShard;
  Average average = Average::kRanksAndMicroSteps;
  OrderOfUnits order_of_units = OrderOfUnits::kStrict;
  // OrderOfUnits::kRecorded: Engine::recorded_order() of an earlier run of the same model, for an exact plan
  // and for gathers ahead of their use from the first step on. Empty: units are expected in order of
  // registration until a step has been recorded.
  std::string recorded_order;
  // OrderOfUnits::kRecorded without a recorded order: the units leased at once that the plan has room for.
  // The engine takes more room, up to its budget, if a trainer leases more.
  int units_at_once = 1;
  // Gradients are added within all-reduce groups of this many consecutive ranks first, then across the groups
  // (grouped_communicator.h). 1: in rank order. Each order gives its own result; within one order all stages
  // agree bit for bit.
  int group = 1;
  // Hybrid sharding: the stage shards over the ranks of an all-reduce group, and each group has a full copy.
  // The result is that of the same groups without it.
  bool shard_within_group = false;
  // One bucket: all ranks' slices of a column range, rounded to 512 columns.
  std::uint64_t bucket_bytes = 16u << 20;
  // Engine only: commit() chooses bucket_bytes, 256 KiB to 64 MiB, from the latency and bandwidth that rank 0
  // measures, so that latency is a twentieth of a collective. Same result. One rank keeps bucket_bytes.
  bool bucket_auto = false;
  Offload offload = Offload::kNone;
  Tier tier = Tier::kPinned;
  // Tier kFile: directories of the anonymous files; states are striped over several. May differ between
  // ranks.
  std::vector<std::string> offload_directories;
  // Fraction of the elements to offload, 0 to 1, rounded up to whole units. The first units stay on the
  // device, because the next step needs them first.
  double offload_fraction = 1.0;
  // Engine only: commit() chooses offload_fraction. It measures the updates on the device and on the host and
  // divides the elements so that both take equally long; it offloads more where the budget demands it.
  bool offload_auto = false;
  // Tier kFile: pinned host memory that states pass through, at most. A smaller one moves smaller pieces.
  std::uint64_t staging_bytes = 96u << 20;
  // Engine::spill works. Each pool has chunks of its own: up to one chunk more device memory per pool.
  bool spillable = false;
  // Engine::save_state_begin works. It takes pinned host memory: HostBytes::saving.
  bool save_async = false;
  bool overlap = true;  // Engine only. False: every collective is waited for where it is issued. Same result.
  std::uint64_t memory_bytes = 0;  // Engine only: device budget of this rank; 0: all memory of the device.
  // Device memory that a cuda device keeps free for the driver: for the program that opens the device
  // (CudaBackendOptions::room_bytes). The engine finds it taken off Capabilities::memory_bytes.
  std::uint64_t room_bytes = 384u << 20;
};

// The programs that have an option on their command line; a row combines them by `|`.
enum OptionProgram : unsigned {
  kNoProgram = 0,  // The libraries only.
  kPlanProgram = 1,
  kGptProgram = 2,
  kBenchTiersProgram = 4,
};

using OptionMember =
    std::variant<int ShardingOptions::*, bool ShardingOptions::*, double ShardingOptions::*,
                 std::uint64_t ShardingOptions::*, DataType ShardingOptions::*, Accumulate ShardingOptions::*,
                 Offload ShardingOptions::*, Tier ShardingOptions::*, Average ShardingOptions::*,
                 OrderOfUnits ShardingOptions::*, Optimizer ShardingOptions::*,
                 MomentFormat ShardingOptions::*>;

struct OptionRow {
  const char* name;     // As on command lines, without dashes: "micro-steps".
  const char* heading;  // The part of a help text that lists it.
  const char* help;     // Purpose, and unit where there is one; no full stop at the end.
  unsigned programs;    // OptionProgram.
  OptionMember member;
  Span<const char* const> words;  // Values in order of the member's; empty: a number or a size.
  const char* values;             // Placeholder for help, "BYTES|auto"; null: the words.
  const char* allowed;            // For messages, "1 to 1000000"; null: the words.
  std::uint64_t least = 0;        // Range of a number.
  std::uint64_t most = ~std::uint64_t{0};
  bool is_memory = false;  // Memory of a device or a host: a bare small number is a mistake.
  bool ShardingOptions::*automatic = nullptr;  // Set by the value "auto".
  // Where the member alone does not say how to read and write it. `parse` returns false for other text.
  bool (*parse)(std::string_view value, ShardingOptions& options) = nullptr;
  std::string (*print)(const ShardingOptions& options) = nullptr;
  bool agreed = false;               // All ranks must have the same value.
  bool in_fingerprint = false;       // So must the ranks that share one plan (Plan::fingerprint_text).
  const char* report_key = nullptr;  // Key in JSON reports; null: not reported.
};

// All options, in the order of help texts.
Span<const OptionRow> sharding_option_table() noexcept;

// Null when there is no option of this name.
const OptionRow* find_option(std::string_view name) noexcept;

// Whether the option is "on" or "off": a flag on command lines, --no-NAME where it is on by default.
bool is_switch(const OptionRow& row) noexcept;

// Sets one option from text, as a command line does: set_option(options, "offload-tier", "nvme:/a,/b").
//
// Units: sizes as parse_bytes() reads them. Errors: kInvalidArgument, `options` unchanged: the message begins
// with the option's name and ends with its allowed values, or names the nearest option when there is none of
// this name.
Status set_option(ShardingOptions& options, std::string_view name, std::string_view value);

// The value as set_option() reads it back. Requires: an option of this name.
std::string option_text(const ShardingOptions& options, std::string_view name);

// The values an option may have, for help: "fp32|bf16|fp16", "BYTES|auto".
std::string option_values(const OptionRow& row);

// The value as JSON: a number, true, false, or a word in quotes. Directories are left out.
std::string option_json(const ShardingOptions& options, const OptionRow& row);

// "name value" lines of the rows that have `part` set, directories and measured numbers left out: equal text
// on two ranks means equal options.
std::string option_lines(const ShardingOptions& options, bool OptionRow::*part);

// Checks ranges, and which options go together.
//
// Errors: kInvalidArgument; the message begins with an option's name.
Status check_sharding_options(const ShardingOptions& options);
// Refuses options that say how to offload if nothing is offloaded. Errors: kInvalidArgument; the message
// begins with the option. `dashes`: "--" for a command line, in front of each option.
Status check_offload_given(const ShardingOptions& options, const std::string& dashes = "");

const char* offload_name(Offload offload) noexcept;           // "none", "optimizer", "optimizer+parameters"
const char* tier_name(Tier tier) noexcept;                    // "cpu", "nvme"
const char* accumulate_name(Accumulate accumulate) noexcept;  // "shard", "local"
const char* average_name(Average average) noexcept;           // "ranks+micro-steps", "ranks"
const char* order_name(OrderOfUnits order) noexcept;          // "strict", "recorded"

}  // namespace forebay
