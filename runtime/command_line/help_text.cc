#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "forebay/command_line.h"
#include "forebay/text.h"

namespace forebay {
namespace {

constexpr std::size_t kDefaultWidth = 80;
constexpr std::size_t kLeastWidth = 40;  // Narrower, and texts would be a word a line.
constexpr std::size_t kHelpColumn = 28;
constexpr const char* kOptions = "OPTIONS";

std::string label_of(const OptionText& option) {
  std::string label;
  for (const std::string& name : option.names) label += (label.empty() ? "" : ", ") + name;
  if (!option.values.empty()) label += (label.empty() ? "" : " ") + option.values;
  return option.repeats ? label + "..." : label;
}

std::string entry(const std::string& label, const std::string& help, std::size_t width) {
  std::string line = "  " + label;
  if (help.empty()) return line + "\n";
  line += line.size() + 1 < kHelpColumn ? std::string(kHelpColumn - line.size(), ' ')
                                        : "\n" + std::string(kHelpColumn, ' ');
  return line + wrap_text(help, width, kHelpColumn) + "\n";
}

std::string help_of(const OptionText& option) {
  std::string help = option.help;
  if (!option.fallback.empty()) help += " [default: " + option.fallback + "]";
  if (!option.environment.empty()) help += " [environment: " + option.environment + "]";
  return help;
}

}  // namespace

std::size_t terminal_width() {
  std::size_t width = kDefaultWidth;
  winsize size{};
  const char* const columns = std::getenv("COLUMNS");
  if (const long wanted = columns == nullptr ? 0 : std::strtol(columns, nullptr, 10); wanted > 0) {
    width = static_cast<std::size_t>(wanted);
  } else if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    width = size.ws_col;
  }
  return std::max(width, kLeastWidth);
}

std::string help_text(const CommandText& command, std::size_t width) {
  std::string usage = "Usage: " + command.name + (command.commands.empty() ? "" : " COMMAND");
  usage += std::string(" [") + kOptions + "]";
  std::vector<std::string> headings;
  for (const OptionText& option : command.options) {
    if (option.names.empty())
      usage += option.required ? " " + label_of(option) : " [" + label_of(option) + "]";
    if (std::find(headings.begin(), headings.end(), option.heading) == headings.end())
      headings.push_back(option.heading);
  }
  // Options without a heading of their own, such as --help, come last.
  std::stable_partition(headings.begin(), headings.end(),
                        [](const std::string& one) { return one != "Options"; });
  std::string text = wrap_text(usage, width) + "\n\n" + wrap_text(command.summary, width) + "\n";
  if (!command.commands.empty()) text += "\nCommands:\n";
  for (const CommandText& one : command.commands)
    text += entry(one.name.substr(one.name.rfind(' ') + 1), one.summary, width);
  for (const std::string& heading : headings) {
    text += "\n" + wrap_text(heading, width) + ":\n";
    for (const OptionText& option : command.options)
      if (option.heading == heading) text += entry(label_of(option), help_of(option), width);
  }
  if (!command.footer.empty()) text += "\n" + wrap_text(command.footer, width) + "\n";
  return text;
}

std::string parse_error_text(std::string text, const std::string& program) {
  constexpr std::string_view kTooMany = ": At Most 1 required but received ";
  if (const std::size_t at = text.find(kTooMany); at != std::string::npos)
    text = text.substr(0, at) + " was given " + text.substr(at + kTooMany.size()) + " times; give it once";
  return text + " (" + program + " --help lists the options)";
}

std::string unknown_word_text(const CommandText& command, const std::string& word) {
  const std::string name = word.substr(0, word.find('='));
  const bool is_option = name.size() > 1 && name[0] == '-';
  std::vector<std::string> names;
  if (is_option) {
    for (const OptionText& option : command.options)
      names.insert(names.end(), option.names.begin(), option.names.end());
  } else {
    for (const CommandText& one : command.commands) names.push_back(one.name.substr(one.name.rfind(' ') + 1));
  }
  const std::string nearest = nearest_name(name, names);
  std::string text = is_option                  ? "there is no option " + name
                     : command.commands.empty() ? "'" + name + "' is no option and is not expected here"
                                                : "there is no command '" + name + "'";
  if (!nearest.empty()) text += "; did you mean " + nearest + "?";
  return text + " (" + command.name + " --help lists the " +
         (is_option || command.commands.empty() ? "options" : "commands") + ")";
}

}  // namespace forebay
