// Reports as JSON, and numbers out of them by name.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "forebay/activation_plan.h"
#include "forebay/communicator.h"
#include "forebay/plan.h"
#include "runtime/api/handles.h"

namespace forebay::api {

using Json = nlohmann::ordered_json;

std::string dump(const Json& json);

// The number at a path, "plan.bytes.parameters": keys with points between them. Errors: thrown, with the
// nearest path.
std::uint64_t number_at(const Json& json, const std::string& path);

Json json_of(const PoolBytes& bytes);
Json json_of(const WireBytes& bytes);
Json json_of(const Traffic& traffic);
Json json_of(const ModelShape& model);
Json json_of(const Plan& plan);
Json json_of(const ActivationPlan& plan);

}  // namespace forebay::api
