#include "collectives/rendezvous/store_address.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "collectives/rendezvous/store_messages.h"
#include "tests/support/process.h"

namespace forebay::internal {
namespace {

TEST(StoreAddress, IsHostPortAndJob) {
  const auto read = [](const std::string& text) {
    Result<StoreAddress> result = parse_store_address(text);
    EXPECT_TRUE(result.ok()) << text << ": " << result.status().to_string();
    return result.ok()
               ? result.value().host + "|" + std::to_string(result.value().port) + "|" + result.value().job
               : "";
  };
  EXPECT_EQ(read("tcp://10.0.0.1:29400"), "10.0.0.1|29400|");
  EXPECT_EQ(read("tcp://node-1.cluster:1/run-7"), "node-1.cluster|1|run-7");
  EXPECT_EQ(read("tcp://[::1]:65535/a/b"), "::1|65535|a/b");
}

TEST(StoreAddress, NamesTheVariableThatIsWrong) {
  for (const char* text : {"tcp://", "tcp://host", "tcp://:1", "tcp://host:", "tcp://host:0",
                           "tcp://host:65536", "tcp://host:1x", "tcp://::1:5", "tcp://[::1]", "tcp://[::1]5",
                           "tcp://[::1:5", "udp://host:1", "/directory", ""}) {
    const Result<StoreAddress> result = parse_store_address(text);
    ASSERT_FALSE(result.ok()) << text;
    EXPECT_NE(result.status().message().find("tcp://HOST:PORT"), std::string::npos) << text;
  }
  EXPECT_FALSE(parse_store_address("tcp://host:1/" + std::string(300, 'j')).ok());
  EXPECT_TRUE(parse_store_address("tcp://host:1/" + std::string(kJobBytesMax, 'j')).ok());
  EXPECT_FALSE(parse_store_address("tcp://host:1/" + std::string(kJobBytesMax + 1, 'j')).ok());
  EXPECT_EQ(parse_store_address(std::string(300, 'x')).status().message(),
            "the rendezvous store \"" + std::string(200, 'x') +
                "\" is not tcp://HOST:PORT or tcp://HOST:PORT/JOB with a port from 1 to 65535; give such an "
                "address, or a directory");
}

TEST(StoreAddress, IsWrittenAsItIsRead) {
  for (const std::string text : {"tcp://10.0.0.1:29400/", "tcp://[::1]:65535/a/b"})
    EXPECT_EQ(store_address_text(parse_store_address(text).value()), text);
}

TEST(StoreAddress, ListensAtOneAddressOfThisHostOnly) {
  for (const char* everywhere : {"0.0.0.0", "::"}) {
    const Status status = listen_at({everywhere, 0, ""}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
    EXPECT_NE(status.message().find("all addresses"), std::string::npos) << status.message();
  }
  // Kept for documentation: no host has it.
  const Status elsewhere = listen_at({"198.51.100.1", 0, ""}).status();
  EXPECT_NE(elsewhere.message().find("rank 0's host"), std::string::npos) << elsewhere.message();

  Result<Descriptor> first = listen_at({"127.0.0.1", 0, ""});
  ASSERT_TRUE(first.ok());
  const SocketAddress address = local_end(first.value().number());
  EXPECT_EQ(address.host(), "127.0.0.1");
  const Status taken = listen_at({"127.0.0.1", address.port(), ""}).status();
  EXPECT_EQ(taken.code(), StatusCode::kUnavailable);
  EXPECT_NE(taken.message().find("give another port"), std::string::npos) << taken.message();
}

class StoreSecret : public ::testing::Test {
 protected:
  void TearDown() override {
    unsetenv("FOREBAY_SECRET");
    unsetenv("FOREBAY_SECRET_FILE");
  }
  std::string file_with(const std::string& content, mode_t mode) {
    const std::string path = directory_ / "secret";
    std::ofstream(path) << content;
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    setenv("FOREBAY_SECRET_FILE", path.c_str(), 1);
    return path;
  }
  static void expect_refused(const std::string& word) {
    const Status status = read_store_secret().status();
    ASSERT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("openssl rand -hex 32"), std::string::npos) << status.message();
    EXPECT_EQ(status.message().find(std::string(40, 'k')), std::string::npos) << "it tells the secret";
  }
  testing::TemporaryDirectory directory_;
};

TEST_F(StoreSecret, ComesFromAPrivateFileOrTheVariable) {
  setenv("FOREBAY_SECRET", std::string(32, 'v').c_str(), 1);
  EXPECT_EQ(read_store_secret().value(), std::string(32, 'v'));
  file_with(std::string(64, 'k') + "\n", 0600);
  EXPECT_EQ(read_store_secret().value(), std::string(64, 'k'));
  file_with(std::string(4096, 'k') + " \r\n", 0600);
  EXPECT_EQ(read_store_secret().value(), std::string(4096, 'k'));
}

TEST_F(StoreSecret, IsRefusedWhereOthersMayKnowIt) {
  expect_refused("needs a secret");
  setenv("FOREBAY_SECRET", "short", 1);
  expect_refused("5 characters");
  setenv("FOREBAY_SECRET", std::string(31, 'v').c_str(), 1);
  expect_refused("the secret in FOREBAY_SECRET has 31 characters; it must have 32 to 4096");
  setenv("FOREBAY_SECRET", std::string(4097, 'v').c_str(), 1);
  expect_refused("4097 characters");
  file_with(std::string(64, 'k'), 0640);
  expect_refused("chmod 600");
  file_with(std::string(5000, 'k'), 0600);
  expect_refused("characters");
  setenv("FOREBAY_SECRET_FILE", (directory_ / "none").c_str(), 1);
  expect_refused("No such file");
  setenv("FOREBAY_SECRET_FILE", (directory_ / "\x1b[2J").c_str(), 1);
  expect_refused("/\\x1b[2J: No such file");
  setenv("FOREBAY_SECRET_FILE", directory_.path().c_str(), 1);
  expect_refused("no regular file");
  ASSERT_EQ(mkfifo((directory_ / "pipe").c_str(), 0600), 0);
  setenv("FOREBAY_SECRET_FILE", (directory_ / "pipe").c_str(), 1);
  expect_refused("no regular file");
  if (geteuid() == 0) {
    ASSERT_EQ(chown(file_with(std::string(64, 'k'), 0600).c_str(), 12345, 12345), 0);
    expect_refused("belongs to user 12345");
  }
}

}  // namespace
}  // namespace forebay::internal
