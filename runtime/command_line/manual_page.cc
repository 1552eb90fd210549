#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "forebay/command_line.h"
#include "forebay/version.h"

namespace forebay {
namespace {

// Text that troff sets as it is.
std::string escaped(const std::string& text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char letter = text[i];
    const bool begins_line = i == 0 || text[i - 1] == '\n';
    if (begins_line && (letter == '.' || letter == '\'')) result += "\\&";
    if (letter == '\\' || letter == '-') result += '\\';
    result += letter == '\\' ? "e" : std::string(1, letter);
  }
  return result;
}

// "forebay-plan": the name of the page of "forebay plan".
std::string page_name(const CommandText& command) {
  std::string name = command.name;
  std::replace(name.begin(), name.end(), ' ', '-');
  return name;
}

std::string upper(std::string text) {
  for (char& letter : text) letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  return text;
}

std::string labels(const OptionText& option) {
  std::string text;
  for (const std::string& name : option.names)
    text += (text.empty() ? "\\fB" : ", \\fB") + escaped(name) + "\\fR";
  if (!option.values.empty()) text += (text.empty() ? "\\fI" : " \\fI") + escaped(option.values) + "\\fR";
  return option.repeats ? text + "..." : text;
}

Status write(const std::filesystem::path& path, const std::string& text) {
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!error && file) return {};
  return {StatusCode::kIoError, "cannot write " + path.string() + ": " + std::strerror(errno) +
                                    "; name a directory that can be written to"};
}

}  // namespace

std::string manual_page(const CommandText& command) {
  std::string page = ".TH " + upper(page_name(command)) + " 1 \"\" \"forebay " + version() +
                     "\"\n.SH NAME\n" + escaped(page_name(command)) + " \\- " + escaped(command.summary) +
                     "\n.SH SYNOPSIS\n.B " + escaped(command.name) + "\n" +
                     (command.commands.empty() ? "" : "COMMAND ") + "[OPTIONS]";
  for (const OptionText& option : command.options)
    if (option.names.empty()) page += " " + labels(option);
  page += "\n";
  if (!command.commands.empty()) page += ".SH COMMANDS\n";
  for (const CommandText& one : command.commands)
    page += ".TP\n\\fB" + escaped(page_name(one)) + "\\fR(1)\n" + escaped(one.summary) + "\n";
  page += ".SH OPTIONS\n";
  std::string heading;
  for (const OptionText& option : command.options) {
    if (option.heading != heading) page += ".SS " + escaped(heading = option.heading) + "\n";
    page += ".TP\n" + labels(option) + "\n" + escaped(option.help) + "\n";
    if (!option.fallback.empty()) page += "Default: " + escaped(option.fallback) + ".\n";
    if (!option.environment.empty()) page += "Environment: " + escaped(option.environment) + ".\n";
  }
  if (!command.footer.empty()) page += ".SH NOTES\n.nf\n" + escaped(command.footer) + "\n.fi\n";
  return page;
}

Status write_manual(const CommandText& program, const std::string& share) {
  const std::filesystem::path root = share;
  FOREBAY_RETURN_IF_ERROR(write(root / "man/man1" / (page_name(program) + ".1"), manual_page(program)));
  for (const CommandText& one : program.commands)
    FOREBAY_RETURN_IF_ERROR(write(root / "man/man1" / (page_name(one) + ".1"), manual_page(one)));
  FOREBAY_RETURN_IF_ERROR(
      write(root / "bash-completion/completions" / program.name, bash_completion(program)));
  FOREBAY_RETURN_IF_ERROR(write(root / "zsh/site-functions" / ("_" + program.name), zsh_completion(program)));
  return write(root / "fish/vendor_completions.d" / (program.name + ".fish"), fish_completion(program));
}

}  // namespace forebay
