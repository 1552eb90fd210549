#include "forebay/sharding_options.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <type_traits>

#include "forebay/check.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/engine/plan/step_control.h"

namespace forebay {
namespace {

constexpr std::uint64_t kGroupMax = 1'000'000;
constexpr const char* kAuto = "auto";
constexpr std::string_view kGroupPrefix = "group:";

constexpr const char* kStages[] = {"0", "1", "2", "3"};
constexpr const char* kTypes[] = {data_type_name(DataType::kFloat32), data_type_name(DataType::kBfloat16),
                                  data_type_name(DataType::kFloat16)};
constexpr const char* kAccumulates[] = {"shard", "local"};
constexpr const char* kAverages[] = {"ranks+micro-steps", "ranks"};
constexpr const char* kOrders[] = {"strict", "recorded"};
constexpr const char* kWithin[] = {"all", "group"};
constexpr const char* kOffloads[] = {"none", "optimizer", "optimizer+parameters"};
constexpr const char* kTiers[] = {"cpu", "nvme"};
constexpr const char* kOptimizers[] = {
    optimizer_name(Optimizer::kAdamW),     optimizer_name(Optimizer::kAdam),
    optimizer_name(Optimizer::kSgd),       optimizer_name(Optimizer::kLion),
    optimizer_name(Optimizer::kAdafactor), optimizer_name(Optimizer::kMuon)};
constexpr const char* kMuonRates[] = {"original", "match-rms-adamw"};
constexpr const char* kMoments[] = {moment_format_name(MomentFormat::kFloat32),
                                    moment_format_name(MomentFormat::kBfloat16),
                                    moment_format_name(MomentFormat::kBlock8)};
constexpr const char* kSwitch[] = {"off", "on"};

template <typename Number>
bool parse_number(std::string_view text, Number& number) {
  const char* const end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, number);
  return read.ec == std::errc() && read.ptr == end;
}

bool parse_order(std::string_view text, ShardingOptions& options) {
  if (text == "rank") {
    options.group = 1;
    return true;
  }
  return text.starts_with(kGroupPrefix) && parse_number(text.substr(kGroupPrefix.size()), options.group);
}

std::string print_order(const ShardingOptions& options) {
  if (options.group == 1) return "rank";
  return std::string(kGroupPrefix) + std::to_string(options.group);
}

bool parse_tier(std::string_view text, ShardingOptions& options) {
  options.offload_directories.clear();
  options.tier = text == kTiers[0] ? Tier::kPinned : Tier::kFile;
  if (text == kTiers[0] || text == kTiers[1]) return true;
  const std::string prefix = std::string(kTiers[1]) + ":";
  if (!text.starts_with(prefix)) return false;
  for (std::size_t begin = prefix.size(); begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    if (end == begin) return false;
    options.offload_directories.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return true;
}

std::string print_tier(const ShardingOptions& options) {
  std::string text = tier_name(options.tier);
  const char* separator = ":";
  for (const std::string& directory : options.offload_directories) {
    text += separator + directory;
    separator = ",";
  }
  return text;
}

bool parse_order_of_units(std::string_view text, ShardingOptions& options) {
  const std::string prefix = std::string(kOrders[1]) + ":";
  options.recorded_order = text.starts_with(prefix) ? text.substr(prefix.size()) : "";
  options.order_of_units = text == kOrders[0] ? OrderOfUnits::kStrict : OrderOfUnits::kRecorded;
  return text == kOrders[0] || text == kOrders[1] || !options.recorded_order.empty();
}

std::string print_order_of_units(const ShardingOptions& options) {
  const std::string& order = options.recorded_order;
  return order_name(options.order_of_units) + (order.empty() ? "" : ":" + order);
}

constexpr const char* kSharding = "Sharding";
constexpr const char* kOffloading = "Offloading (the result is bit for bit the same)";
constexpr unsigned kTraining = kPlanProgram | kGptProgram;
constexpr unsigned kEverywhere = kTraining | kBenchTiersProgram;

constexpr OptionRow kTable[] = {
    {.name = "stage",
     .heading = kSharding,
     .help =
         "ZeRO stage: 0 shards nothing, 1 the optimizer states, 2 the gradients too, 3 the parameters too",
     .programs = kEverywhere,
     .member = &ShardingOptions::stage,
     .words = kStages,
     .agreed = true,
     .in_fingerprint = true,
     .report_key = "stage"},
    {.name = "dtype",
     .heading = kSharding,
     .help =
         "Type of parameters and gradients; 2-byte types keep fp32 master weights, fp16 a dynamic loss scale",
     .programs = kEverywhere,
     .member = &ShardingOptions::dtype,
     .words = kTypes,
     .agreed = true,
     .in_fingerprint = true,
     .report_key = "dtype"},
    {.name = "micro-steps",
     .heading = kSharding,
     .help = "Forward and backward passes per step; their gradients are added",
     .programs = kEverywhere,
     .member = &ShardingOptions::micro_steps,
     .values = "N",
     .allowed = "1 to 1000000",
     .least = 1,
     .most = kMicroStepsMost,
     .agreed = true,
     .in_fingerprint = true,
     .report_key = "micro_steps"},
    {.name = "forwards-ahead",
     .heading = kSharding,
     .help = "Forward passes that run ahead of an earlier micro-step's backward pass, in a pipeline",
     .programs = kNoProgram,
     .member = &ShardingOptions::forwards_ahead,
     .values = "N",
     .allowed = "0 or more",
     .in_fingerprint = true},
    {.name = "accumulate",
     .heading = kSharding,
     .help = "Where the gradients of micro-steps are added: shard, on their owner in fp32; local, on each "
             "rank in "
             "their own type, with one reduction per step (stages 0 and 1)",
     .programs = kTraining,
     .member = &ShardingOptions::accumulate,
     .words = kAccumulates,
     .agreed = true,
     .in_fingerprint = true,
     .report_key = "accumulate"},
    {.name = "average",
     .heading = kSharding,
     .help = "Divisor of the sum of gradients: ranks+micro-steps; or ranks, for a trainer that divides its "
             "losses by the number of micro-steps",
     .programs = kNoProgram,
     .member = &ShardingOptions::average,
     .words = kAverages,
     .agreed = true},
    {.name = "order-of-units",
     .heading = kSharding,
     .help = "Order in which units are used: strict, that of registration; recorded, any order, which the "
             "first step records or a text from an earlier run gives",
     .programs = kNoProgram,
     .member = &ShardingOptions::order_of_units,
     .words = kOrders,
     .values = "strict|recorded[:ORDER]",
     .allowed = "strict, recorded, or recorded:ORDER with the order that an earlier run recorded",
     .parse = parse_order_of_units,
     .print = print_order_of_units,
     .agreed = true},
    {.name = "units-at-once",
     .heading = kSharding,
     .help = "Units used at once that the plan has room for, in recorded order before an order is known",
     .programs = kNoProgram,
     .member = &ShardingOptions::units_at_once,
     .values = "N",
     .allowed = "1 to 1000",
     .least = 1,
     .most = 1000,
     .agreed = true},
    {.name = "order",
     .heading = kSharding,
     .help =
         "Order in which gradients are added over data-parallel ranks: rank, in rank order; group:G, within "
         "all-reduce groups of G consecutive ranks (of one host, say) first, which sends fewer bytes between "
         "hosts. Each order gives its own result; within one order all stages agree bit for bit",
     .programs = kTraining,
     .member = &ShardingOptions::group,
     .values = "rank|group:G",
     .allowed = "rank, or group:G with the number of consecutive ranks that are added first, 1 or more",
     .least = 1,
     .most = kGroupMax,
     .parse = parse_order,
     .print = print_order,
     .agreed = true,
     .in_fingerprint = true,
     .report_key = "group"},
    {.name = "shard-within",
     .heading = kSharding,
     .help = "Ranks that the stage shards over: all; or group, the ranks of an all-reduce group, so that "
             "every group "
             "has a full copy (hybrid sharding: more memory, gathers stay within groups, the same result)",
     .programs = kTraining,
     .member = &ShardingOptions::shard_within_group,
     .words = kWithin,
     .agreed = true,
     .in_fingerprint = true,
     .report_key = "shard_within_group"},
    {.name = "bucket",
     .heading = kSharding,
     .help = "Size of one send buffer, the slices of all ranks together; auto: chosen from the latency and "
             "bandwidth "
             "measured at the start. The result is the same",
     .programs = kTraining,
     .member = &ShardingOptions::bucket_bytes,
     .values = "BYTES|auto",
     .allowed = "1 byte or more (16MiB is usual), or auto",
     .least = 1,
     .automatic = &ShardingOptions::bucket_auto,
     .agreed = true,
     .report_key = "bucket_bytes"},
    {.name = "overlap",
     .heading = kSharding,
     .help = "overlap of collectives with computation: every collective is waited for where it is issued, "
             "slower, "
             "with the same result",
     .programs = kGptProgram,
     .member = &ShardingOptions::overlap,
     .words = kSwitch,
     .agreed = true},
    {.name = "memory",
     .heading = kSharding,
     .help = "Device memory of one rank; a plan that needs more is refused. 0: all that the device has",
     .programs = kEverywhere,
     .member = &ShardingOptions::memory_bytes,
     .values = "BYTES",
     .allowed = "a size, such as 80GiB or 512MiB",
     .is_memory = true},
    {.name = "device-room",
     .heading = kSharding,
     .help = "Memory of a cuda device that is kept free for the driver: modules, local memory, libraries. At "
             "most an eighth of the device. `forebay plan` takes it off --memory where it is given",
     .programs = kTraining,
     .member = &ShardingOptions::room_bytes,
     .values = "BYTES",
     .allowed = "a size, such as 384MiB, or 0",
     .is_memory = true},
    {.name = "spillable",
     .heading = kSharding,
     .help = "preparation for spilling states between steps: each pool has chunks of its own",
     .programs = kNoProgram,
     .member = &ShardingOptions::spillable,
     .words = kSwitch},
    {.name = "optimizer",
     .heading = kSharding,
     .help =
         "adamw; adam, with weight decay as an L2 term; sgd, with momentum beta1; lion; adafactor; muon, "
         "with momentum beta1 for matrices, and adamw for the rest. "
         "sgd, lion and muon's matrices keep no v; adafactor keeps v in factors, by row and by column, and "
         "no m",
     .programs = kTraining,
     .member = &ShardingOptions::optimizer,
     .words = kOptimizers,
     .agreed = true,
     .in_fingerprint = true},
    {.name = "muon-rate",
     .heading = kSharding,
     .help = "Learning rate of muon's matrices, of R rows and C columns: original, times sqrt(max(1, R/C)); "
             "match-rms-adamw, times 0.2 sqrt(max(R, C)), so that a rate of AdamW fits",
     .programs = kTraining,
     .member = &ShardingOptions::muon_matches_rms,
     .words = kMuonRates,
     .agreed = true},
    {.name = "moments",
     .heading = kSharding,
     .help = "How the optimizer's m and v are kept: fp32; bf16; block8, 8 bits and an exponent for each 256 "
             "elements. Narrow formats are rounded by dithering, and each gives its own result; adafactor "
             "and muon: fp32",
     .programs = kTraining,
     .member = &ShardingOptions::moments,
     .words = kMoments,
     .agreed = true,
     .in_fingerprint = true},
    {.name = "master-weights",
     .heading = kSharding,
     .help = "fp32 master weights beside bf16 parameters: each parameter is its own master, rounded by "
             "dithering",
     .programs = kTraining,
     .member = &ShardingOptions::master_weights,
     .words = kSwitch,
     .agreed = true,
     .in_fingerprint = true},
    {.name = "ema",
     .heading = kSharding,
     .help =
         "Decay of an exponential moving average of the weights, kept in fp32 beside the optimizer states. "
         "0: none",
     .programs = kTraining,
     .member = &ShardingOptions::ema,
     .values = "0..1",
     .allowed = "0, or a decay below 1, such as 0.999",
     .most = 1,
     .agreed = true,
     .in_fingerprint = true},
    {.name = "save-async",
     .heading = kSharding,
     .help = "Training goes on while a state is saved: pinned host memory takes a copy of it, which a thread "
             "writes",
     .programs = kTraining,
     .member = &ShardingOptions::save_async,
     .words = kSwitch,
     .agreed = true},
    {.name = "offload",
     .heading = kOffloading,
     .help =
         "States kept off the device: none; optimizer, which is the fp32 master weights and AdamW's m and v, "
         "updated on the host; optimizer+parameters, the parameter shard too (stage 3)",
     .programs = kTraining,
     .member = &ShardingOptions::offload,
     .words = kOffloads,
     .agreed = true,
     .in_fingerprint = true,
     .report_key = "offload"},
    {.name = "offload-tier",
     .heading = kOffloading,
     .help = "Where offloaded states are kept: cpu, in pinned host memory; nvme:DIR[,DIR...], in anonymous "
             "files, "
             "striped over these directories (gradients wait for their update in host memory)",
     .programs = kTraining,
     .member = &ShardingOptions::tier,
     .words = kTiers,
     .values = "cpu|nvme:DIR[,DIR...]",
     .allowed = "cpu or nvme:DIR[,DIR...], without an empty directory",
     .parse = parse_tier,
     .print = print_tier,
     .agreed = true,
     .in_fingerprint = true,
     .report_key = "offload_tier"},
    {.name = "offload-fraction",
     .heading = kOffloading,
     .help = "Fraction of the parameters to offload, 0 to 1, rounded up to whole layers; the first layers "
             "stay on the "
             "device. auto: measured at the start, so that the updates on device and host take equally long",
     .programs = kTraining,
     .member = &ShardingOptions::offload_fraction,
     .values = "0..1|auto",
     .allowed = "0 to 1, or auto",
     .most = 1,
     .automatic = &ShardingOptions::offload_auto,
     .agreed = true,
     .report_key = "offload_fraction"},
    {.name = "offload-staging",
     .heading = kOffloading,
     .help = "Pinned host memory per rank that states in files pass through, at most; at least 8MiB",
     .programs = kTraining,
     .member = &ShardingOptions::staging_bytes,
     .values = "BYTES",
     .allowed = "at least 8 MiB",
     .least = kStagingBytesMin,
     .is_memory = true,
     .report_key = "offload_staging_bytes"},
};
static_assert(kStagingBytesMin == 8_MiB, "said in offload-staging");

Status refuse(const std::string& message) {
  return Status(StatusCode::kInvalidArgument, message);
}

template <typename Member>
using ValueOf = std::remove_cvref_t<decltype(std::declval<ShardingOptions>().*std::declval<Member>())>;

// 65536 is "64KiB".
std::string bytes_text(std::uint64_t bytes) {
  constexpr const char* kSuffixes[] = {"", "KiB", "MiB", "GiB", "TiB"};
  std::size_t suffix = 0;
  while (bytes != 0 && bytes % 1024 == 0 && suffix + 1 < std::size(kSuffixes)) {
    bytes /= 1024;
    ++suffix;
  }
  return std::to_string(bytes) + kSuffixes[suffix];
}

// The shortest text that reads back as the same value.
std::string number_text(double value) {
  char text[32];
  const auto result = std::to_chars(text, text + sizeof(text), value);
  return {text, result.ptr};
}

bool parse_value(const OptionRow& row, std::string_view text, ShardingOptions& options) {
  if (row.parse != nullptr) return row.parse(text, options);
  if (row.automatic != nullptr) {
    options.*row.automatic = text == kAuto;
    if (text == kAuto) return true;
  }
  return std::visit(
      [&](auto member) {
        using Value = ValueOf<decltype(member)>;
        if (!row.words.empty()) {
          const auto word = std::find(row.words.begin(), row.words.end(), text);
          options.*member = static_cast<Value>(word - row.words.begin());
          return word != row.words.end();
        }
        if constexpr (std::is_same_v<Value, std::uint64_t>) {
          return parse_bytes(std::string(text).c_str(), &(options.*member));
        } else if constexpr (std::is_arithmetic_v<Value> && !std::is_same_v<Value, bool>) {
          return parse_number(text, options.*member);
        } else {
          return false;
        }
      },
      row.member);
}

// The member's value, which may be out of range.
std::string member_text(const OptionRow& row, const ShardingOptions& options) {
  return std::visit(
      [&](auto member) -> std::string {
        using Value = ValueOf<decltype(member)>;
        const Value value = options.*member;
        if constexpr (std::is_same_v<Value, double>) {
          return number_text(value);
        } else if constexpr (std::is_same_v<Value, std::uint64_t>) {
          return bytes_text(value);
        } else {
          const auto index = static_cast<std::size_t>(value);
          return index < row.words.size() ? row.words[index] : std::to_string(static_cast<int>(value));
        }
      },
      row.member);
}

std::string value_text(const OptionRow& row, const ShardingOptions& options) {
  return row.print != nullptr ? row.print(options) : member_text(row, options);
}

bool in_range(const OptionRow& row, const ShardingOptions& options) {
  return std::visit(
      [&](auto member) {
        using Value = ValueOf<decltype(member)>;
        const Value value = options.*member;
        if constexpr (std::is_same_v<Value, double>) {
          return value >= static_cast<double>(row.least) && value <= static_cast<double>(row.most);
        } else {
          if constexpr (std::is_same_v<Value, int>) {
            if (value < 0) return false;
          }
          const auto number = static_cast<std::uint64_t>(value);
          return row.words.empty() ? number >= row.least && number <= row.most : number < row.words.size();
        }
      },
      row.member);
}

// fp32, bf16 or fp16.
std::string list_of(Span<const char* const> words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i)
    text += std::string(i == 0 ? "" : i + 1 < words.size() ? ", " : " or ") + words[i];
  return text;
}

Status refuse_value(const OptionRow& row, const std::string& value) {
  return refuse(std::string(row.name) + " is " + value + "; use " +
                (row.allowed != nullptr ? row.allowed : list_of(row.words)));
}

Status check_range(const OptionRow& row, const ShardingOptions& options) {
  return in_range(row, options) ? Status() : refuse_value(row, value_text(row, options));
}

const OptionRow& row_of(std::string_view name) {
  const OptionRow* const row = find_option(name);
  FOREBAY_CHECK(row != nullptr, "no such option");
  return *row;
}

// The part of a value that ranks share and that reports show.
std::string shared_text(const OptionRow& row, const ShardingOptions& options) {
  if (row.automatic != nullptr) return options.*row.automatic ? kAuto : "given";
  return row.words.empty() ? value_text(row, options) : member_text(row, options);
}

// Adafactor and Muon.
Status check_whole_parameters(const ShardingOptions& options) {
  const bool is_muon = options.optimizer == Optimizer::kMuon;
  const std::string name = std::string("optimizer ") + optimizer_name(options.optimizer);
  if (options.moments != MomentFormat::kFloat32) {
    return refuse(std::string("moments is ") + moment_format_name(options.moments) + ", and " + name +
                  (is_muon ? " keeps its momentum" : " keeps its few factors") +
                  " in fp32; use moments fp32");
  }
  if (options.shard_within_group) {
    return refuse("shard-within is group, and " + name +
                  (is_muon ? " gathers its matrices from" : " adds its sums over") +
                  " all ranks; use shard-within all");
  }
  if (options.offload_auto) {
    return refuse("offload-fraction is auto, which measures updates of single elements, and optimizer is " +
                  std::string(optimizer_name(options.optimizer)) + "; give a fraction");
  }
  return {};
}

}  // namespace

Span<const OptionRow> sharding_option_table() noexcept {
  return kTable;
}

const OptionRow* find_option(std::string_view name) noexcept {
  for (const OptionRow& row : kTable) {
    if (name == row.name) return &row;
  }
  return nullptr;
}

bool is_switch(const OptionRow& row) noexcept {
  return row.words.data() == kSwitch;
}

Status set_option(ShardingOptions& options, std::string_view name, std::string_view value) {
  const OptionRow* const row = find_option(name);
  if (row == nullptr) {
    std::vector<std::string> names;
    for (const OptionRow& known : kTable) names.emplace_back(known.name);
    const std::string nearest = nearest_name(name, names);
    std::string message = "there is no option " + shown_value(name) + "; ";
    if (!nearest.empty()) return refuse(message + "did you mean " + nearest + "?");
    for (const std::string& known : names) message += (known == names.front() ? "use " : ", ") + known;
    return refuse(message);
  }
  ShardingOptions changed = options;
  if (!parse_value(*row, value, changed)) {
    const bool is_number =
        !value.empty() && value.find_first_not_of("-.0123456789") == std::string_view::npos;
    return refuse_value(*row, is_number ? std::string(value) : "'" + shown_value(value) + "'");
  }
  if (row->is_memory) {
    const std::string question = size_question(std::string(value).c_str());
    if (!question.empty()) return refuse(std::string(name) + " is " + question);
  }
  FOREBAY_RETURN_IF_ERROR(check_range(*row, changed));
  options = std::move(changed);
  return {};
}

std::string option_text(const ShardingOptions& options, std::string_view name) {
  const OptionRow& row = row_of(name);
  return row.automatic != nullptr && options.*row.automatic ? kAuto : value_text(row, options);
}

std::string option_values(const OptionRow& row) {
  if (row.values != nullptr) return row.values;
  std::string text;
  for (const char* const word : row.words) text += (text.empty() ? "" : "|") + std::string(word);
  return text;
}

std::string option_json(const ShardingOptions& options, const OptionRow& row) {
  return std::visit(
      [&](auto member) -> std::string {
        using Value = ValueOf<decltype(member)>;
        const Value value = options.*member;
        if constexpr (std::is_same_v<Value, bool>) {
          return value ? "true" : "false";
        } else if constexpr (std::is_same_v<Value, double>) {
          const std::string text = number_text(value);
          return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
        } else if constexpr (std::is_arithmetic_v<Value>) {
          return std::to_string(value);
        } else {
          return '"' + shared_text(row, options) + '"';
        }
      },
      row.member);
}

std::string option_lines(const ShardingOptions& options, bool OptionRow::*part) {
  std::string text;
  for (const OptionRow& row : kTable) {
    if (row.*part) text += std::string(row.name) + ' ' + shared_text(row, options) + '\n';
  }
  return text;
}

Status check_sharding_options(const ShardingOptions& options) {
  for (const OptionRow& row : kTable) FOREBAY_RETURN_IF_ERROR(check_range(row, options));
  const std::string stage = std::to_string(options.stage);
  if (options.accumulate == Accumulate::kLocal && options.stage >= 2) {
    return refuse("accumulate local needs the whole gradient on each rank, which stage " + stage +
                  " does not keep; use accumulate shard, or stage 0 or 1");
  }
  if (options.offload == Offload::kOptimizerAndParameters && options.stage < 3) {
    return refuse("offload optimizer+parameters moves the parameter shard off the device, and stage " +
                  stage + " keeps parameters whole; use stage 3, or offload optimizer");
  }
  if (static_cast<float>(options.ema) >= 1.0f)
    return refuse_value(row_of("ema"), option_text(options, "ema"));
  if (!options.master_weights && options.dtype != DataType::kBfloat16) {
    return refuse(std::string("master-weights is off, and dtype is ") + data_type_name(options.dtype) +
                  "; only bf16 parameters can be their own masters, so use dtype bf16, or master-weights on");
  }
  if (!is_elementwise(options.optimizer)) FOREBAY_RETURN_IF_ERROR(check_whole_parameters(options));
  if (options.order_of_units == OrderOfUnits::kStrict && !options.recorded_order.empty())
    return refuse("order-of-units is strict with a recorded order; use recorded");
  if (options.order_of_units == OrderOfUnits::kRecorded && options.forwards_ahead > 0) {
    return refuse("forwards-ahead is " + std::to_string(options.forwards_ahead) +
                  ", and recorded order has no passes ahead of others; use order-of-units strict");
  }
  return {};
}

Status check_offload_given(const ShardingOptions& options, const std::string& dashes) {
  const bool in_files = options.tier == Tier::kFile;
  if (options.offload != Offload::kNone ||
      !(in_files || options.offload_auto || options.offload_fraction != ShardingOptions().offload_fraction)) {
    return {};
  }
  return refuse(dashes + (in_files ? "offload-tier" : "offload-fraction") +
                " says how to offload and nothing is offloaded; add " + dashes +
                "offload optimizer, or optimizer+parameters at stage 3");
}

const char* offload_name(Offload offload) noexcept {
  return kOffloads[static_cast<std::size_t>(offload)];
}

const char* tier_name(Tier tier) noexcept {
  return kTiers[static_cast<std::size_t>(tier)];
}

const char* average_name(Average average) noexcept {
  return kAverages[static_cast<std::size_t>(average)];
}

const char* order_name(OrderOfUnits order) noexcept {
  return kOrders[static_cast<std::size_t>(order)];
}

const char* accumulate_name(Accumulate accumulate) noexcept {
  return kAccumulates[static_cast<std::size_t>(accumulate)];
}

}  // namespace forebay
