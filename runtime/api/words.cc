#include "runtime/api/words.h"

#include <algorithm>
#include <cctype>

namespace forebay::api {
namespace {

struct Pair {
  std::string_view cxx;
  std::string_view c;
};

constexpr Pair kCalls[] = {
    {"abandon", "forebay_abandon"},
    {"activation_room", "forebay_engine_activation_room"},
    {"add_parameter", "forebay_engine_add_parameter"},
    {"add_unit", "forebay_engine_add_unit"},
    {"address", "forebay_engine_address"},
    {"backward", "forebay_acquire"},
    {"commit", "forebay_engine_commit"},
    {"committed_plan", "forebay_engine_report"},
    {"declare_activations", "forebay_engine_declare_activations"},
    {"declare_elementwise", "FOREBAY_ELEMENTWISE"},
    {"declare_optional", "FOREBAY_OPTIONAL"},
    {"declare_shape", "forebay_engine_declare_shape"},
    {"declare_split", "forebay_engine_declare_split"},
    {"digest", "forebay_engine_digest"},
    {"evaluation_begin", "forebay_evaluation_begin"},
    {"evaluation_end", "forebay_evaluation_end"},
    {"fetch", "forebay_fetch"},
    {"forward", "forebay_acquire"},
    {"freeze", "forebay_engine_freeze"},
    {"get_parameter", "forebay_engine_get"},
    {"grad_ready", "forebay_gradient_ready"},
    {"gradient", "forebay_gradient"},
    {"gradient_norm", "forebay_norm"},
    {"load_state", "forebay_load"},
    {"lock_state", "forebay_lock"},
    {"micro_step_begin", "forebay_micro_step_begin"},
    {"parameter", "forebay_parameter"},
    {"plan", "forebay_engine_report"},
    {"recorded_order", "forebay_engine_report"},
    {"reset_moments", "forebay_engine_reset_moments"},
    {"save_state", "forebay_save"},
    {"save_state_begin", "forebay_save_begin"},
    {"save_state_end", "forebay_save_end"},
    {"set_changed_part", "forebay_engine_set_changed"},
    {"set_parameter", "forebay_engine_set"},
    {"set_parameter_part", "forebay_engine_set"},
    {"shard_digest", "forebay_engine_shard_digest"},
    {"share", "forebay_engine_share"},
    {"skip", "forebay_skip"},
    {"spill", "forebay_spill"},
    {"statistics", "forebay_engine_report"},
    {"step", "forebay_step"},
    {"step_begin", "forebay_step_begin"},
    {"swap_average", "forebay_engine_swap_average"},
    {"tie", "forebay_engine_tie"},
    {"visit_parameters", "forebay_engine_visit"},
    {"zeroed_gradient", "forebay_zeroed_gradient"},
};
constexpr Pair kCheckpointerCalls[] = {
    {"check", "forebay_checkpointer_check"},
    {"commit", "forebay_checkpointer_commit"},
    {"committed_plan", "forebay_checkpointer_report"},
    {"declare", "forebay_checkpointer_declare"},
    {"device_bytes", "forebay_checkpointer_number"},
    {"discard", "forebay_checkpointer_discard"},
    {"discard_all", "forebay_checkpointer_discard_all"},
    {"load", "forebay_checkpointer_load"},
    {"plan", "forebay_checkpointer_report"},
    {"save", "forebay_checkpointer_save"},
    {"statistics", "forebay_checkpointer_report"},
};

// Members of options whose option has another name. The others differ by "-" for "_".
constexpr Pair kOptions[] = {
    {"ArenaOptions::chunk_bytes", "the option arena-chunk"},
    {"ArenaOptions::limit_bytes", "the option arena-limit"},
    {"ArenaOptions::reserve_bytes", "the option arena-reserve"},
    {"EngineOptions::bucket_bytes", "the option bucket"},
    {"EngineOptions::grid", "grid of forebay_engine_create()"},
    {"EngineOptions::group", "the option order"},
    {"EngineOptions::host_processors", "the option host-threads"},
    {"EngineOptions::memory_bytes", "the option memory"},
    {"EngineOptions::offload_directories", "the option offload-tier"},
    {"EngineOptions::recorded_order", "the option order-of-units (recorded:ORDER)"},
    {"EngineOptions::shard_within_group", "the option shard-within"},
    {"EngineOptions::staging_bytes", "the option offload-staging"},
    {"TagOptions::pausable", "FOREBAY_PAUSABLE"},
};

constexpr Pair kWords[] = {{"lease", "acquire"},
                           {"leased", "acquired"},
                           {"leases", "acquisitions"},
                           {"lease_limit", "activation-leases"},
                           {"in_region", "activation-region"}};
constexpr Pair kCheckpointerWords[] = {{"lease", "load"},
                                       {"leased", "loaded"},
                                       {"leases", "loads"},
                                       {"lease_limit", "activation-leases"},
                                       {"in_region", "activation-region"}};
// Before the noun.
constexpr std::string_view kArticles[] = {"a ", "this ", "another ", "forward ", "backward "};

template <std::size_t kCount>
std::string_view find(const Pair (&table)[kCount], std::string_view cxx) {
  const auto* const found =
      std::find_if(std::begin(table), std::end(table), [&](const Pair& pair) { return pair.cxx == cxx; });
  return found == std::end(table) ? std::string_view() : found->c;
}

bool is_of_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == ':';
}

// A message stays readable beside a trainer's longest name.
std::string shown(std::string_view name) {
  constexpr std::size_t kLongest = 100;
  if (name.size() <= kLongest) return std::string(name);
  return std::string(name.substr(0, kLongest - 3)) + "...";
}

std::string option(std::string_view member) {
  if (const std::string_view known = find(kOptions, member); !known.empty()) return std::string(known);
  std::string name = "the option " + std::string(member.substr(member.find("::") + 2));
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

}  // namespace

std::string in_words_of_c(std::string_view message, std::string_view function) {
  const bool of_checkpointer = function.substr(0, 21) == "forebay_checkpointer_";
  std::string text;
  for (std::size_t i = 0; i < message.size();) {
    std::size_t end = i;
    while (end < message.size() && is_of_name(message[end])) ++end;
    if (end == i) {
      text += message[i++];
      continue;
    }
    // A colon that ends a phrase is not a part of the name.
    while (end > i + 1 && message[end - 1] == ':') --end;
    const std::string_view name = message.substr(i, end - i);
    i = end;
    const bool is_call = i < message.size() && message[i] == '(';
    std::string_view c;
    if (is_call) {
      if (of_checkpointer) c = find(kCheckpointerCalls, name);
      if (c.empty()) c = find(kCalls, name);
    } else if (name.find("Options::") != std::string_view::npos) {
      text += option(name);
      continue;
    } else if (!text.ends_with('-')) {  // A part of an option's name, as in activation-leases, stays.
      c = of_checkpointer ? find(kCheckpointerWords, name) : find(kWords, name);
    }
    if (c == "acquire" && !is_call) {
      for (const std::string_view article : kArticles) {
        const bool is_noun = text.size() >= article.size() &&
                             text.compare(text.size() - article.size(), article.size(), article) == 0;
        if (!is_noun) continue;
        if (article == "a ") text.insert(text.size() - 1, "n");
        c = "acquisition";
        break;
      }
    }
    text += c.empty() ? shown(name) : std::string(c);
  }
  return text;
}

}  // namespace forebay::api
