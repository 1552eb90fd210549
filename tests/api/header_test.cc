// forebay.h documents every function; the C++ calls of a trainer all have C functions.

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tests/api/declarations.h"

namespace forebay::api {
namespace {

const std::string kRoot = FOREBAY_ROOT;

TEST(CApiHeader, EveryFunctionSaysWhatItDoesItsThreadsAndSinceWhen) {
  const auto functions = read_declarations(kRoot);
  ASSERT_GT(functions.size(), 100u);
  for (const DeclaredFunction& function : functions) {
    EXPECT_GT(function.comment.size(), 12u) << function.name << " has no comment above it";
    for (const char* const label : {"Threads: ", "Since: "}) {
      EXPECT_TRUE(function.comment.find(label) != std::string::npos ||
                  function.section.find(label) != std::string::npos)
          << function.name << " and its section have no line " << label;
    }
  }
}

// The names of the public members of a class, and of free functions by a prefix.
std::set<std::string> public_members(const std::string& header, const std::string& name) {
  const std::string text = read_text(kRoot + "/" + header);
  const std::size_t begin = text.find("\nclass " + name + " {\n public:\n");
  EXPECT_NE(begin, std::string::npos)
      << header << " has no class " << name << " that begins with public members";
  const std::size_t end = std::min(text.find("\n};", begin), text.find("\n private:", begin));
  std::set<std::string> members;
  static const std::regex kMember(R"(^  [A-Za-z\[][^(=/]*?[ *&](\w+)\()");
  std::istringstream lines(text.substr(begin + 1, end - begin - 1));
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (std::regex_search(line, match, kMember) && match[1] != name && match[1] != "operator")
      members.insert(match[1]);
  }
  return members;
}

TEST(CApiHeader, EveryCallOfATrainerInCxxHasAFunctionInC) {
  const std::pair<const char*, const char*> classes[] = {
      {"runtime/engine/include/forebay/engine.h", "Engine"},
      {"runtime/engine/include/forebay/engine.h", "Lease"},
      {"runtime/engine/include/forebay/activation_checkpointer.h", "ActivationCheckpointer"},
      {"runtime/engine/include/forebay/activation_checkpointer.h", "ActivationLease"},
      {"runtime/engine/include/forebay/timeline.h", "Timeline"},
      {"allocator/include/forebay/arena.h", "Arena"},
      {"allocator/include/forebay/pinned_pool.h", "PinnedPool"},
      {"collectives/include/forebay/communicator.h", "Communicator"},
      {"collectives/include/forebay/local_communicator.h", "LocalGroup"},
      {"offload/include/forebay/store.h", "Store"}};
  // "Engine::add_unit forebay_engine_add_unit", or "Engine::model -" and the reason.
  std::map<std::string, std::string> table;
  std::istringstream lines(read_text(kRoot + "/tests/api/cxx_to_c.txt"));
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == '#') continue;
    const std::size_t space = line.find(' ');
    table[line.substr(0, space)] = line.substr(space + 1);
  }
  std::set<std::string> calls;
  for (const auto& [header, name] : classes) {
    const auto members = public_members(header, name);
    EXPECT_FALSE(members.empty()) << name;
    for (const std::string& member : members) calls.insert(std::string(name) + "::" + member);
  }
  static const std::regex kFactory(R"((create_\w+_communicator)\()");
  for (const char* const header : {"process", "shm", "gloo", "nccl"}) {
    const std::string text = read_text(kRoot + "/collectives/include/forebay/" + header + "_communicator.h");
    for (std::sregex_iterator it(text.begin(), text.end(), kFactory), end; it != end; ++it)
      calls.insert((*it)[1]);
  }
  for (const std::string& call : calls) {
    EXPECT_TRUE(table.count(call) == 1)
        << call
        << " has no C function: add one to forebay.h and a line to tests/api/cxx_to_c.txt, or a line with - "
        << "and the reason why a trainer in C does not need it";
  }
  std::set<std::string> functions;
  for (const DeclaredFunction& function : read_declarations(kRoot)) functions.insert(function.name);
  for (const auto& [call, function] : table) {
    EXPECT_TRUE(calls.count(call) == 1)
        << "cxx_to_c.txt: there is no " << call << " any more; delete its line";
    if (function[0] == '-') {
      EXPECT_GT(function.size(), 10u) << "cxx_to_c.txt: " << call << " needs a reason";
      continue;
    }
    std::istringstream names(function);
    for (std::string name; names >> name;)
      EXPECT_TRUE(functions.count(name) == 1) << "cxx_to_c.txt: forebay.h has no " << name;
  }
}

}  // namespace
}  // namespace forebay::api
