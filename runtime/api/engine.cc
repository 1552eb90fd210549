// The engine: description, values, steps and state.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "forebay/conversions.h"
#include "forebay/model_config.h"
#include "forebay/model_shape.h"
#include "forebay/text.h"
#include "runtime/api/objects.h"
#include "runtime/api/report.h"

using namespace forebay;       // NOLINT: the functions below are of the global namespace.
using namespace forebay::api;  // NOLINT

namespace {

Engine& engine_of(EngineObject& object) {
  if (object.engine == nullptr)
    misuse("this engine only plans; make one by forebay_engine_create() to train");
  return *object.engine;
}

Engine& committed(EngineObject& object) {
  Engine& engine = engine_of(object);
  if (!object.committed) misuse("the engine is not committed; call forebay_engine_commit() first");
  return engine;
}

void check_flags(std::int32_t flags, std::int32_t known) {
  if ((flags & ~known) != 0)
    misuse("flags is " + std::to_string(flags) + "; combine those of this function, or give 0");
}

const ModelShape& model_of(const EngineObject& object) {
  return object.engine == nullptr ? object.shape : object.engine->model();
}

const UnitShape& unit_of(const EngineObject& object, std::int32_t unit, const char* name = "unit") {
  const ModelShape& model = model_of(object);
  if (unit < 0 || static_cast<std::size_t>(unit) >= model.units.size()) {
    misuse(std::string(name) + " is " + std::to_string(unit) + "; the model has " +
           std::to_string(model.units.size()) + "; use the index that forebay_engine_add_unit() gave");
  }
  return model.units[static_cast<std::size_t>(unit)];
}

// The parameter that an index of a unit names, its own or a tied one.
ParameterId resolve(const EngineObject& object, std::int32_t unit, std::int32_t index) {
  const UnitShape& shape = unit_of(object, unit);
  const std::size_t own = shape.parameters.size();
  if (index < 0 || static_cast<std::size_t>(index) >= own + shape.tied.size()) {
    misuse("index is " + std::to_string(index) + "; unit " + shape.name + " has " +
           std::to_string(own + shape.tied.size()) + " parameters");
  }
  if (static_cast<std::size_t>(index) < own) return {unit, index};
  const UnitShape::Tied& tied = shape.tied[static_cast<std::size_t>(index) - own];
  return resolve(object, tied.unit, tied.index);
}

std::uint64_t count_of(const EngineObject& object, ParameterId id) {
  return model_of(object)
      .units[static_cast<std::size_t>(id.unit)]
      .parameters[static_cast<std::size_t>(id.index)]
      .count;
}

void check_part(std::uint64_t first, std::uint64_t count, std::uint64_t whole) {
  if (first > whole || count > whole - first) {
    misuse("elements " + std::to_string(first) + " to " + std::to_string(first) + " + " +
           std::to_string(count) + " of a parameter of " + std::to_string(whole) + "; give a part of it");
  }
}

std::vector<float> widen(DataType type, const void* values, std::uint64_t count) {
  std::vector<float> wide(count);
  if (type == DataType::kFloat32) {
    std::memcpy(wide.data(), values, count * sizeof(float));
    return wide;
  }
  const auto* const half = static_cast<const std::byte*>(values);
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, half + i * sizeof(bits), sizeof(bits));
    wide[i] = type == DataType::kBfloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
  }
  return wide;
}

void narrow(DataType type, const float* wide, std::uint64_t count, void* values) {
  if (type == DataType::kFloat32) {
    std::memcpy(values, wide, count * sizeof(float));
    return;
  }
  auto* const half = static_cast<std::byte*>(values);
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint16_t bits =
        type == DataType::kBfloat16 ? float_to_bfloat16(wide[i]) : float_to_float16(wide[i]);
    std::memcpy(half + i * sizeof(bits), &bits, sizeof(bits));
  }
}

// PyTorch has as many. Larger: memory that is no shape is read if the count is wrong.
constexpr std::uint64_t kMostDimensions = 64;

void check_dimensions(std::uint64_t count) {
  if (count > kMostDimensions) {
    misuse("dimension_count is " + std::to_string(count) + "; a tensor has at most " +
           std::to_string(kMostDimensions) + " dimensions");
  }
}

// The latest lease of a unit that is alive.
template <typename Wanted>
EngineObject::LiveLease* find_lease(EngineObject& object, std::int32_t unit, Wanted wanted) {
  const auto found = std::find_if(object.leases.rbegin(), object.leases.rend(),
                                  [&](const auto& lease) { return lease.unit == unit && wanted(lease); });
  return found == object.leases.rend() ? nullptr : &*found;
}

EngineObject::LiveLease& lease_of(EngineObject& object, std::int32_t unit, bool backward) {
  EngineObject::LiveLease* const lease =
      find_lease(object, unit, [&](const auto& one) { return !backward || one.backward; });
  if (lease == nullptr) {
    misuse("unit " + unit_of(object, unit).name + " is not acquired" +
           (backward ? " for its backward pass" : "") + "; call forebay_acquire() first");
  }
  return *lease;
}

// An engine that trains and one that only plans are described by the same calls.
std::int32_t add_unit(EngineObject& object, const std::string& name, bool reads) {
  return object.engine != nullptr ? object.engine->add_unit(name, reads)
                                  : object.description.add_unit(name, reads);
}
std::int32_t add_parameter(EngineObject& object, std::int32_t unit, const ParameterShape& p) {
  unit_of(object, unit);
  if (object.engine == nullptr) return object.description.add_parameter(unit, p);
  const ParameterId added =
      object.engine->add_parameter(unit, p.name, p.count, p.group, p.frozen, p.replicated);
  if (p.elementwise) object.engine->declare_elementwise(added);
  if (!p.shape.empty()) object.engine->declare_shape(added, {p.shape.data(), p.shape.size()});
  return added.index;
}
std::int32_t tie(EngineObject& object, std::int32_t unit, ParameterId owner) {
  return object.engine != nullptr ? object.engine->tie(unit, owner)
                                  : object.description.tie(unit, {owner.unit, owner.index});
}

Plan plan_of(const EngineObject& object) {
  if (object.engine != nullptr) return object.engine->plan();
  return value_or_throw(make_plan(object.shape, object.plan_options));
}

Json statistics_of(EngineObject& object) {
  const EngineStatistics s = object.engine->statistics();
  Json operations = Json::array();
  for (const OperationTraffic& one : object.engine->operation_traffic()) {
    Json peers = Json::array();
    for (const Traffic& peer : one.peers) peers.push_back(json_of(peer));
    operations.push_back({{"operation", one.operation}, {"count", one.count}, {"peers", peers}});
  }
  return {{"peak", json_of(s.peak)},
          {"planned", json_of(s.planned)},
          {"host_bytes", s.host_bytes},
          {"planned_host_bytes", s.planned_host_bytes},
          {"host_placement", s.host_placement},
          {"file_bytes", s.file_bytes},
          {"planned_file_bytes", s.planned_file_bytes},
          {"file_read_bytes", s.file_read_bytes},
          {"file_written_bytes", s.file_written_bytes},
          {"store_description", s.store_description},
          {"peak_reserved_bytes", s.peak_reserved_bytes},
          {"planned_reserved_bytes", s.planned_reserved_bytes},
          {"planned_wire_per_step", json_of(s.planned_wire_per_step)},
          {"traffic", json_of(s.traffic)},
          {"attempted_steps", s.attempted_steps},
          {"applied_steps", s.applied_steps},
          {"gather_count", s.gather_count},
          {"wire_latency_seconds", s.wire_speed.latency_seconds},
          {"wire_bytes_per_second", s.wire_speed.bytes_per_second},
          {"operations", operations}};
}

Json report_of(EngineObject& object) {
  const ShardingOptions& options = object.engine != nullptr
                                       ? static_cast<const ShardingOptions&>(object.engine->options())
                                       : object.plan_options;
  Json set = Json::object();
  for (const OptionRow& row : sharding_option_table()) set[row.name] = option_text(options, row.name);
  Json json{{"options", set}, {"model", json_of(model_of(object))}, {"plan", json_of(plan_of(object))}};
  if (object.committed) {
    if (options.order_of_units == OrderOfUnits::kRecorded)
      json["recorded_order"] = object.engine->recorded_order();
    json["statistics"] = statistics_of(object);
  }
  return json;
}

struct StepNumber {
  const char* name;
  std::uint64_t (Engine::*value)() const;
};
// Numbers that do not wait.
constexpr StepNumber kStepNumbers[] = {
    {"attempted_steps", &Engine::attempted_steps},     {"applied_steps", &Engine::applied_steps},
    {"committed_step", &Engine::committed_step},       {"open_steps", &Engine::open_steps},
    {"begun_micro_steps", &Engine::begun_micro_steps}, {"open_evaluations", &Engine::open_evaluations},
    {"open_acquisitions", &Engine::open_leases}};

// The names of forebay_hyperparameter(), and their places.
struct WholeStepValue {
  const char* name;
  void (*set)(Hyperparameters& hyperparameters, double value);
};
constexpr WholeStepValue kWholeStep[] = {
    {"clip", [](Hyperparameters& h, double value) { h.clip = value; }},
    {"gradient-factor", [](Hyperparameters& h, double value) { h.gradient_factor = value; }},
    {"metric", [](Hyperparameters& h, double value) { h.metric = value; }},
    {"stop", [](Hyperparameters& h, double value) { h.stop = value != 0; }},
};
struct GroupValue {
  const char* name;
  void (*set)(GroupHyperparameters& group, double value);
};
constexpr GroupValue kGroup[] = {
    {"lr", [](GroupHyperparameters& g, double value) { g.lr = value; }},
    {"weight-decay", [](GroupHyperparameters& g, double value) { g.weight_decay = value; }},
    {"beta1", [](GroupHyperparameters& g, double value) { g.beta1 = value; }},
    {"beta2", [](GroupHyperparameters& g, double value) { g.beta2 = value; }},
    {"epsilon", [](GroupHyperparameters& g, double value) { g.epsilon = value; }},
};

template <typename Rows, typename Target>
void set_value(const Rows& rows, Target& target, const char* name, double value) {
  for (const auto& row : rows) {
    if (std::strcmp(row.name, name) == 0) return row.set(target, value);
  }
  std::vector<std::string> names;
  std::string list;
  for (const auto& row : rows) {
    names.emplace_back(row.name);
    list += (list.empty() ? "" : ", ") + names.back();
  }
  const std::string nearest = nearest_name(name, names);
  misuse(std::string("there is no value ") + name + "; " +
         (nearest.empty() ? "use one of " + list : "did you mean " + nearest + "?"));
}

void set_values(forebay_engine* engine, std::int32_t unit, std::int32_t index, std::int32_t dtype,
                const void* values, std::uint64_t first, std::uint64_t count,
                void (Engine::*set)(ParameterId, std::uint64_t, Span<const float>)) {
  const DataType type = data_type(dtype);
  const auto held = hold(engine);
  Engine& trained = committed(*held);
  const ParameterId id = resolve(*held, unit, index);
  check_part(first, count, count_of(*held, id));
  if (count > 0) (trained.*set)(id, first, widen(type, values, count));
}

}  // namespace

// --- description ---

std::int32_t forebay_engine_create(forebay_device* device, forebay_communicator* communicator,
                                   forebay_communicator* grid, forebay_timeline* timeline,
                                   forebay_options* options, forebay_engine** engine) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(engine);
    auto made = std::make_shared<EngineObject>();
    made->device = share(device).keep();
    made->ranks = share(communicator).keep();
    if (made->ranks->device != made->device)
      misuse("communicator is on another device; make both on the same one");
    made->timeline = keep_or_null(timeline);
    EngineOptions given = options_of(options).engine;
    if (grid != nullptr) {
      made->others.push_back(share(grid).keep());
      given.grid = made->others.back()->communicator.get();
    }
    if (timeline != nullptr) given.timeline = &made->timeline->timeline;
    throw_if_error(check_sharding_options(given));
    throw_if_error(check_offload_given(given));
    made->engine = std::make_unique<Engine>(*made->device->backend, made->device->kernels(),
                                            *made->ranks->communicator, std::move(given));
    *engine = make_handle<forebay_engine>(std::move(made));
  });
}

std::int32_t forebay_engine_plan(forebay_options* options, forebay_engine** engine) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(engine);
    const Options given = options_of(options);
    auto made = std::make_shared<EngineObject>();
    static_cast<ShardingOptions&>(made->plan_options) = given.engine;
    made->plan_options.ranks = given.process.size == 0 ? 1 : given.process.size;
    if (given.granularity != 0) made->plan_options.chunk_bytes = given.granularity;
    throw_if_error(check_sharding_options(made->plan_options));
    throw_if_error(check_offload_given(made->plan_options));
    *engine = make_handle<forebay_engine>(std::move(made));
  });
}

std::int32_t forebay_engine_add_unit(forebay_engine* engine, const char* name, std::int32_t flags,
                                     std::int32_t* unit) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(name, unit);
    check_flags(flags, FOREBAY_BACKWARD_READS_NOTHING);
    const auto held = hold(engine);
    *unit = add_unit(*held, name, flags == 0);
  });
}

std::int32_t forebay_engine_add_parameter(forebay_engine* engine, std::int32_t unit, const char* name,
                                          std::uint64_t count, std::int32_t group, std::int32_t flags,
                                          std::int32_t* index) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(name, index);
    check_flags(flags, FOREBAY_FROZEN | FOREBAY_REPLICATED | FOREBAY_OPTIONAL | FOREBAY_ELEMENTWISE);
    const bool frozen = (flags & FOREBAY_FROZEN) != 0;
    const bool replicated = (flags & FOREBAY_REPLICATED) != 0;
    const auto held = hold(engine);
    const bool elementwise = (flags & FOREBAY_ELEMENTWISE) != 0;
    *index = add_parameter(*held, unit,
                           {.name = name,
                            .count = count,
                            .group = group,
                            .frozen = frozen,
                            .replicated = replicated,
                            .elementwise = elementwise});
    if ((flags & FOREBAY_OPTIONAL) != 0 && held->engine != nullptr)
      held->engine->declare_optional({unit, *index});
  });
}

std::int32_t forebay_engine_declare_shape(forebay_engine* engine, std::int32_t unit, std::int32_t index,
                                          const std::uint64_t* shape, std::uint64_t dimension_count) {
  return guarded(__func__, [&] {
    if (shape == nullptr && dimension_count != 0)
      misuse("shape is null and has dimensions; give an address, or no dimensions");
    check_dimensions(dimension_count);
    const auto held = hold(engine);
    const ParameterId id = resolve(*held, unit, index);
    if (held->engine != nullptr) return held->engine->declare_shape(id, {shape, dimension_count});
    ParameterShape& parameter =
        held->shape.units[static_cast<std::size_t>(id.unit)].parameters[static_cast<std::size_t>(id.index)];
    // Divides rather than multiplies, which could overflow.
    std::uint64_t left = parameter.count;
    for (std::uint64_t i = 0; i < dimension_count; ++i)
      left = shape[i] != 0 && left % shape[i] == 0 ? left / shape[i] : 0;
    if (left != 1) {
      misuse("the dimensions of parameter " + parameter.name + " do not multiply to its " +
             std::to_string(parameter.count) + " elements; give its shape");
    }
    parameter.shape.assign(shape, shape + dimension_count);
  });
}

std::int32_t forebay_engine_declare_split(forebay_engine* engine, std::int32_t unit, std::int32_t index,
                                          const std::uint64_t* shape, std::uint64_t dimension_count,
                                          std::int32_t dimension, std::uint64_t sections, std::uint64_t part,
                                          std::uint64_t parts) {
  return guarded(__func__, [&] {
    if (shape == nullptr) misuse("shape is null; give the dimensions of the whole tensor");
    check_dimensions(dimension_count);
    const auto held = hold(engine);
    engine_of(*held).declare_split(resolve(*held, unit, index), {.shape = {shape, shape + dimension_count},
                                                                 .dimension = dimension,
                                                                 .sections = sections,
                                                                 .part = part,
                                                                 .parts = parts});
  });
}

std::int32_t forebay_engine_tie(forebay_engine* engine, std::int32_t unit, std::int32_t of_unit,
                                std::int32_t of_index, std::int32_t* index) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(index);
    const auto held = hold(engine);
    unit_of(*held, unit);
    unit_of(*held, of_unit, "of_unit");
    if (unit <= of_unit) misuse("of_unit is not earlier than unit; tie the later unit to the earlier one");
    *index = tie(*held, unit, resolve(*held, of_unit, of_index));
  });
}

std::int32_t forebay_engine_share(forebay_engine* engine, std::int32_t unit, forebay_communicator* stages) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    std::shared_ptr<Ranks> kept = share(stages).keep();
    engine_of(*held).share(unit, *kept->communicator);
    held->others.push_back(std::move(kept));
  });
}

std::int32_t forebay_engine_add_model(forebay_engine* engine, const char* config_json) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(config_json);
    const auto held = hold(engine);
    if (!model_of(*held).units.empty())
      misuse("the engine has units already; add the model to a new engine, and other units after it");
    const TransformerShape shape = value_or_throw(parse_model_config(config_json, "config_json"));
    for (const UnitShape& unit : value_or_throw(make_model_shape(shape)).units) {
      const std::int32_t added = add_unit(*held, unit.name, unit.backward_reads_parameters);
      for (const ParameterShape& parameter : unit.parameters) add_parameter(*held, added, parameter);
      for (const UnitShape::Tied& tied : unit.tied) tie(*held, added, {tied.unit, tied.index});
    }
  });
}

std::int32_t forebay_engine_declare_activations(forebay_engine* engine, std::uint64_t bytes) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    if (held->engine != nullptr) {
      held->engine->declare_activations(bytes);
    } else {
      held->shape.activation_bytes = bytes;
    }
  });
}

std::int32_t forebay_engine_activation_room(forebay_engine* engine, std::uint64_t* bytes) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(bytes);
    const auto held = hold(engine);
    *bytes = engine_of(*held).activation_room();
  });
}

std::int32_t forebay_engine_commit(forebay_engine* engine) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    engine_of(*held).commit();
    held->committed = true;
    int groups = 0;
    for (const UnitShape& unit : held->engine->model().units)
      for (const ParameterShape& parameter : unit.parameters) groups = std::max(groups, parameter.group + 1);
    held->hyperparameters.groups.resize(
        std::max(held->hyperparameters.groups.size(), static_cast<std::size_t>(groups)));
  });
}

std::int32_t forebay_engine_address(forebay_engine* engine, std::int32_t unit, std::int32_t index,
                                    void** address) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(address);
    const auto held = hold(engine);
    *address = committed(*held).address(resolve(*held, unit, index));
  });
}

std::int32_t forebay_engine_activations(forebay_engine* engine, void** address) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(address);
    const auto held = hold(engine);
    *address = committed(*held).activations();
  });
}

std::int32_t forebay_engine_report(forebay_engine* engine, const char** json) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(json);
    const auto held = hold(engine);
    *json = held->give(dump(report_of(*held)));
  });
}

std::int32_t forebay_engine_number(forebay_engine* engine, const char* name, std::uint64_t* value) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(name, value);
    const auto held = hold(engine);
    for (const StepNumber& number : kStepNumbers) {
      if (std::strcmp(number.name, name) == 0) {
        *value = (committed(*held).*number.value)();
        return;
      }
    }
    *value = number_at(report_of(*held), name);
  });
}

void forebay_engine_destroy(forebay_engine* engine) {
  api::close(engine, __func__);
}

// --- values ---

std::int32_t forebay_engine_set(forebay_engine* engine, std::int32_t unit, std::int32_t index,
                                std::int32_t dtype, const void* values, std::uint64_t first,
                                std::uint64_t count) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(values);
    set_values(engine, unit, index, dtype, values, first, count, &Engine::set_parameter_part);
  });
}

std::int32_t forebay_engine_set_changed(forebay_engine* engine, std::int32_t unit, std::int32_t index,
                                        std::int32_t dtype, const void* values, std::uint64_t first,
                                        std::uint64_t count) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(values);
    set_values(engine, unit, index, dtype, values, first, count, &Engine::set_changed_part);
  });
}

std::int32_t forebay_engine_get(forebay_engine* engine, std::int32_t unit, std::int32_t index,
                                std::int32_t dtype, void* values, std::uint64_t first, std::uint64_t count) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(values);
    const DataType type = data_type(dtype);
    const auto held = hold(engine);
    Engine& trained = committed(*held);
    const ParameterId id = resolve(*held, unit, index);
    check_part(first, count, count_of(*held, id));
    const std::vector<float> masters = trained.get_parameter(id);
    narrow(type, masters.data() + first, count, values);
  });
}

std::int32_t forebay_engine_visit(forebay_engine* engine,
                                  void (*visitor)(void* user, std::int32_t unit, std::int32_t index,
                                                  const char* name, const float* values, std::uint64_t count),
                                  void* user) {
  return guarded(__func__, [&] {
    if (visitor == nullptr) misuse("visitor is null; give a function");
    const auto held = hold(engine);
    Engine& trained = committed(*held);
    const auto& units = trained.model().units;
    std::size_t unit = 0;
    std::size_t index = 0;
    trained.visit_parameters([&](const ParameterShape& parameter, Span<const float> values) {
      while (index == units[unit].parameters.size()) {
        ++unit;
        index = 0;
      }
      visitor(user, static_cast<std::int32_t>(unit), static_cast<std::int32_t>(index), parameter.name.c_str(),
              values.data(), values.size());
      ++index;
    });
  });
}

namespace {

void copy_digest(const std::string& digest, char* target) {
  std::memcpy(target, digest.c_str(), digest.size() + 1);
}

}  // namespace

std::int32_t forebay_engine_digest(forebay_engine* engine, char digest[33]) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(digest);
    const auto held = hold(engine);
    copy_digest(committed(*held).digest(), digest);
  });
}

std::int32_t forebay_engine_shard_digest(forebay_engine* engine, char digest[33]) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(digest);
    const auto held = hold(engine);
    copy_digest(committed(*held).shard_digest(), digest);
  });
}

// --- steps ---

std::int32_t forebay_hyperparameter(forebay_engine* engine, std::int32_t group, const char* name,
                                    double value) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(name);
    const auto held = hold(engine);
    if (group == FOREBAY_WHOLE_STEP) return set_value(kWholeStep, held->hyperparameters, name, value);
    auto& groups = held->hyperparameters.groups;
    if (group < 0 || static_cast<std::size_t>(group) >= groups.size()) {
      misuse("group is " + std::to_string(group) + "; the model has " + std::to_string(groups.size()) +
             " parameter groups after forebay_engine_commit()");
    }
    set_value(kGroup, groups[static_cast<std::size_t>(group)], name, value);
  });
}

std::int32_t forebay_step_begin(forebay_engine* engine) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    committed(*held).step_begin();
  });
}

std::int32_t forebay_micro_step_begin(forebay_engine* engine, std::int32_t index) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    committed(*held).micro_step_begin(index);
  });
}

std::int32_t forebay_evaluation_begin(forebay_engine* engine) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    committed(*held).evaluation_begin();
  });
}

std::int32_t forebay_evaluation_end(forebay_engine* engine) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    committed(*held).evaluation_end();
  });
}

std::int32_t forebay_acquire(forebay_engine* engine, std::int32_t unit, std::int32_t backward, void* stream) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    Engine& trained = committed(*held);
    unit_of(*held, unit);
    const Stream on = held->device->stream(stream);
    held->leases.reserve(held->leases.size() + 1);
    held->leases.push_back(
        {unit, backward != 0, on, backward != 0 ? trained.backward(unit, on) : trained.forward(unit, on)});
  });
}

std::int32_t forebay_parameter(forebay_engine* engine, std::int32_t unit, std::int32_t index,
                               void** address) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(address);
    const auto held = hold(engine);
    *address = lease_of(*held, unit, false).lease.parameter(index);
  });
}

std::int32_t forebay_gradient(forebay_engine* engine, std::int32_t unit, std::int32_t index, void** address,
                              std::int32_t* accumulate) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(address, accumulate);
    const auto held = hold(engine);
    bool adds = false;
    *address = lease_of(*held, unit, true).lease.gradient(index, &adds);
    *accumulate = adds ? 1 : 0;
  });
}

std::int32_t forebay_zeroed_gradient(forebay_engine* engine, std::int32_t unit, std::int32_t index,
                                     void** address) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(address);
    const auto held = hold(engine);
    *address = lease_of(*held, unit, true).lease.zeroed_gradient(resolve(*held, unit, index)).data;
  });
}

std::int32_t forebay_gradient_ready(forebay_engine* engine, std::int32_t unit, std::int32_t index) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    lease_of(*held, unit, true).lease.grad_ready(index);
  });
}

std::int32_t forebay_release(forebay_engine* engine, std::int32_t unit, void* stream) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    EngineObject::LiveLease& lease = lease_of(*held, unit, false);
    if (held->device->stream(stream) != lease.stream)
      misuse("stream is not the one that acquired unit " + unit_of(*held, unit).name +
             "; release it on that one, after forebay_stream_wait() for others");
    held->leases.erase(held->leases.begin() + (&lease - held->leases.data()));
  });
}

std::int32_t forebay_skip(forebay_engine* engine, std::int32_t unit) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    Engine& trained = committed(*held);
    unit_of(*held, unit);
    trained.skip(unit);
  });
}

std::int32_t forebay_loss_scale(forebay_engine* engine, double* scale) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(scale);
    const auto held = hold(engine);
    *scale = committed(*held).loss_scale();
  });
}

std::int32_t forebay_norm(forebay_engine* engine, double* norm) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(norm);
    const auto held = hold(engine);
    *norm = committed(*held).gradient_norm();
  });
}

std::int32_t forebay_step(forebay_engine* engine, forebay_step_result* result, std::uint64_t bytes) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(result);
    const auto held = hold(engine);
    const StepResult done = committed(*held).step(held->hyperparameters);
    held->hyperparameters.metric = 0;
    held->hyperparameters.stop = false;
    forebay_step_result known{};
    known.grad_norm = done.grad_norm.value_or(std::numeric_limits<double>::quiet_NaN());
    known.loss_scale = done.loss_scale;
    known.metric_sum = done.metric_sum;
    known.skipped = done.skipped ? 1 : 0;
    known.stop = done.stop ? 1 : 0;
    known.abandoned = done.abandoned ? 1 : 0;
    std::memcpy(result, &known, std::min<std::uint64_t>(bytes, sizeof(known)));
  });
}

std::int32_t forebay_abandon(forebay_engine* engine, std::int32_t micro_steps) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    committed(*held).abandon(micro_steps);
    held->leases.clear();
  });
}

namespace {

std::string bytes_of(const void* trainer_state, std::uint64_t bytes) {
  if (trainer_state == nullptr && bytes != 0)
    misuse("trainer_state is null and has bytes; give an address, or no bytes");
  return trainer_state == nullptr ? "" : std::string(static_cast<const char*>(trainer_state), bytes);
}

}  // namespace

// --- state ---

std::int32_t forebay_lock(forebay_engine* engine, const char* directory) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(directory);
    const auto held = hold(engine);
    committed(*held).lock_state(directory);
  });
}

std::int32_t forebay_save(forebay_engine* engine, const char* directory, const void* trainer_state,
                          std::uint64_t trainer_state_bytes) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(directory);
    const std::string state = bytes_of(trainer_state, trainer_state_bytes);
    const auto held = hold(engine);
    committed(*held).save_state(directory, state);
  });
}

std::int32_t forebay_save_begin(forebay_engine* engine, const char* directory, const void* trainer_state,
                                std::uint64_t trainer_state_bytes, std::int32_t keep) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(directory);
    const std::string state = bytes_of(trainer_state, trainer_state_bytes);
    const auto held = hold(engine);
    committed(*held).save_state_begin(directory, state, keep);
  });
}

std::int32_t forebay_save_end(forebay_engine* engine) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    committed(*held).save_state_end();
  });
}

std::int32_t forebay_engine_freeze(forebay_engine* engine, std::int32_t unit, std::int32_t index,
                                   std::int32_t frozen) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    committed(*held).freeze(resolve(*held, unit, index), frozen != 0);
  });
}

std::int32_t forebay_engine_reset_moments(forebay_engine* engine) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    committed(*held).reset_moments();
  });
}

std::int32_t forebay_engine_swap_average(forebay_engine* engine) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    committed(*held).swap_average();
  });
}

std::int32_t forebay_load(forebay_engine* engine, const char* directory, const void** trainer_state,
                          std::uint64_t* trainer_state_bytes) {
  return guarded(__func__, [&] {
    FOREBAY_REQUIRE(directory, trainer_state, trainer_state_bytes);
    const auto held = hold(engine);
    std::string state = committed(*held).load_state(directory);
    *trainer_state_bytes = state.size();
    *trainer_state = held->give(std::move(state));
  });
}

std::int32_t forebay_spill(forebay_engine* engine, std::int32_t states) {
  return guarded(__func__, [&] {
    check_flags(states, FOREBAY_SPILL_ALL);
    const auto held = hold(engine);
    committed(*held).spill({.parameters = (states & FOREBAY_SPILL_PARAMETERS) != 0,
                            .gradients = (states & FOREBAY_SPILL_GRADIENTS) != 0,
                            .optimizer = (states & FOREBAY_SPILL_OPTIMIZER) != 0,
                            .workspace = (states & FOREBAY_SPILL_WORKSPACE) != 0});
  });
}

std::int32_t forebay_fetch(forebay_engine* engine) {
  return guarded(__func__, [&] {
    const auto held = hold(engine);
    committed(*held).fetch();
  });
}
