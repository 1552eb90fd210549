#include "runtime/command/traces/pickle_reader.h"

#include <gtest/gtest.h>

#include <string>

#include "runtime/command/state/torch_file.h"
#include "tests/support/pickle_writer.h"

namespace forebay {
namespace {

using testing::PickleWriter;
using Kind = PickleValue::Kind;

std::string refusal(const std::string& text, const PickleLimits& limits = {}) {
  const Result<Pickle> pickle = Pickle::read(text, limits);
  EXPECT_FALSE(pickle.ok());
  return pickle.ok() ? "" : pickle.status().message();
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

PickleValue root_of(const std::string& opcodes) {
  static std::string& text = *new std::string;  // Outlives the values.
  text = PickleWriter().raw(opcodes).finish();
  const Result<Pickle> pickle = Pickle::read(text);
  EXPECT_TRUE(pickle.ok()) << pickle.status().to_string();
  return pickle.ok() ? pickle.value().root() : PickleValue();
}

TEST(PickleReader, ReadsScalars) {
  EXPECT_EQ(root_of("N").kind, Kind::kNone);
  EXPECT_EQ(root_of("\x88").integer, 1);
  EXPECT_EQ(root_of("\x89").kind, Kind::kBool);
  EXPECT_EQ(root_of(std::string("K\xff", 2)).integer, 255);
  EXPECT_EQ(root_of(std::string("M\x01\x02", 3)).integer, 513);
  EXPECT_EQ(root_of(std::string("J\xfe\xff\xff\xff", 5)).integer, -2);
  EXPECT_EQ(root_of(std::string("\x8a\x00", 2)).integer, 0);
  EXPECT_EQ(root_of(std::string("\x8a\x01\x80", 3)).integer, -128);
  EXPECT_EQ(root_of(std::string("\x8a\x06\x00\x00\x00\x00\x00\x7f", 8)).integer, 0x7f0000000000);
  EXPECT_EQ(root_of(std::string("\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01", 11)).kind, Kind::kOpaque);
  EXPECT_EQ(root_of(std::string("G\x3f\xf8\x00\x00\x00\x00\x00\x00", 9)).number, 1.5);
  EXPECT_EQ(Pickle::text_of(root_of(std::string("\x8c\x02hi", 4))), "hi");
}

TEST(PickleReader, ReadsContainersAndMemo) {
  // {'a': [1, (2, 3)], 'b': the same list}
  const std::string text = PickleWriter(2)
                               .raw("}(")
                               .text("a")
                               .raw("](K\x01K\x02K\x03\x86")
                               .raw("e")
                               .raw(std::string("q\x00", 2))
                               .text("b")
                               .raw(std::string("h\x00", 2))
                               .raw("u")
                               .finish();
  const Result<Pickle> read = Pickle::read(text);
  ASSERT_TRUE(read.ok()) << read.status().to_string();
  const Pickle& pickle = read.value();
  const PickleValue* a = pickle.find(pickle.root(), "a");
  const PickleValue* b = pickle.find(pickle.root(), "b");
  ASSERT_TRUE(a != nullptr && b != nullptr);
  EXPECT_EQ(a->container, b->container);
  ASSERT_EQ(pickle.items(*a).size(), 2u);
  EXPECT_EQ(pickle.items(*a)[0].integer, 1);
  EXPECT_EQ(pickle.items(pickle.items(*a)[1])[1].integer, 3);
  EXPECT_EQ(pickle.find(pickle.root(), "c"), nullptr);
  EXPECT_EQ(pickle.find(*a, "a"), nullptr);
}

TEST(PickleReader, RefusesCodeByNameAndPlace) {
  const std::string system = PickleWriter(2).raw("cos\nsystem\n").text("true").raw("\x85R").finish();
  expect_contains(refusal(system), "byte 2: it names 'os.system', which is code and not data");
  const std::string stacked = PickleWriter(4).text("builtins").text("eval").raw("\x93").finish();
  expect_contains(refusal(stacked), "it names 'builtins.eval'");
  // A known name may be called, but not its result.
  const std::string twice = PickleWriter(2).raw("ctorch\ndevice\n").raw(")R").raw(")R").finish();
  expect_contains(refusal(twice), "it calls something");
  for (const char* opcode :
       {"i", "o", "P", "Q", "\x82", "\x83", "\x84", "\x92", "\x97", "\x98", "I1\n", "V"}) {
    expect_contains(refusal(PickleWriter(4).raw("N").raw(opcode).finish()), "byte 3: opcode 0x");
  }
}

TEST(PickleReader, TakesKnownNamesAsData) {
  const std::string text =
      PickleWriter(2).raw("ccollections\nOrderedDict\n").raw(")R(").entry("k", 3).raw("u").finish();
  const Result<Pickle> read = Pickle::read(text);
  ASSERT_TRUE(read.ok()) << read.status().to_string();
  const PickleValue* found = read.value().find(read.value().root(), "k");
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->integer, 3);
}

// With all names, calls are data: os.system('true') is an object with a name and an argument.
TEST(PickleReader, RecordsNamesAndCallsAndMakesNone) {
  const auto read = [](const std::string& text) { return Pickle::read(text, {}, PickleNames::kAll); };
  const std::string call = PickleWriter(2).raw("cos\nsystem\n").text("true").raw("\x85R").finish();
  const Result<Pickle> system = read(call);
  ASSERT_TRUE(system.ok()) << system.status().to_string();
  EXPECT_EQ(system.value().root().kind, Kind::kObject);
  EXPECT_EQ(system.value().name_of(system.value().root()), "os.system");
  ASSERT_EQ(system.value().arguments(system.value().root()).size(), 1u);
  EXPECT_EQ(system.value().state_of(system.value().root()), nullptr);

  const std::string object =
      PickleWriter(4).text("a.b").text("C").raw("\x93)\x81}(").entry("k", 3).raw("ub").finish();
  const Result<Pickle> made = read(object);
  ASSERT_TRUE(made.ok()) << made.status().to_string();
  EXPECT_EQ(made.value().name_of(made.value().root()), "a.b.C");
  ASSERT_NE(made.value().attribute(made.value().root(), "k"), nullptr);
  EXPECT_EQ(made.value().attribute(made.value().root(), "k")->integer, 3);
  EXPECT_EQ(made.value().attribute(made.value().root(), "l"), nullptr);

  const std::string id = PickleWriter(2).raw("K\x01K\x02\x86Q").finish();
  const Result<Pickle> persistent = read(id);
  ASSERT_TRUE(persistent.ok()) << persistent.status().to_string();
  EXPECT_EQ(persistent.value().name_of(persistent.value().root()), Pickle::kPersistentId);
  EXPECT_EQ(persistent.value().arguments(persistent.value().root()).size(), 2u);

  const std::string dict =
      PickleWriter(2).raw("ccollections\nOrderedDict\n)R(").entry("k", 3).raw("u}b").finish();
  const Result<Pickle> ordered = read(dict);
  ASSERT_TRUE(ordered.ok()) << ordered.status().to_string();
  ASSERT_NE(ordered.value().find(ordered.value().root(), "k"), nullptr);
}

TEST(PickleReader, ObjectsThatAreNotThereAreRefused) {
  const auto refused = [](const std::string& opcodes, const std::string& part) {
    const std::string text = PickleWriter(2).raw(opcodes).finish();
    const Result<Pickle> read = Pickle::read(text, {}, PickleNames::kAll);
    ASSERT_FALSE(read.ok()) << opcodes;
    expect_contains(read.status().message(), part);
  };
  refused("R", "not there");
  refused("N(R", "not there");
  refused("Q", "not there");
  refused("ca\nb\n(\x81", "not there");
  refused("b", "not there");
  refused(std::string("c") + std::string(300, 'a') + "\nb\n", "too many letters");
  // Objects of anything, with states of anything.
  for (const char* opcodes : {"NNR", "K\x01N\x81", "ca\nb\nNRNb", "ca\nb\n)R(K\x01K\x02u", "NQ", "NNb"}) {
    const std::string text = PickleWriter(2).raw(opcodes).finish();
    const Result<Pickle> read = Pickle::read(text, {}, PickleNames::kAll);
    ASSERT_TRUE(read.ok()) << read.status().to_string();
    EXPECT_TRUE(read.value().arguments(read.value().root()).empty() ||
                read.value().root().kind == Kind::kObject);
    EXPECT_EQ(read.value().attribute(read.value().root(), "k"), nullptr);
  }
}

TEST(PickleReader, RefusesWhatIsCutOffOrOutOfOrder) {
  expect_contains(refusal(""), "byte 0");
  expect_contains(refusal(PickleWriter().so_far()), "byte 2: the pickle ends before its STOP");
  expect_contains(refusal(PickleWriter().raw("X\xff\xff\xff\xff").finish()),
                  "an operand of 4294967295 bytes");
  expect_contains(refusal(PickleWriter().raw("\x95").number(99, 8).finish()), "a frame of 99 bytes");
  expect_contains(refusal(PickleWriter().finish()), "needs a value that is not there");
  expect_contains(refusal(PickleWriter().raw("a").finish()), "not there");
  expect_contains(refusal(PickleWriter().raw("]e").finish()), "needs a MARK");
  expect_contains(refusal(PickleWriter().raw("N(e").finish()), "of another kind");
  expect_contains(refusal(PickleWriter().raw("(e").finish()), "a container that is not there");
  expect_contains(refusal(PickleWriter().raw("}(Nu").finish()), "a key and no value");
  expect_contains(refusal(PickleWriter().raw("(Nd").finish()), "a key and no value");
  expect_contains(refusal(PickleWriter().raw(std::string("h\x05", 2)).finish()), "without a stored value");
  expect_contains(refusal(PickleWriter().raw("Nr").number(1 << 30, 4).finish()), "far beyond");
  expect_contains(refusal(PickleWriter().raw("N(s").finish()), "");
  for (const int protocol : {1, 6, 9})
    expect_contains(refusal(PickleWriter(protocol).raw("N").finish()),
                    "protocol " + std::to_string(protocol));
  for (const int protocol : {2, 5}) {
    const Result<Pickle> read = Pickle::read(PickleWriter(protocol).raw("N").finish());
    EXPECT_TRUE(read.ok()) << read.status().message();
  }
}

TEST(PickleReader, KeepsToItsLimits) {
  const PickleLimits limits{.values = 100, .containers = 10};
  std::string many(200, 'N');
  expect_contains(refusal(PickleWriter().raw(many).finish(), limits), "more than 100 values");
  many.assign(50, ']');
  expect_contains(refusal(PickleWriter().raw(many).finish(), limits), "more than 10 containers");
  // Deep nesting takes no stack: a list in a list in a list, closed again.
  constexpr int kDepth = 1'000'000;
  std::string deep(kDepth, ']');
  deep += std::string(kDepth - 1, 'a');
  EXPECT_TRUE(Pickle::read(PickleWriter().raw(deep).finish()).ok());
}

// A list that is in it once and named many times.
TEST(PickleReader, CopiesAreBoundedByItsLength) {
  constexpr int kNumbers = 20'000;
  constexpr int kNames = 20'000;
  const auto list_of_lists = [](int count) {
    std::string opcodes = "](](";
    for (int i = 0; i < kNumbers; ++i) opcodes += std::string("K\x01", 2);
    opcodes += std::string("eq\x00", 3);
    for (int i = 1; i < count; ++i) opcodes += std::string("h\x00", 2);
    return PickleWriter(2).raw(opcodes + "e").finish();
  };
  const auto copied = [](const std::string& text) {
    const Result<Pickle> read = Pickle::read(text);
    EXPECT_TRUE(read.ok()) << read.status().to_string();
    std::size_t bytes = 0;
    for (const PickleValue& list : read.value().items(read.value().root())) {
      const auto numbers = numbers_of(read.value(), list);
      if (!numbers) break;
      bytes += numbers->size() * sizeof(std::uint64_t);
    }
    return bytes;
  };
  EXPECT_EQ(copied(list_of_lists(3)), 3 * kNumbers * sizeof(std::uint64_t));
  const std::string text = list_of_lists(kNames);
  EXPECT_LT(copied(text), (std::size_t{1} << 20) + 32 * text.size());
}

}  // namespace
}  // namespace forebay
