// Every function of forebay.h is called wrongly: an error with a text, and no crash. The calls are made from
// the types and the names of the parameters, so a new function is called without a line here.

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <type_traits>

#include "tests/api/declarations.h"
#include "tests/api/fixture.h"

namespace forebay::api {
namespace {

// How far the engine, the checkpointer and the file store are when a function is called.
enum class State { kMade, kCommitted, kInStep, kInPass, kInRecordedPass };

void nothing(void*) {}
void visit_nothing(void*, std::int32_t, std::int32_t, const char*, const float*, std::uint64_t) {}

// A live handle of every kind.
struct Handles {
  explicit Handles(State state)
      : one(state == State::kInRecordedPass ? c::Options{{"deadline", "3000"}, {"order-of-units", "recorded"}}
                                            : c::Options{{"deadline", "3000"}}) {
    options = c::Options();
    options.set("store-directories", "/tmp");
    arena = c::make<c::Arena>(forebay_arena_create, one.device, nullptr);
    pool = c::make<c::PinnedPool>(forebay_pinned_pool_create, one.device, nullptr);
    timeline = c::make<c::Timeline>(forebay_timeline_create);
    part = c::make<c::Communicator>(forebay_communicator_split, one.ranks, 0, 0);
    checkpointer = c::make<c::Checkpointer>(forebay_checkpointer_create, one.device, part, nullptr, nullptr);
    store = c::make<c::FileStore>(forebay_file_store_create, options);
    if (state == State::kMade) return;
    one.commit();
    c::call(forebay_checkpointer_declare, checkpointer, 0, 0, 512, nullptr);
    c::call(forebay_checkpointer_commit, checkpointer, nullptr);
    c::get<std::uint32_t>(forebay_file_store_range, store, "range", 65536);
    if (state == State::kCommitted) return;
    c::call(forebay_step_begin, one.engine);
    if (state == State::kInStep) return;
    c::call(forebay_micro_step_begin, one.engine, 0);
    c::call(forebay_acquire, one.engine, one.first, 0, nullptr);
  }

  void get(forebay_options*& handle) const { handle = options; }
  void get(forebay_device*& handle) const { handle = one.device; }
  void get(forebay_arena*& handle) const { handle = arena; }
  void get(forebay_pinned_pool*& handle) const { handle = pool; }
  void get(forebay_local_group*& handle) const { handle = one.group; }
  void get(forebay_communicator*& handle) const { handle = one.ranks; }
  void get(forebay_timeline*& handle) const { handle = timeline; }
  void get(forebay_engine*& handle) const { handle = one.engine; }
  void get(forebay_checkpointer*& handle) const { handle = checkpointer; }
  void get(forebay_file_store*& handle) const { handle = store; }

  One one;
  c::Options options;
  c::Arena arena;
  c::PinnedPool pool;
  c::Timeline timeline;
  c::Communicator part;
  c::Checkpointer checkpointer;
  c::FileStore store;
};

template <typename T>
concept HandleType = requires(const Handles& handles, T& handle) {
  handles.get(handle);
};

// Memory that calls may read and write; queued work may use it after the call.
alignas(512) std::byte memory[1 << 20];

// Sizes of memory that only the caller knows: a wrong one cannot be told. Everything else is called with
// absurd ones.
const std::set<std::string> kCallersSizes = {"forebay_copy.bytes",
                                             "forebay_fill.bytes",
                                             "forebay_communicator_exchange.bytes",
                                             "forebay_communicator_all_gather.bytes",
                                             "forebay_communicator_all_gather.stride_bytes",
                                             "forebay_communicator_reduce_scatter.stride_bytes",
                                             "forebay_communicator_reduce_scatter.count",
                                             "forebay_communicator_all_reduce.count",
                                             "forebay_communicator_all_reduce.bucket_bytes",
                                             "forebay_communicator_send.bytes",
                                             "forebay_communicator_receive.bytes",
                                             "forebay_checkpointer_save.record_bytes",
                                             "forebay_save.trainer_state_bytes"};

template <typename T>
T usual([[maybe_unused]] const Handles& handles, [[maybe_unused]] const std::string& name) {
  if constexpr (HandleType<T>) {
    T handle;
    handles.get(handle);
    return handle;
  } else if constexpr (std::is_same_v<T, const char*>) {
    if (name == "directory" || name == "path") return "/proc/nonexistent/place";
    return name == "config_json" ? "{}" : "stage";
  } else if constexpr (std::is_same_v<T, const forebay_store_calls*> || std::is_same_v<T, void (*)(void*)>) {
    if constexpr (std::is_same_v<T, void (*)(void*)>) return nothing;
    return nullptr;
  } else if constexpr (std::is_pointer_v<T> && std::is_function_v<std::remove_pointer_t<T>>) {
    return visit_nothing;
  } else if constexpr (std::is_pointer_v<T>) {
    if (name == "stream" || name == "other" || name == "nccl" || name == "user" || name == "region")
      return nullptr;
    return reinterpret_cast<T>(memory);
  } else if constexpr (std::is_same_v<T, double>) {
    return 1.0;
  } else {
    return name == "bytes" || name == "bucket_bytes" ? 64 : name == "size" || name == "ranks" ? 1 : 0;
  }
}

template <typename T>
std::vector<T> wrong_values([[maybe_unused]] const Handles& handles, [[maybe_unused]] bool callers_size) {
  if constexpr (HandleType<T>) {
    T live;
    handles.get(live);
    auto* const foreign = reinterpret_cast<T>(memory);
    // A handle of the next kind, and one of a record that nothing uses.
    auto* const other = reinterpret_cast<T>(reinterpret_cast<std::uintptr_t>(live) ^ 0x3);
    auto* const far = reinterpret_cast<T>(reinterpret_cast<std::uintptr_t>(live) ^ 0xFFFFF00);
    return {nullptr, foreign, other, far};
  } else if constexpr (std::is_pointer_v<T>) {
    return {nullptr};
  } else if constexpr (std::is_same_v<T, double>) {
    return {-1.0,
            0.0,
            1e308,
            -1e308,
            std::numeric_limits<double>::infinity(),
            std::numeric_limits<double>::quiet_NaN()};
  } else if constexpr (std::is_same_v<T, std::uint64_t>) {
    if (callers_size) return {};
#if defined(__SANITIZE_ADDRESS__) || \
    defined(__SANITIZE_THREAD__)  // An allocation too large ends the program.
    return {0, 1, 7};
#else
    return {0, 1, 7, std::uint64_t{1} << 62, std::uint64_t{1} << 63, UINT64_MAX - 511, UINT64_MAX};
#endif
  } else {
    return {T(-1), T(1), T(7), std::numeric_limits<T>::max(), std::numeric_limits<T>::min()};
  }
}

template <typename T>
struct Destroyer;
#define FOREBAY_DESTROYER(type, function)                   \
  template <>                                               \
  struct Destroyer<type> {                                  \
    static void destroy(type* handle) { function(handle); } \
  };
FOREBAY_DESTROYER(forebay_options, forebay_options_destroy)
FOREBAY_DESTROYER(forebay_device, forebay_device_close)
FOREBAY_DESTROYER(forebay_arena, forebay_arena_destroy)
FOREBAY_DESTROYER(forebay_pinned_pool, forebay_pinned_pool_destroy)
FOREBAY_DESTROYER(forebay_local_group, forebay_local_group_destroy)
FOREBAY_DESTROYER(forebay_communicator, forebay_communicator_destroy)
FOREBAY_DESTROYER(forebay_timeline, forebay_timeline_destroy)
FOREBAY_DESTROYER(forebay_engine, forebay_engine_destroy)
FOREBAY_DESTROYER(forebay_checkpointer, forebay_checkpointer_destroy)
FOREBAY_DESTROYER(forebay_file_store, forebay_file_store_destroy)

const DeclaredFunction& declaration(const std::string& name) {
  static const auto functions = read_declarations(FOREBAY_ROOT);
  for (const DeclaredFunction& function : functions) {
    if (function.name == name) return function;
  }
  throw std::out_of_range(name);
}

// An argument of any type.
using Argument = std::array<std::byte, 8>;

template <typename T>
Argument argument_of(T value) {
  static_assert(sizeof(T) <= sizeof(Argument));
  Argument argument{};
  std::memcpy(argument.data(), &value, sizeof(T));
  return argument;
}

template <typename T>
T read_as(const Argument& argument) {
  T value;
  std::memcpy(&value, argument.data(), sizeof(T));
  return value;
}

struct WrongArgument {
  Argument value{};
  std::string with;
  bool must_fail = false;
  std::shared_ptr<Handles> others{};  // the value is one of theirs
};

// How the test makes arguments of one type.
struct ArgumentType {
  Argument (*usual)(const Handles& handles, const std::string& name);
  std::vector<WrongArgument> (*wrong)(const Handles& handles, const std::string& function,
                                      const DeclaredParameter& parameter);
  void (*end_new_handle)(const Argument& argument);  // where a handle was made at the address `argument`
};

template <typename T>
Argument usual_argument(const Handles& handles, const std::string& name) {
  return argument_of<T>(usual<T>(handles, name));
}

template <typename T>
std::vector<WrongArgument> wrong_arguments(const Handles& handles, const std::string& function,
                                           const DeclaredParameter& parameter) {
  std::vector<WrongArgument> wrong;
  const bool callers = kCallersSizes.count(function + "." + parameter.name) == 1;
  for (const T value : wrong_values<T>(handles, callers)) {
    bool must_fail = false;
    if constexpr (std::is_pointer_v<T>) must_fail = value != nullptr ? HandleType<T> : !parameter.or_null;
    wrong.push_back({argument_of(value), "a wrong " + parameter.name, must_fail});
  }
  if constexpr (HandleType<T>) {
    const auto gone = std::make_shared<Handles>(State::kMade);
    T handle;
    gone->get(handle);
    Destroyer<std::remove_pointer_t<T>>::destroy(handle);
    wrong.push_back({argument_of(handle), "a destroyed " + parameter.name, true, gone});
  }
  return wrong;
}

template <typename T>
void end_new_handle([[maybe_unused]] const Argument& argument) {
  if constexpr (std::is_pointer_v<T>) {
    using Made = std::remove_pointer_t<T>;
    if constexpr (HandleType<Made>) Destroyer<std::remove_pointer_t<Made>>::destroy(*read_as<T>(argument));
  }
}

template <typename T>
inline constexpr ArgumentType kArgumentType = {usual_argument<T>, wrong_arguments<T>, end_new_handle<T>};

// A function of forebay.h that can be called with arguments of any type.
class Function {
 public:
  template <typename Result, typename... A>
  Function(const char* name, Result (*function)(A...))
      : name_(name),
        function_(reinterpret_cast<void (*)()>(function)),
        call_(call_with<Result, A...>),
        returns_code_(std::is_same_v<Result, std::int32_t>),
        types_{&kArgumentType<A>...},
        parameters_(declaration(name).parameters) {
    if (parameters_.size() != sizeof...(A)) throw std::length_error(name_);
  }

  void run(State state) {
    state_ = state;
    handles_ = std::make_unique<Handles>(state);
    call(usual_arguments(), "the usual arguments", false);
    for (std::size_t i = 0; i < types_.size(); ++i) {
      for (const WrongArgument& wrong : types_[i]->wrong(*handles_, name_, parameters_[i])) {
        std::vector<Argument> arguments = usual_arguments();
        arguments[i] = wrong.value;
        call(arguments, wrong.with, wrong.must_fail);
      }
    }
    if (state == State::kMade) check_engine();
    // Work that was queued uses `memory`.
    forebay_stream_synchronize(handles_->one.device, nullptr);
  }

 private:
  template <typename Result, typename... A>
  static std::int32_t call_with(void (*function)(), const Argument* arguments) {
    return call_each<Result, A...>(reinterpret_cast<Result (*)(A...)>(function), arguments,
                                   std::index_sequence_for<A...>());
  }

  template <typename Result, typename... A, std::size_t... I>
  static std::int32_t call_each(Result (*function)(A...), [[maybe_unused]] const Argument* arguments,
                                std::index_sequence<I...>) {
    if constexpr (std::is_same_v<Result, std::int32_t>) {
      return function(read_as<A>(arguments[I])...);
    } else {
      function(read_as<A>(arguments[I])...);
      return FOREBAY_OK;
    }
  }

  std::vector<Argument> usual_arguments() const {
    std::vector<Argument> arguments;
    for (std::size_t i = 0; i < types_.size(); ++i)
      arguments.push_back(types_[i]->usual(*handles_, parameters_[i].name));
    return arguments;
  }

  void call(const std::vector<Argument>& arguments, const std::string& with, bool must_fail) {
    std::memset(memory, 0, 256);
    const std::int32_t code = call_(function_, arguments.data());
    if (!returns_code_) {
      // It may have given back a live handle.
      handles_ = std::make_unique<Handles>(state_);
      return;
    }
    if (name_ == "forebay_abi") return;
    SCOPED_TRACE(name_ + " with " + with + " in state " + std::to_string(static_cast<int>(state_)));
    EXPECT_GE(code, 0);
    EXPECT_LE(code, FOREBAY_INTERNAL);
    EXPECT_NE(code, FOREBAY_INTERNAL) << forebay_last_error();
    if (must_fail) {
      EXPECT_EQ(code, FOREBAY_INVALID_ARGUMENT);
    }
    if (code != FOREBAY_OK) {
      EXPECT_GT(std::strlen(forebay_last_error()), 10u);
    } else if (!types_.empty()) {
      // A handle may have been made, at the address of the last argument.
      types_.back()->end_new_handle(arguments.back());
    }
  }

  // Absurd sizes that were taken in show in a report, and when the engine is committed.
  void check_engine() const {
    const char* json = nullptr;
    SCOPED_TRACE("a report after " + name_);
    EXPECT_NE(forebay_engine_report(handles_->one.engine, &json), FOREBAY_INTERNAL) << forebay_last_error();
    EXPECT_NE(forebay_checkpointer_report(handles_->checkpointer, &json), FOREBAY_INTERNAL)
        << forebay_last_error();
    EXPECT_NE(forebay_engine_commit(handles_->one.engine), FOREBAY_INTERNAL) << forebay_last_error();
  }

  std::string name_;
  void (*function_)();
  std::int32_t (*call_)(void (*function)(), const Argument* arguments);
  bool returns_code_;
  std::vector<const ArgumentType*> types_;
  std::vector<DeclaredParameter> parameters_;
  std::unique_ptr<Handles> handles_;
  State state_ = State::kMade;
};

class CApiMisuse : public ::testing::TestWithParam<State> {};

TEST_P(CApiMisuse, IsAnErrorWithATextForEveryFunction) {
#define X(function) Function(#function, &function).run(GetParam());
#include "functions.inc"
#undef X
}

std::string state_name(const ::testing::TestParamInfo<State>& info) {
  constexpr const char* kNames[] = {"Made", "Committed", "InStep", "InPass", "InRecordedPass"};
  return kNames[static_cast<int>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(InEveryState, CApiMisuse,
                         ::testing::Values(State::kMade, State::kCommitted, State::kInStep, State::kInPass,
                                           State::kInRecordedPass),
                         state_name);

}  // namespace
}  // namespace forebay::api
