#include "collectives/rendezvous/store_messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "collectives/fingerprint.h"
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

TEST(StoreMessages, AnIntroductionIsOfARankOfTheRun) {
  const auto is_read = [](int rank, int size) {
    const std::string bytes = encode(Introduction{{rank, size, "same"}, "version", "host"});
    std::string_view text = bytes;
    Introduction read;
    return decode(&text, &read) && text.empty();
  };
  EXPECT_TRUE(is_read(2, 3));
  EXPECT_FALSE(is_read(3, 3));
  EXPECT_FALSE(is_read(0, 0));
  EXPECT_TRUE(is_read(0, kRanksMax));
  EXPECT_FALSE(is_read(0, kRanksMax + 1));
}

TEST(StoreMessages, ALongConfigurationIsCutAndStaysItself) {
  const auto configured = [](const std::string& text) { return introduce({0, 2, text}).who.configuration; };
  const std::string longest(kConfigurationBytesMax, 'c');
  EXPECT_EQ(configured(longest), longest);
  const std::string cut = configured(longest + "d");
  EXPECT_EQ(cut.size(), kConfigurationBytesMax);
  EXPECT_NE(cut.find("...#"), std::string::npos);
  EXPECT_NE(cut, configured(longest + "e"));
}

TEST(StoreMessages, ADifferenceOfTwoIntroductionsIsToldFromTheLowerRank) {
  const Introduction first{{1, 3, "gloo"}, "0.1.0", "a"};
  Introduction second{{2, 3, "shm"}, "0.1.0", "b"};
  const std::string text =
      "rank 1 was configured as \"gloo\", rank 2 as \"shm\"; start all ranks with the same options";
  EXPECT_EQ(compare(first, second).message(), text);
  EXPECT_EQ(compare(second, first).message(), text);
  second.version = "0.2.0";
  EXPECT_EQ(compare(second, first).message(),
            "rank 1 runs forebay 0.1.0, rank 2 runs forebay 0.2.0; install the same version everywhere");
  second.who.size = 4;
  EXPECT_EQ(compare(second, first).message(),
            "rank 1 was started as one of 3 ranks, rank 2 as one of 4; start all ranks with the same number");
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

Greeting greeting_of(int rank, const std::string& job = "job") {
  return {job, {{rank, 2, "same"}, "version", "host"}};
}

TEST(StoreBook, SaysHowFullItIs) {
  StoreBook book(greeting_of(0), "tcp://host:1");
  book.answer(0, {MessageType::kWrite, "a", std::string(1000, 'x')});
  const std::size_t cost = 1 + 1000 + 128;
  const std::size_t left = StoreBook::kBytesMax - cost - 1 - 128;

  const Message refused = book.answer(0, {MessageType::kWrite, "b", std::string(left + 1, 'x')});
  EXPECT_EQ(decode_failure(refused.content).message(),
            "the store at tcp://host:1 cannot keep " + std::to_string(left + 1) + " bytes more: it has " +
                std::to_string(cost) + " of at most " + std::to_string(StoreBook::kBytesMax) +
                "; it is for the texts with which ranks meet, not for data");
  EXPECT_EQ(book.answer(0, {MessageType::kWrite, "b", std::string(left, 'x')}).type, MessageType::kDone);
}

TEST(StoreBook, KeepsTheFirstFailureAndTellsItOnce) {
  StoreBook book(greeting_of(0), "tcp://host:1");
  const auto fail = [&](const char* text) {
    const Message message{MessageType::kFail, {}, encode_failure(Status(StatusCode::kIoError, text))};
    return decode_failure(book.answer(1, message).content).message();
  };
  EXPECT_EQ(fail("first"), "first");
  EXPECT_EQ(fail("second"), "first");
  const std::vector<Message> news = book.take_news();
  ASSERT_EQ(news.size(), 1u);
  EXPECT_EQ(news[0].type, MessageType::kFirstFailure);
  EXPECT_EQ(decode_failure(news[0].content).message(), "first");
}

TEST(StoreBook, TellsANewcomerTextsThatWereWrittenOnceAlone) {
  StoreBook book(greeting_of(0), "tcp://host:1");
  book.answer(0, {MessageType::kWrite, "changing", "a"});
  book.answer(0, {MessageType::kWriteOnce, "fixed", "b"});
  book.answer(0, {MessageType::kWriteOnce, "fixed", "c"});
  const std::vector<Message> news = book.news_for_newcomer();
  ASSERT_EQ(news.size(), 1u);
  EXPECT_EQ(news[0].name, "fixed");
  EXPECT_EQ(news[0].content, "b");
  book.take_news();
  // A post is passed on, but not in the place of a text.
  book.post({MessageType::kPost, "fixed", "d"});
  book.post({MessageType::kPost, "other", "d"});
  ASSERT_EQ(book.take_news().size(), 1u);
}

TEST(StoreBook, OnlyARankWithItsTokenComesBack) {
  StoreBook book(greeting_of(0), "tcp://host:1");
  ASSERT_TRUE(book.greet(greeting_of(0), "10.0.0.1").ok());
  EXPECT_FALSE(book.may_return(greeting_of(1), "")) << "it was not here";

  ASSERT_TRUE(book.greet(greeting_of(1), "10.0.0.2").ok());
  EXPECT_TRUE(book.may_return(greeting_of(1), book.token(1)));
  EXPECT_FALSE(book.may_return(greeting_of(1), book.token(0)));
  EXPECT_FALSE(book.may_return(greeting_of(1, "other"), book.token(1)));
  EXPECT_FALSE(book.may_return({"job", {{2, 2, "same"}, "version", "host"}}, book.token(1)));
}

TEST(StoreBook, OneRankThatComesTwiceIsOneAnswered) {
  StoreBook book(greeting_of(0), "tcp://host:1");
  EXPECT_TRUE(book.greet(greeting_of(0), "10.0.0.1").ok());
  EXPECT_EQ(book.greet(greeting_of(0), "10.0.0.2").message().substr(0, 41),
            "two processes came to tcp://host:1 as ran");
  EXPECT_FALSE(book.has_answered_all());
  EXPECT_FALSE(book.greet(greeting_of(1), "10.0.0.3").ok());
  EXPECT_TRUE(book.has_answered_all());
}

TEST(StoreBook, SaysWhoIsRefused) {
  StoreBook book(greeting_of(0), "tcp://host:1");
  EXPECT_EQ(book.greet(greeting_of(1, "other"), "10.0.0.2").message(),
            "rank 1 at 10.0.0.2 is of the run \"other\", but the store at tcp://host:1 is that of the run "
            "\"job\"; end the remaining processes of the earlier run, or give each run a port of its own");
  const auto doubt = [&] {
    Attendance read;
    EXPECT_TRUE(decode(book.answer(0, {MessageType::kRoster, {}, {}}).content, &read));
    return read.doubt;
  };
  EXPECT_EQ(doubt(), "refused 1 connection, from 10.0.0.2: rank 1 at 10.0.0.2 is of the run \"other\"");
  EXPECT_FALSE(book.greet(greeting_of(1, "third"), "10.0.0.3").ok());
  EXPECT_EQ(doubt(),
            "refused 2 connections, the last from 10.0.0.3: rank 1 at 10.0.0.3 is of the run \"third\"");

  EXPECT_FALSE(book.greet(greeting_of(1, "fourth"), std::string(5000, 'x')).ok());
  EXPECT_EQ(doubt().size(), kDoubtBytesMax);

  EXPECT_TRUE(book.greet(greeting_of(0), "10.0.0.1").ok());
  EXPECT_TRUE(book.greet(greeting_of(1), "10.0.0.2").ok());
  EXPECT_EQ(
      book.greet(greeting_of(1), "10.0.0.4").message(),
      "rank 1 at 10.0.0.4 came to tcp://host:1 when all 2 ranks of the run were there already; start all "
      "ranks together, and each run at a port of its own");
  Attendance read;
  ASSERT_TRUE(decode(book.answer(0, {MessageType::kRoster, {}, {}}).content, &read));
  EXPECT_EQ(read.generation.size(), 16u);
  // Once all have come, one may leave.
  book.leave(1);
  EXPECT_TRUE(book.take_news().empty());
}

}  // namespace
}  // namespace forebay::internal
