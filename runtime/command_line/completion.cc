#include <algorithm>

#include "forebay/command_line.h"

namespace forebay {
namespace {

std::string last_word(const std::string& name) {
  return name.substr(name.rfind(' ') + 1);
}

// The words among the values of an option: "fp32 bf16 fp16" of "fp32|bf16|fp16", "auto" of "BYTES|auto".
std::string words_of(const OptionText& option) {
  if (option.values.find('|') == std::string::npos) return "";
  std::string words;
  for (std::size_t begin = 0; begin <= option.values.size();) {
    const std::size_t end = std::min(option.values.find('|', begin), option.values.size());
    const std::string word = option.values.substr(begin, end - begin);
    const bool is_word =
        word.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789+-") == std::string::npos;
    if (is_word) words += (words.empty() ? "" : " ") + word;
    begin = end + 1;
  }
  return words;
}

std::string names_of(const CommandText& command) {
  std::string names;
  for (const OptionText& option : command.options)
    for (const std::string& name : option.names) names += (names.empty() ? "" : " ") + name;
  return names;
}

std::string commands_of(const CommandText& program) {
  std::string names;
  for (const CommandText& one : program.commands) names += last_word(one.name) + " ";
  return names + "help";
}

// A name for a function of the shell.
std::string function_of(const CommandText& program) {
  std::string name = "_" + program.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

std::string replaced(const std::string& text, const std::string& letters, const std::string& escape) {
  std::string result;
  for (const char letter : text) {
    if (letters.find(letter) != std::string::npos) result += escape;
    result += letter;
  }
  return result;
}

// In single quotes.
std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char letter : text) result += letter == '\'' ? std::string("'\\''") : std::string(1, letter);
  return result + "'";
}

std::string bash_cases(const CommandText& command) {
  std::string text = "      case $before in\n";
  for (const OptionText& option : command.options) {
    const std::string words = words_of(option);
    if (words.empty() || option.names.empty()) continue;
    std::string names;
    for (const std::string& name : option.names) names += (names.empty() ? "" : "|") + name;
    text += "        " + names + ") words='" + words + "' ;;\n";
  }
  return text + "        *) [[ $word == -* ]] && words='" + names_of(command) + "' ;;\n      esac\n";
}

std::string zsh_arguments(const CommandText& command, const std::string& indent) {
  std::string text = indent + "_arguments";
  for (const OptionText& option : command.options) {
    const std::string help = "[" + replaced(option.help, "[]\\:", "\\") + "]";
    const std::string words = words_of(option);
    const std::string value = option.values.empty() ? ""
                              : words.empty()       ? ":value:_files"
                                                    : ":value:(" + words + ")";
    for (const std::string& name : option.names)
      text += " \\\n" + indent + "  " + quoted(name + help + value);
  }
  return text + " \\\n" + indent + "  '*:file:_files'\n";
}

}  // namespace

std::string bash_completion(const CommandText& program) {
  const std::string function = function_of(program);
  std::string text =
      "# Completion of " + program.name + " for bash.\n" + function +
      "() {\n  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=''\n"
      "  [[ $before == = ]] && before=${COMP_WORDS[COMP_CWORD-2]}\n"
      "  case ${COMP_WORDS[1]} in\n";
  for (const CommandText& one : program.commands)
    text += "    " + last_word(one.name) + ")\n" + bash_cases(one) + "      ;;\n";
  if (!program.commands.empty()) text += "    help) words='" + commands_of(program) + "' ;;\n";
  text += "    *)\n" + bash_cases(program);
  if (!program.commands.empty())
    text += "      (( COMP_CWORD == 1 )) && [[ $word != -* ]] && words='" + commands_of(program) + "'\n";
  return text +
         "      ;;\n  esac\n  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n}\ncomplete -o default -F " +
         function + " " + program.name + "\n";
}

std::string zsh_completion(const CommandText& program) {
  std::string text = "#compdef " + program.name + "\n# Completion of " + program.name + " for zsh.\n";
  if (program.commands.empty()) return text + zsh_arguments(program, "");
  text += "local -a commands=(\n";
  for (const CommandText& one : program.commands)
    text += "  " + quoted(last_word(one.name) + ":" + replaced(one.summary, ":\\", "\\")) + "\n";
  text +=
      "  'help:Print help'\n)\nif (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then\n"
      "  _describe command commands\n  return\nfi\ncase $words[2] in\n";
  for (const CommandText& one : program.commands) {
    text += "  " + last_word(one.name) + ")\n    shift words\n    (( CURRENT-- ))\n" +
            zsh_arguments(one, "    ") + "    ;;\n";
  }
  return text + "  help) _describe command commands ;;\n  *)\n" + zsh_arguments(program, "    ") +
         "    ;;\nesac\n";
}

std::string fish_completion(const CommandText& program) {
  std::string text = "# Completion of " + program.name + " for fish.\n";
  const auto add = [&](const CommandText& command, const std::string& condition) {
    for (const OptionText& option : command.options) {
      if (option.names.empty()) continue;
      text += "complete -c " + program.name + condition;
      for (const std::string& name : option.names)
        text += name[1] == '-' ? " -l " + name.substr(2) : " -s " + name.substr(1);
      const std::string words = words_of(option);
      if (!option.values.empty()) text += words.empty() ? " -r" : " -x -a " + quoted(words);
      text += " -d " + quoted(option.help.substr(0, option.help.find_first_of(";:."))) + "\n";
    }
  };
  if (program.commands.empty()) {
    add(program, "");
    return text;
  }
  for (const CommandText& one : program.commands) {
    text += "complete -c " + program.name + " -n __fish_use_subcommand -a " + last_word(one.name) + " -d " +
            quoted(one.summary) + "\n";
  }
  text += "complete -c " + program.name + " -n __fish_use_subcommand -a help -d 'Print help'\n";
  add(program, " -n __fish_use_subcommand");
  for (const CommandText& one : program.commands)
    add(one, " -n '__fish_seen_subcommand_from " + last_word(one.name) + "'");
  return text;
}

}  // namespace forebay
