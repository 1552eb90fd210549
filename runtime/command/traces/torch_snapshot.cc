#include "runtime/command/traces/torch_snapshot.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include "forebay/units.h"
#include "runtime/command/run/process_history.h"
#include "runtime/command/traces/pickle_reader.h"

namespace forebay {
namespace {

using Kind = PickleValue::Kind;
using Outcome = TraceBuilder::Outcome;

constexpr std::size_t kDeviceLimit =
    256;  // More than any machine has. Larger: a damaged file makes many devices.

// A block that was live when the history began.
struct WarmBlock {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::uint64_t stream = 0;
  std::uint32_t holder = 0;
};

enum class Action : std::uint8_t { kAlloc, kFreeRequested, kFreeCompleted, kOutOfMemory, kOther };

Action parse_action(std::string_view text) {
  if (text == "alloc") return Action::kAlloc;
  if (text == "free_requested") return Action::kFreeRequested;
  if (text == "free_completed") return Action::kFreeCompleted;
  if (text == "oom") return Action::kOutOfMemory;
  return Action::kOther;
}

// Characters of a path or function name that are looked at: the longest path of Linux. Smaller: long names of
// C++ are taken for others. Larger: a name that thousands of frames share takes longer.
constexpr std::size_t kLookedAtMax = 4096;

// The end of a path.
std::string_view path_of(const PickleValue& file) {
  const std::string_view path = Pickle::text_of(file);
  return path.substr(path.size() - std::min(path.size(), kLookedAtMax));
}

// The beginning of a function's name; empty where the frame has none.
std::string_view function_of(const PickleValue* name) {
  return name == nullptr ? std::string_view() : Pickle::text_of(*name).substr(0, kLookedAtMax);
}

// The last part of a path of Linux or Windows, after the package directories that say nothing.
std::string_view short_path(std::string_view path) {
  for (const std::string_view packages : {"site-packages", "dist-packages"}) {
    const std::size_t at = path.rfind(packages);
    if (at != std::string_view::npos && at + packages.size() < path.size()) {
      return path.substr(at + packages.size() + 1);
    }
  }
  const std::size_t slash = path.find_last_of("/\\");
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

// Whether a directory of the path has that name.
bool has_directory(std::string_view path, std::string_view name) {
  for (std::size_t at = path.find(name); at != std::string_view::npos; at = path.find(name, at + 1)) {
    const auto is_slash = [](char c) { return c == '/' || c == '\\'; };
    const std::size_t end = at + name.size();
    if (at > 0 && is_slash(path[at - 1]) && end < path.size() && is_slash(path[end])) return true;
  }
  return false;
}

// "BmmBackward0" in "torch::autograd::generated::BmmBackward0::apply(...)"; empty if the function is of no
// node of the autograd graph.
std::string_view autograd_node(std::string_view function) {
  constexpr std::string_view kApply = "::apply(";
  const std::size_t end = function.find(kApply);
  if (end == std::string_view::npos || function.find("torch::autograd::") == std::string_view::npos)
    return {};
  const std::size_t colon = function.rfind(':', end - 1);
  return colon == std::string_view::npos || colon > end ? std::string_view()
                                                        : function.substr(colon + 1, end - colon - 1);
}

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

class DeviceReader {
 public:
  DeviceReader(const Pickle& pickle, std::string name, TraceOrigin origin)
      : pickle_(pickle), name_(std::move(name)), origin_(origin) {}

  void add_segment(const PickleValue& segment) { segments_.push_back(&segment); }
  void set_events(const PickleValue& events) { events_ = &events; }

  bool has_something() const {
    return !segments_.empty() || (events_ != nullptr && !pickle_.items(*events_).empty());
  }

  Result<AllocationTrace> read() {
    FOREBAY_RETURN_IF_ERROR(read_segments());
    FOREBAY_RETURN_IF_ERROR(find_warm());
    FOREBAY_RETURN_IF_ERROR(play_warm());
    FOREBAY_RETURN_IF_ERROR(play_events());
    AllocationTrace trace = builder_.finish();
    trace.name = name_;
    trace.format = origin_ == TraceOrigin::kPyTorch ? "PyTorch memory snapshot" : "snapshot of forebay run";
    trace.origin = origin_;
    const auto note = [&](std::size_t count, const char* what, const char* how, const char* many = nullptr) {
      if (count > 0) trace.notes.push_back(format_count(count, what, many) + " " + how);
    };
    note(warm_.size(), "block", "live before the history began: played first, in address order");
    note(twice_count_, "allocation", "of an address that is live: the earlier block taken as freed there");
    note(unknown_count_, "free", "of a block that is not live: left out");
    note(failure_count_, "request", "that failed when recorded: played as allocated and freed at once");
    note(too_large_count_, "failed request", "larger than all memory of any device: left out");
    note(other_count_, "entry", "of the history without a meaning for this: left out", "entries");
    return trace;
  }

 private:
  struct Event {
    Action action = Action::kOther;
    std::uint64_t address = 0;
    std::uint64_t bytes = 0;
    std::uint64_t stream = 0;
  };
  struct EndBlock {
    std::uint64_t bytes = 0;
    std::uint64_t stream = 0;
    std::uint32_t holder = 0;
  };

  Status refuse(const std::string& found_and_try) const {
    return {StatusCode::kInvalidArgument,
            "cannot read '" + name_ + "' as a PyTorch memory snapshot: " + found_and_try};
  }

  // False if the key is missing, not an integer or negative.
  bool number(const PickleValue& dict, std::string_view key, std::uint64_t* value) const {
    const PickleValue* found = pickle_.find(dict, key);
    if (found == nullptr || found->kind != Kind::kInteger || found->integer < 0) return false;
    *value = static_cast<std::uint64_t>(found->integer);
    return true;
  }
  // Streams may be written as signed numbers.
  std::uint64_t stream_of(const PickleValue& dict) const {
    const PickleValue* found = pickle_.find(dict, "stream");
    return found != nullptr && found->kind == Kind::kInteger ? static_cast<std::uint64_t>(found->integer) : 0;
  }

  // The requester: the innermost Python frame outside of torch and of Python's own library; else the node of
  // the autograd graph, as on the threads of the backward pass; else the innermost Python frame; else the
  // innermost frame that is not the unwinder's.
  std::uint32_t holder_of(const PickleValue& entry) {
    const PickleValue* frames = pickle_.find(entry, "frames");
    if (frames == nullptr) {
      // Older versions keep them in the block's history.
      const PickleValue* history = pickle_.find(entry, "history");
      if (history != nullptr && !pickle_.items(*history).empty()) {
        frames = pickle_.find(pickle_.items(*history).front(), "frames");
      }
    }
    if (frames == nullptr || frames->kind != Kind::kList) return 0;
    if (const auto known = holders_of_frames_.find(frames->container); known != holders_of_frames_.end()) {
      return known->second;
    }
    const PickleValue* chosen = nullptr;
    int chosen_rank = 0;
    for (const PickleValue& frame : pickle_.items(*frames)) {
      const PickleValue* file = pickle_.find(frame, "filename");
      if (file == nullptr) continue;
      const PickleValue* function = pickle_.find(frame, "name");
      const int rank = frame_rank(path_of(*file), function_of(function));
      if (rank <= chosen_rank) continue;
      chosen = &frame;
      chosen_rank = rank;
    }
    std::uint32_t holder = 0;
    if (chosen != nullptr) {
      const PickleValue* file = pickle_.find(*chosen, "filename");
      const PickleValue* function = pickle_.find(*chosen, "name");
      const std::string_view name = function_of(function);
      std::uint64_t line = 0;
      std::string text;
      if (chosen_rank == kAutogradRank) {
        text = std::string(autograd_node(name).substr(0, kNameLimit)) + " (backward pass)";
      } else {
        text = short_path(path_of(*file)).substr(0, kNameLimit);
        if (number(*chosen, "line", &line) && line > 0) text += ":" + std::to_string(line);
        if (!name.empty()) text += " " + std::string(name.substr(0, kNameLimit));
      }
      for (char& c : text) {
        if (c < ' ' || c > '~') c = '?';  // It is printed.
      }
      holder = builder_.holder(std::move(text));
    }
    holders_of_frames_.emplace(frames->container, holder);
    return holder;
  }

  Status read_segments() {
    RecordedState state;
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      const PickleValue& segment = *segments_[i];
      const auto refusal = [&](const char* found_and_try) {
        return refuse("segment " + std::to_string(i + 1) + ": " + found_and_try);
      };
      std::uint64_t address = 0;
      std::uint64_t bytes = 0;
      const PickleValue* blocks = pickle_.find(segment, "blocks");
      if (!number(segment, "address", &address) || !number(segment, "total_size", &bytes) ||
          blocks == nullptr || blocks->kind != Kind::kList) {
        return refusal("it has no usable address, total_size and blocks; give an undamaged snapshot");
      }
      if (bytes > kTraceBlockLimit || state.reserved_bytes > kTraceBlockLimit - bytes) {
        return refusal("more is reserved than any device has; give an undamaged snapshot");
      }
      state.reserved_bytes += bytes;
      const std::uint64_t stream = stream_of(segment);
      std::uint64_t next = address;
      std::uint64_t left = bytes;
      std::uint64_t free_run = 0;
      // Segments of a damaged file may share their blocks, and so be many more than it is long.
      block_count_ += pickle_.items(*blocks).size();
      if (block_count_ > kTraceEventLimit) return refusal("more blocks than are read; record less");
      for (const PickleValue& block : pickle_.items(*blocks)) {
        std::uint64_t size = 0;
        if (!number(block, "size", &size) || size > left) {
          return refusal("a block has no size, or one beyond its segment; give an undamaged snapshot");
        }
        left -= size;
        std::uint64_t at = next;
        number(block, "address", &at);
        next += size;
        std::uint64_t requested = size;
        number(block, "requested_size", &requested);
        requested = std::min(requested, size);
        const PickleValue* state_value = pickle_.find(block, "state");
        const std::string_view words = state_value == nullptr ? "" : Pickle::text_of(*state_value);
        if (words == "inactive") {
          free_run += size;
          state.largest_free_bytes = std::max(state.largest_free_bytes, free_run);
          continue;
        }
        free_run = 0;
        state.live_bytes += size;
        state.requested_bytes += requested;
        if (words != "active_allocated") state.pending_bytes += size;
        end_blocks_[at] = {.bytes = requested, .stream = stream, .holder = holder_of(block)};
      }
    }
    if (!segments_.empty()) builder_.trace().state = state;
    return {};
  }

  Status read_event(const PickleValue& entry, std::size_t index, Event* event) const {
    const PickleValue* action = pickle_.find(entry, "action");
    event->action = action == nullptr ? Action::kOther : parse_action(Pickle::text_of(*action));
    if (event->action == Action::kOther) return {};
    const bool is_refusal = event->action == Action::kOutOfMemory;
    const bool has_size = number(entry, "size", &event->bytes) && event->bytes <= kTraceBlockLimit;
    if (is_refusal && !has_size) {
      event->bytes = kTraceBlockLimit + 1;  // As of a difference below zero: no device has it.
    } else if (!has_size || !(is_refusal || number(entry, "addr", &event->address))) {
      return refuse("event " + std::to_string(index + 1) + " (" + std::string(Pickle::text_of(*action)) +
                    "): it has no usable addr and size, or a negative one; give an undamaged snapshot");
    }
    event->stream = stream_of(entry);
    return {};
  }

  // Finds the blocks that were live before: freed or live at the end without an allocation. A free has two
  // events, and the later one counts, because the memory is not free before; older versions have one event.
  Status find_warm() {
    std::unordered_map<std::uint64_t, bool> is_live;  // By address in the history.
    if (events_ != nullptr) {
      const std::vector<PickleValue>& events = pickle_.items(*events_);
      if (events.size() > kTraceEventLimit) return refuse("more events than are read; record less history");
      for (const PickleValue& entry : events) {
        const PickleValue* action = pickle_.find(entry, "action");
        if (action != nullptr && Pickle::text_of(*action) == "free_completed")
          free_action_ = Action::kFreeCompleted;
      }
      for (std::size_t i = 0; i < events.size(); ++i) {
        Event event;
        FOREBAY_RETURN_IF_ERROR(read_event(events[i], i, &event));
        if (event.action == Action::kAlloc) {
          is_live[event.address] = true;
        } else if (event.action == free_action_) {
          const auto [found, is_new] = is_live.emplace(event.address, false);
          found->second = false;
          if (is_new) warm_.push_back({event.address, event.bytes, event.stream, 0});
        }
      }
    }
    for (const auto& [address, block] : end_blocks_) {
      if (!is_live.contains(address)) warm_.push_back({address, block.bytes, block.stream, block.holder});
    }
    std::sort(warm_.begin(), warm_.end(),
              [](const WarmBlock& a, const WarmBlock& b) { return a.address < b.address; });
    return {};
  }

  Status play_warm() {
    for (const WarmBlock& block : warm_) {
      const Outcome outcome = builder_.allocate(block.address, block.bytes, block.stream, block.holder);
      if (outcome != Outcome::kTaken) {
        return refuse("the blocks live before the history: " +
                      describe_outcome(outcome, std::to_string(block.address), block.bytes));
      }
    }
    builder_.end_warm();
    return {};
  }

  Status play_events() {
    if (events_ == nullptr) return {};
    const std::vector<PickleValue>& events = pickle_.items(*events_);
    for (std::size_t i = 0; i < events.size(); ++i) {
      Event event;
      FOREBAY_RETURN_IF_ERROR(read_event(events[i], i, &event));
      Outcome outcome = Outcome::kTaken;
      if (event.action == Action::kAlloc) {
        if (builder_.is_live(event.address)) {
          ++twice_count_;
          outcome = builder_.free(event.address, event.stream);
        }
        if (outcome == Outcome::kTaken) {
          outcome = builder_.allocate(event.address, event.bytes, event.stream, holder_of(events[i]));
        }
      } else if (event.action == free_action_) {
        if (builder_.is_live(event.address)) {
          outcome = builder_.free(event.address, event.stream);
        } else {
          ++unknown_count_;
        }
      } else if (event.action == Action::kOutOfMemory) {
        ++failure_count_;
        std::optional<std::uint64_t> device_free;
        std::uint64_t value = 0;
        if (number(events[i], "device_free", &value)) device_free = value;
        outcome = builder_.fail(event.bytes, event.stream, holder_of(events[i]), device_free);
        if (outcome == Outcome::kTooLarge) {
          --failure_count_;
          ++too_large_count_;
          outcome = Outcome::kTaken;
        }
      } else if (event.action == Action::kOther) {
        const PickleValue* action = pickle_.find(events[i], "action");
        const std::string_view text = action == nullptr ? "" : Pickle::text_of(*action);
        // Segments are the recorded allocator's own affair.
        if (text.substr(0, 8) != "segment_" && text != "snapshot") ++other_count_;
      }
      if (outcome != Outcome::kTaken) {
        return refuse("event " + std::to_string(i + 1) + ": " +
                      describe_outcome(outcome, std::to_string(event.address), event.bytes));
      }
    }
    return {};
  }

  // How well a frame names the requester; the highest counts, the innermost of them.
  static constexpr int kAutogradRank = 4;
  static int frame_rank(std::string_view path, std::string_view function) {
    if (ends_with(path, ".py")) {
      const bool is_package = has_directory(path, "site-packages") || has_directory(path, "dist-packages");
      const bool is_library = !is_package && path.find("/lib/python3.") != std::string_view::npos;
      return has_directory(path, "torch") || is_library ? 3 : 5;
    }
    if (path.substr(0, 8) == "<ipython" || path == "<stdin>") return 5;
    if (!autograd_node(function).empty()) return kAutogradRank;
    const bool is_unwinder = function.find("unwind") != std::string_view::npos ||
                             function.find("CapturedTraceback") != std::string_view::npos ||
                             function.find("gather_with_cpp") != std::string_view::npos;
    return is_unwinder ? 1 : 2;
  }

  static constexpr std::size_t kNameLimit = 120;  // Characters of a file or function name shown.

  const Pickle& pickle_;
  const std::string name_;
  const TraceOrigin origin_;
  std::vector<const PickleValue*> segments_;
  const PickleValue* events_ = nullptr;
  TraceBuilder builder_;
  Action free_action_ = Action::kFreeRequested;
  std::map<std::uint64_t, EndBlock> end_blocks_;  // By address.
  std::vector<WarmBlock> warm_;
  std::unordered_map<std::uint32_t, std::uint32_t> holders_of_frames_;  // Stacks are shared between entries.
  std::size_t block_count_ = 0;
  std::size_t twice_count_ = 0;
  std::size_t unknown_count_ = 0;
  std::size_t failure_count_ = 0;
  std::size_t too_large_count_ = 0;
  std::size_t other_count_ = 0;
};

// Whether the settings of the allocator say so.
bool has_setting(const Pickle& pickle, const char* name, const char* value) {
  const PickleValue* settings = pickle.find(pickle.root(), "allocator_settings");
  const PickleValue* found = settings == nullptr ? nullptr : pickle.find(*settings, name);
  return found != nullptr && Pickle::text_of(*found) == value;
}

TraceOrigin origin_of(const Pickle& pickle) {
  if (!has_setting(pickle, kSnapshotAllocatorSetting, kSnapshotRunAllocator)) return TraceOrigin::kPyTorch;
  return has_setting(pickle, kSnapshotModeSetting, kSnapshotObserveMode) ? TraceOrigin::kRunObserved
                                                                         : TraceOrigin::kRun;
}

}  // namespace

bool is_torch_snapshot(std::string_view text) {
  return is_pickle(text);
}

Result<std::vector<AllocationTrace>> parse_torch_snapshot(std::string_view text, const std::string& name) {
  const auto refusal = [&](const std::string& found_and_try) {
    return Status(StatusCode::kInvalidArgument,
                  "cannot read '" + name + "' as a PyTorch memory snapshot: " + found_and_try);
  };
  Result<Pickle> read = Pickle::read(text);
  if (!read.ok()) return refusal(read.status().message());
  const Pickle& pickle = read.value();
  const PickleValue& root = pickle.root();
  const PickleValue* segments = root.kind == Kind::kList ? &root : pickle.find(root, "segments");
  const PickleValue* histories = pickle.find(root, "device_traces");
  if (segments == nullptr && histories == nullptr) {
    return refusal(
        "it has neither segments nor device_traces; give a file that torch.cuda.memory._dump_snapshot wrote");
  }

  const TraceOrigin origin = origin_of(pickle);
  std::map<std::uint64_t, DeviceReader> devices;
  const auto device_at = [&](std::uint64_t index) -> DeviceReader& {
    return devices
        .try_emplace(index, pickle, name + (index == 0 ? "" : " device " + std::to_string(index)), origin)
        .first->second;
  };
  if (segments != nullptr) {
    for (const PickleValue& segment : pickle.items(*segments)) {
      const PickleValue* device = pickle.find(segment, "device");
      std::uint64_t index = 0;
      if (device != nullptr && device->kind == Kind::kInteger)
        index = static_cast<std::uint64_t>(device->integer);
      if (segment.kind != Kind::kDict || index >= kDeviceLimit) {
        return refusal("a segment is no dict, or of no device there is; give an undamaged snapshot");
      }
      device_at(index).add_segment(segment);
    }
  }
  if (histories != nullptr) {
    const std::vector<PickleValue>& all = pickle.items(*histories);
    if (all.size() > kDeviceLimit)
      return refusal("more devices than there can be; give an undamaged snapshot");
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!pickle.items(all[i]).empty()) device_at(i).set_events(all[i]);
    }
  }
  std::vector<AllocationTrace> traces;
  for (auto& [index, device] : devices) {
    if (!device.has_something()) continue;
    FOREBAY_ASSIGN_OR_RETURN(AllocationTrace trace, device.read());
    traces.push_back(std::move(trace));
  }
  // A device on which nothing happened, unless there is no other.
  const auto is_empty = [](const AllocationTrace& trace) { return trace.events.empty(); };
  if (!std::all_of(traces.begin(), traces.end(), is_empty)) std::erase_if(traces, is_empty);
  if (traces.empty()) {
    return refusal(
        "it holds no segment and no event; record with torch.cuda.memory._record_memory_history() and dump "
        "while the tensors are live");
  }
  return traces;
}

}  // namespace forebay
