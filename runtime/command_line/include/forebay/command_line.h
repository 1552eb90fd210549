// The programs of forebay on a terminal: help texts, manual pages and completions, all
// made from one description of a command, which describe_command() reads from the options that CLI11 parses.
//
// It includes nothing of CLI11: App is CLI::App of the program that includes it.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <string>
#include <vector>

#include "forebay/status.h"

namespace forebay {

struct OptionText {
  std::vector<std::string> names;  // "-h", "--help"; none: a positional argument.
  std::string values;              // Placeholder, "BYTES|auto", or the label of an argument; empty: a flag.
  std::string help;
  std::string fallback;     // The default; empty: none.
  std::string environment;  // A variable that sets the option; empty: none.
  std::string heading;      // The part of the help that lists it.
  bool required = false;
  bool repeats = false;
};

struct CommandText {
  std::string name;  // "forebay plan"
  std::string summary;
  std::vector<OptionText> options;    // Arguments among them.
  std::vector<CommandText> commands;  // Subcommands.
  std::string footer;
};

// Columns of the terminal: COLUMNS, or the width of the terminal that standard output is, otherwise 80.
std::size_t terminal_width();

// The text of --help.
std::string help_text(const CommandText& command, std::size_t width);

// The answer to a word that the command does not know, such as "there is no option --stagee; did you mean
// --stage?".
std::string unknown_word_text(const CommandText& command, const std::string& word);

// The parser's message `text` in our words, with a hint at the help of `program`.
std::string parse_error_text(std::string text, const std::string& program);

// A manual page for man(1).
std::string manual_page(const CommandText& command);

// Completions for the whole program.
std::string bash_completion(const CommandText& program);
std::string zsh_completion(const CommandText& program);
std::string fish_completion(const CommandText& program);

// Writes the pages and completions of a program to where they belong under share/: man/man1 and so on.
//
// Errors: kIoError naming the file.
Status write_manual(const CommandText& program, const std::string& share);

template <typename App>
CommandText describe_command(const App& app, const std::string& name) {
  CommandText command;
  command.name = name;
  command.summary = app.get_description();
  command.footer = app.get_footer();
  for (const auto* const option : app.get_options()) {
    if (option->get_group().empty()) continue;  // Hidden.
    OptionText& text = command.options.emplace_back();
    for (const std::string& letter : option->get_snames()) text.names.push_back("-" + letter);
    for (const std::string& word : option->get_lnames()) text.names.push_back("--" + word);
    text.help = option->get_description();
    text.heading = option->get_group();
    text.environment = option->get_envname();
    text.required = option->get_required();
    if (option->get_items_expected_max() == 0) continue;
    text.repeats = option->get_items_expected_max() > 1;
    text.values = option->get_type_name();
    text.values.resize(std::min(text.values.size(), text.values.find(":INT in [")));  // A validator's.
    text.fallback = option->get_default_str();
    if (!text.names.empty()) continue;
    text.heading = "Arguments";
    if (!text.values.empty() && text.values != "TEXT") continue;
    text.values = option->get_name(true);
    for (char& letter : text.values)
      letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  }
  for (const App* const sub : app.get_subcommands([](const App*) { return true; }))
    command.commands.push_back(describe_command(*sub, name + " " + sub->get_name()));
  return command;
}

}  // namespace forebay
