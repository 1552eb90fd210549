// ShardingArguments: the options of sharding_option_table() on the command line of a program that uses CLI11.
//
// It includes nothing of CLI11: App is CLI::App of the program that includes it.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "forebay/check.h"
#include "forebay/sharding_options.h"

namespace forebay {

template <typename App>
class ShardingArguments {
 public:
  using Option = std::remove_pointer_t<decltype(std::declval<App&>().get_option(std::string()))>;

  ShardingArguments() = default;
  ShardingArguments(const ShardingArguments&) = delete;  // The parser points at the words.
  ShardingArguments& operator=(const ShardingArguments&) = delete;

  // Adds the options that `program` has; the values of `defaults` are shown as theirs. Requires: this
  // outlives the parsing.
  void add(App& app, OptionProgram program, const ShardingOptions& defaults) {
    for (const OptionRow& row : sharding_option_table()) {
      if ((row.programs & program) == 0) continue;
      Argument& argument = arguments_.emplace_back();
      argument.row = &row;
      argument.word = option_text(defaults, row.name);
      const std::string name = row.name;
      const bool is_on = argument.word == "on";
      const std::string help = is_switch(row) && is_on ? "No " + std::string(row.help) : row.help;
      if (is_switch(row)) {
        argument.option = app.add_flag((is_on ? "--no-" : "--") + name, help);
      } else {
        argument.option = app.add_option("--" + name, argument.word, help);
        argument.option->type_name(option_values(row))->capture_default_str();
      }
      argument.option->group(row.heading);
    }
  }

  Option* option(std::string_view name) const { return find(name).option; }
  bool given(std::string_view name) const { return find(name).option->count() > 0; }
  // The text of an option, given or its default.
  const std::string& text(std::string_view name) const { return find(name).word; }
  // read() leaves this option alone, because its value is one that only the program knows.
  void skip(std::string_view name) { skipped_ = name; }

  // Sets the options from their texts, given or default, and checks that they go together.
  //
  // Errors: kInvalidArgument; the message begins with the option, dashes included.
  Status read(ShardingOptions& options) const {
    for (const Argument& argument : arguments_) {
      const OptionRow& row = *argument.row;
      if (skipped_ == row.name) continue;
      const bool turned = is_switch(row) && argument.option->count() > 0;
      const char* const other = argument.word == "on" ? "off" : "on";
      const Status status = set_option(options, row.name, turned ? other : argument.word);
      if (!status.ok()) return dashed(status);
    }
    FOREBAY_RETURN_IF_ERROR(check_offload_given(options, "--"));
    if (options.shard_within_group && text("order").compare(0, 6, "group:") != 0) {
      return {StatusCode::kInvalidArgument,
              "--shard-within group needs to know the groups; add --order group:G"};
    }
    return {};
  }

  // The same error for a program, whose options have dashes.
  static Status dashed(const Status& status) { return {status.code(), "--" + status.message()}; }

 private:
  struct Argument {
    const OptionRow* row = nullptr;
    std::string word;
    Option* option = nullptr;
  };

  const Argument& find(std::string_view name) const {
    for (const Argument& argument : arguments_) {
      if (name == argument.row->name) return argument;
    }
    FOREBAY_CHECK(false, "the program has no such option");
    return arguments_.front();
  }

  std::deque<Argument> arguments_;  // Elements stay where they are.
  std::string skipped_;
};

}  // namespace forebay
