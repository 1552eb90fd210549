// The messages between a TCP store and its clients, as bytes. Everything here takes bytes that anybody may
// have sent; nothing here touches a socket.
//
//   client  magic, nonce                          server  magic, nonce
//   client  proof that it knows the secret        server  'A' and its own proof, or 'R'
//   from here on, both ways: frames               length, message, HMAC of a key of this connection and
//                                                 direction over {number of the frame, length, message}
// The client's first message is its greeting. Each request is answered by one message. The server also sends
// kShared, kFirstFailure and kPosted unasked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "collectives/rendezvous/authentication.h"
#include "collectives/rendezvous/introduction.h"

namespace forebay::internal {

inline constexpr std::string_view kStoreMagic = "fbstore1";
inline constexpr std::size_t kHelloBytes = kStoreMagic.size() + sizeof(Digest);
inline constexpr char kSecretAccepted = 'A';
inline constexpr char kSecretRefused = 'R';

std::string encode_hello(const Digest& nonce);
// Nothing if `bytes` is no hello of this protocol. Requires: kHelloBytes bytes.
std::optional<Digest> decode_hello(std::string_view bytes);

// The keys of one connection, derived from the secret and two nonces.
struct StoreKeys {
  Digest client_proof;
  Digest server_proof;
  Digest to_server;
  Digest to_client;
};
StoreKeys derive_store_keys(std::string_view secret, const Digest& client_nonce, const Digest& server_nonce);

// A larger message is refused before memory is taken for it. Smaller: a run of very many ranks would not get
// its roster. Larger: a process that misuses the secret can take more memory.
inline constexpr std::size_t kMessageBytesMax = std::size_t{1} << 20;

class FrameWriter {
 public:
  explicit FrameWriter(const Digest& key) : key_(key) {}
  // Requires: at most kMessageBytesMax.
  std::string frame(std::string_view message);

 private:
  Digest key_;
  std::uint64_t number_ = 0;
};

class FrameReader {
 public:
  enum class Next : std::uint8_t { kMessage, kMore, kBroken };

  explicit FrameReader(const Digest& key) : key_(key) {}
  // Adds bytes as they come. Take the messages that are whole before adding more.
  void add(std::string_view bytes) { buffer_ += bytes; }
  // kMore: the next frame is not whole yet. kBroken, for good: the frame is too long, or is not the next one
  // of a sender that knows the key.
  Next next(std::string* message);

 private:
  Digest key_;
  std::uint64_t number_ = 0;
  std::string buffer_;
  bool broken_ = false;
};

enum class MessageType : std::uint8_t {
  // To the server.
  kGreeting = 1,  // kDone, which contains the rank's token, or kRefused. The token as its name: the rank was
                  // here and lost its connection.
  kWrite,         // kDone or kRefused.
  kWriteOnce,     // kText or kRefused.
  kRead,          // kText or kNothing.
  kRemove,        // kDone.
  kRoster,        // kText.
  kFail,          // kText: the first failure.
  kGoodbye,       // No answer; the connection ends.
  kPost,          // No answer; goes to all as kPosted.
  // To a client.
  kDone = 64,
  kText,
  kNothing,
  kRefused,       // Content: the reason, as encode_failure() makes it.
  kShared,        // Unasked: a text that was written once, for every rank.
  kFirstFailure,  // Unasked: the first failure of the run.
  kPosted,        // Unasked: a posted text. Left out for a rank that has not read the messages before.
};

struct Message {
  MessageType type = MessageType::kDone;
  std::string name;
  std::string content;
};

inline constexpr std::size_t kNameBytesMax = 512;

std::string encode(const Message& message);
bool decode(std::string_view bytes, Message* message);

struct Greeting {
  std::string job;  // The name of the run, if it has one.
  Introduction introduction;
};

inline constexpr std::size_t kJobBytesMax = 256;

std::string encode(const Greeting& greeting);
bool decode(std::string_view bytes, Greeting* greeting);

inline constexpr std::size_t kDoubtBytesMax = 1024;

std::string encode(const Attendance& roster);
bool decode(std::string_view bytes, Attendance* roster);

}  // namespace forebay::internal
