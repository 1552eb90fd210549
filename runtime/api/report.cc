#include "runtime/api/report.h"

#include <functional>
#include <vector>

#include "forebay/text.h"

namespace forebay::api {

std::string dump(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace);
}

std::uint64_t number_at(const Json& json, const std::string& path) {
  std::vector<std::string> names;
  const Json* found = nullptr;
  const std::function<void(const Json&, const std::string&)> visit = [&](const Json& at,
                                                                         const std::string& name) {
    if (at.is_number_integer()) {
      names.push_back(name);
      if (name == path) found = &at;
    }
    if (!at.is_object()) return;
    for (const auto& [key, value] : at.items()) visit(value, name.empty() ? key : name + "." + key);
  };
  visit(json, "");
  if (found != nullptr) return found->get<std::uint64_t>();
  const std::string nearest = nearest_name(path, names);
  misuse("there is no number " + path + "; " +
         (nearest.empty() ? "the report of this handle shows all" : "did you mean " + nearest + "?"));
}

Json json_of(const PoolBytes& bytes) {
  return {{"parameters", bytes.parameters},
          {"gradients", bytes.gradients},
          {"optimizer", bytes.optimizer},
          {"gathered", bytes.gathered},
          {"buckets", bytes.buckets},
          {"activations", bytes.activations},
          {"model_states", bytes.model_states()},
          {"total", bytes.total()}};
}

Json json_of(const WireBytes& bytes) {
  return {{"sent", bytes.sent}, {"received", bytes.received}};
}

Json json_of(const Traffic& traffic) {
  return {{"sent", traffic.sent_bytes}, {"received", traffic.received_bytes}};
}

Json json_of(const ModelShape& model) {
  Json units = Json::array();
  for (const UnitShape& unit : model.units) {
    Json parameters = Json::array();
    for (const ParameterShape& p : unit.parameters) {
      parameters.push_back({{"name", p.name},
                            {"count", p.count},
                            {"group", p.group},
                            {"frozen", p.frozen},
                            {"replicated", p.replicated}});
    }
    Json tied = Json::array();
    for (const UnitShape::Tied& t : unit.tied) tied.push_back({{"unit", t.unit}, {"index", t.index}});
    units.push_back({{"name", unit.name},
                     {"backward_reads_parameters", unit.backward_reads_parameters},
                     {"parameters", parameters},
                     {"tied", tied}});
  }
  return {{"parameters", model.parameter_count()},
          {"activation_bytes", model.activation_bytes},
          {"units", units}};
}

Json json_of(const Plan& plan) {
  return {{"ranks", plan.options.ranks},
          {"bytes", json_of(plan.bytes)},
          {"reserved_bytes", plan.reserved_bytes},
          {"host",
           {{"optimizer", plan.host_bytes.optimizer},
            {"gradients", plan.host_bytes.gradients},
            {"parameters", plan.host_bytes.parameters},
            {"staging", plan.host_bytes.staging},
            {"saving", plan.host_bytes.saving},
            {"total", plan.host_bytes.total()}}},
          {"files",
           {{"optimizer", plan.file_bytes.optimizer},
            {"parameters", plan.file_bytes.parameters},
            {"total", plan.file_bytes.total()},
            {"read_per_step", plan.file_bytes.read_per_step},
            {"written_per_step", plan.file_bytes.written_per_step}}},
          {"wire_per_step", json_of(plan.wire_per_step)},
          {"device_units", plan.device_units},
          {"slot_bytes", plan.slots.slot_bytes}};
}

Json json_of(const ActivationPlan& plan) {
  Json slots = Json::array();
  for (std::size_t i = 0; i < plan.slots.size(); ++i) {
    const ActivationSlot& slot = plan.slots[i];
    slots.push_back({{"unit", slot.unit},
                     {"slot", slot.slot},
                     {"bytes", slot.bytes},
                     {"placement", activation_placement_name(slot.placement)},
                     {"kept_bytes", plan.places[i].kept_bytes},
                     {"spilled_bytes", plan.places[i].spilled_bytes}});
  }
  return {{"device_bytes", plan.device_bytes()},
          {"reserved_bytes", plan.reserved_bytes},
          {"host_bytes", plan.host_bytes()},
          {"file_bytes", plan.file_bytes},
          {"look_ahead", plan.look_ahead},
          {"wire_per_micro_batch", json_of(plan.wire_per_micro_batch)},
          {"spilled_bytes_per_micro_batch", plan.spilled_bytes_per_micro_batch},
          {"slots", slots}};
}

}  // namespace forebay::api
