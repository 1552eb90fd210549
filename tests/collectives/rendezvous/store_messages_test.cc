#include "collectives/rendezvous/store_messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "collectives/rendezvous/store_book.h"

namespace forebay::internal {
namespace {

using Next = FrameReader::Next;

TEST(StoreMessages, HmacIsThatOfTheStandard) {
  // RFC 4231, test cases 2 and 6.
  EXPECT_EQ(hexadecimal(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hexadecimal(hmac_sha256(std::string(131, '\xaa'),
                                    "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

// Every length of the last block, and many of the key. The expected value is that of Python's hmac.
TEST(StoreMessages, HmacIsThatOfTheStandardForEveryLength) {
  std::string chained = "key";
  for (std::size_t i = 0; i < 300; ++i) {
    const std::string key = chained.substr(0, i % 33) + std::string(i % 150, 'k');
    chained = bytes_of(hmac_sha256(key, std::string(i, 'x')));
  }
  Digest digest{};
  std::copy(chained.begin(), chained.end(), digest.begin());
  EXPECT_EQ(hexadecimal(digest), "1c969c203f0f1fd62ca8e1f899b99a9d997ac84cb06c9dac71a37105cc483bad");
}

TEST(StoreMessages, BothEndsDeriveTheSameKeysAndEachHasItsUse) {
  const Digest a = random_digest();
  const Digest b = random_digest();
  const StoreKeys keys = derive_store_keys("secret", a, b);
  const StoreKeys same = derive_store_keys("secret", a, b);
  EXPECT_TRUE(equal_digests(keys.client_proof, same.client_proof));
  EXPECT_TRUE(equal_digests(keys.to_client, same.to_client));

  EXPECT_FALSE(equal_digests(keys.client_proof, keys.server_proof));
  EXPECT_FALSE(equal_digests(keys.to_client, keys.to_server));
  EXPECT_FALSE(equal_digests(keys.client_proof, derive_store_keys("secreT", a, b).client_proof));
  // A proof that was listened to is of no use on another connection.
  EXPECT_FALSE(
      equal_digests(keys.client_proof, derive_store_keys("secret", a, random_digest()).client_proof));
  EXPECT_FALSE(
      equal_digests(keys.server_proof, derive_store_keys("secret", random_digest(), b).server_proof));
}

TEST(StoreMessages, FramesArriveInPieces) {
  const Digest key = random_digest();
  FrameWriter writer(key);
  FrameReader reader(key);
  std::string bytes = writer.frame("one");
  bytes += writer.frame("");
  bytes += writer.frame("three");
  std::vector<std::string> read;
  for (const char byte : bytes) {
    reader.add({&byte, 1});
    for (std::string text; reader.next(&text) == Next::kMessage;) read.push_back(text);
  }
  EXPECT_EQ(read, (std::vector<std::string>{"one", "", "three"}));
}

TEST(StoreMessages, AnyChangedBitBreaksTheConnection) {
  const Digest key = random_digest();
  const std::string frame = FrameWriter(key).frame("text");
  for (std::size_t bit = 0; bit < frame.size() * 8; ++bit) {
    std::string changed = frame;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ 1 << bit % 8);
    FrameReader reader(key);
    reader.add(changed);
    std::string text;
    // A length that grew waits for bytes that do not come.
    EXPECT_NE(reader.next(&text), Next::kMessage) << "bit " << bit;
  }
}

TEST(StoreMessages, ReplayedReorderedAndForeignFramesAreRefused) {
  const Digest key = random_digest();
  FrameWriter writer(key);
  const std::string first = writer.frame("first");
  const std::string second = writer.frame("second");
  const auto last_of = [&](const std::string& bytes) {
    FrameReader reader(key);
    reader.add(bytes);
    std::string text;
    Next next = reader.next(&text);
    while (next == Next::kMessage) next = reader.next(&text);
    return next;
  };
  EXPECT_EQ(last_of(first + second), Next::kMore);
  EXPECT_EQ(last_of(first + first), Next::kBroken);
  EXPECT_EQ(last_of(second), Next::kBroken);
  EXPECT_EQ(last_of(FrameWriter(random_digest()).frame("first")), Next::kBroken);
}

TEST(StoreMessages, ATooLongMessageIsRefusedByItsLength) {
  FrameReader reader(random_digest());
  const std::uint32_t length = kMessageBytesMax + 1;
  std::string bytes;
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(length >> (8 * i) & 0xff);
  reader.add(bytes);
  std::string text;
  EXPECT_EQ(reader.next(&text), Next::kBroken);
  EXPECT_EQ(reader.next(&text), Next::kBroken) << "for good";
}

TEST(StoreMessages, WhatIsSaidArrivesAndNothingElseIsTaken) {
  const Greeting greeting{"run 7", {{2, 3, "gloo"}, "0.1.0", "host"}};
  const std::string bytes = encode(Message{MessageType::kGreeting, "name", encode(greeting)});
  Message message;
  Greeting read;
  ASSERT_TRUE(decode(bytes, &message));
  EXPECT_EQ(message.type, MessageType::kGreeting);
  EXPECT_EQ(message.name, "name");
  ASSERT_TRUE(decode(message.content, &read));
  EXPECT_EQ(read.job, "run 7");
  EXPECT_EQ(read.introduction.who.rank, 2);
  EXPECT_EQ(read.introduction.who.size, 3);
  EXPECT_EQ(read.introduction.who.configuration, "gloo");
  EXPECT_EQ(read.introduction.version, "0.1.0");
  EXPECT_EQ(read.introduction.host, "host");

  EXPECT_FALSE(decode(message.content + "x", &read));
  EXPECT_FALSE(decode(std::string_view(message.content).substr(1), &read));
  EXPECT_FALSE(decode("", &message));
  EXPECT_FALSE(decode(std::string("\x30\0\0\0\0", 5), &message)) << "a type that there is not";
}

TEST(StoreMessages, ARosterTellsHostsOnceItIsComplete) {
  Attendance read;
  ASSERT_TRUE(decode(encode(Attendance{"", {true, false}, {}, "refused"}), &read));
  EXPECT_EQ(read.came, (std::vector<bool>{true, false}));
  EXPECT_EQ(read.doubt, "refused");
  ASSERT_TRUE(decode(encode(Attendance{"g", {true, true}, {"a", "b"}, ""}), &read));
  EXPECT_EQ(read.hosts, (std::vector<std::string>{"a", "b"}));
  EXPECT_FALSE(decode(encode(Attendance{"g", {true, true}, {"a"}, ""}), &read));
  EXPECT_FALSE(decode(encode(Attendance{"g", {true, true}, {"a", "b"}, ""}) + "c", &read));
}

// A text that is replaced or removed no longer counts against the store's bytes, and a refused one never
// does.
TEST(StoreBook, OnlyTextsThatItHasCount) {
  StoreBook book({"job", {{0, 2, "same"}, "version", "host"}}, "tcp://host:1");
  const auto write = [&](const std::string& name, std::size_t bytes) {
    return book.answer(0, {MessageType::kWrite, name, std::string(bytes, 'x')}).type;
  };
  constexpr std::size_t kThird = StoreBook::kBytesMax / 3;
  for (int i = 0; i < 4; ++i) EXPECT_EQ(write("a", kThird), MessageType::kDone) << "time " << i;
  EXPECT_EQ(write("b", kThird), MessageType::kDone);
  EXPECT_EQ(write("c", kThird), MessageType::kRefused);
  EXPECT_EQ(write("b", kThird + 1024), MessageType::kDone);
  EXPECT_EQ(book.answer(1, {MessageType::kRemove, "b", {}}).type, MessageType::kDone);
  EXPECT_EQ(book.answer(1, {MessageType::kRead, "b", {}}).type, MessageType::kNothing);
  EXPECT_EQ(write("c", kThird), MessageType::kDone);
}

}  // namespace
}  // namespace forebay::internal
