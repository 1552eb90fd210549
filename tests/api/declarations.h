// The declarations of forebay.h, read from its text: for tests that go over every function.
#pragma once

#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace forebay::api {

struct DeclaredParameter {
  std::string name;
  bool or_null = false;
};

struct DeclaredFunction {
  std::string name;
  std::string comment;  // Directly above it; empty if there is none.
  std::string section;  // The comment of its section.
  std::vector<DeclaredParameter> parameters;
};

inline std::string read_text(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// Splits at commas that are in no parentheses.
inline std::vector<DeclaredParameter> read_parameters(const std::string& text) {
  std::vector<DeclaredParameter> parameters;
  int depth = 0;
  std::string part;
  const auto flush = [&] {
    const bool or_null = part.find("/* or null */") != std::string::npos;
    part = std::regex_replace(part, std::regex(R"(/\*.*?\*/)"), "");
    std::smatch match;
    if (std::regex_search(part, match, std::regex(R"(\(\*(\w+)\))")) ||
        std::regex_search(part, match, std::regex(R"((\w+)(\[\d+\])?\s*$)"))) {
      if (match[1] != "void") parameters.push_back({match[1], or_null});
    }
    part.clear();
  };
  for (const char c : text) {
    depth += c == '(' ? 1 : c == ')' ? -1 : 0;
    if (c == ',' && depth == 0) {
      flush();
    } else {
      part += c;
    }
  }
  flush();
  return parameters;
}

inline std::vector<DeclaredFunction> read_declarations(const std::string& root) {
  const std::string text = read_text(root + "/runtime/api/include/forebay/forebay.h");
  std::vector<DeclaredFunction> functions;
  std::string comment;
  std::string section;
  for (std::size_t at = 0; at < text.size();) {
    if (text.compare(at, 2, "/*") == 0) {
      const std::size_t end = text.find("*/", at) + 2;
      comment = text.substr(at, end - at);
      if (comment.find("/* == ") == 0) section = comment;
      at = end;
    } else if (text.compare(at, 13, "\nFOREBAY_API ") == 0) {
      ++at;
      const std::size_t end = text.find(';', at);
      const std::string declaration = text.substr(at, end - at);
      const std::size_t open = declaration.find('(');
      const std::size_t begin = declaration.rfind("forebay_", open);
      functions.push_back({declaration.substr(begin, open - begin), comment == section ? "" : comment,
                           section,
                           read_parameters(declaration.substr(open + 1, declaration.rfind(')') - open - 1))});
      comment.clear();
      at = end;
    } else {
      if (text[at] == '#' || text[at] == '}') comment.clear();
      ++at;
    }
  }
  return functions;
}

}  // namespace forebay::api
