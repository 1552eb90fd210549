// What a TCP store and its clients say to each other, as bytes. Everything here takes bytes that anybody may
// have sent; nothing here touches a socket.
//
//   client  magic, nonce                          server  magic, nonce
//   client  proof that it knows the secret        server  'A' and its own proof, or 'R'
//   from here on, both ways: frames               length, message, HMAC of a key of this connection and
//                                                 direction over {number of the frame, length, message}
//
// The client's first message is its greeting. A message asked for is answered by one message; besides, the
// server sends kShared and kFirstFailure when it likes.
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
// Nothing for what is not a hello of this protocol. Requires: kHelloBytes.
std::optional<Digest> decode_hello(std::string_view bytes);

// What one connection's two nonces make of the secret.
struct StoreKeys {
  Digest client_proof;
  Digest server_proof;
  Digest to_server;
  Digest to_client;
};
StoreKeys derive_store_keys(std::string_view secret, const Digest& client_nonce, const Digest& server_nonce);

// A larger message is refused before memory is taken for it. Smaller: a run of very many ranks would not get
// its roster. Larger: more memory for whoever knows the secret and misuses it.
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
  // Bytes as they come. At most one whole frame and a piece should be in here: take messages before adding.
  void add(std::string_view bytes) { buffer_ += bytes; }
  // kMore: a frame is not whole yet. kBroken, for good: too long a one, or one that nobody with the key sent
  // as the next on this connection.
  Next next(std::string* message);

 private:
  Digest key_;
  std::uint64_t number_ = 0;
  std::string buffer_;
  bool broken_ = false;
};

enum class MessageType : std::uint8_t {
  // To the server.
  kGreeting = 1,  // Answered by kDone, whose content is the rank's token, or kRefused. With the token as its
                  // name: the
                  // rank was here and lost its connection.
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
  kRefused,       // Content: why, as encode_failure() makes it.
  kShared,        // Unasked: a text that was written once, for every rank to know.
  kFirstFailure,  // Unasked: why the run has failed.
  kPosted,        // Unasked: what a rank has posted. Left out for a rank that has not read what came before.
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
  std::string job;  // Names the run, where something does.
  Introduction introduction;
};

inline constexpr std::size_t kJobBytesMax = 256;

std::string encode(const Greeting& greeting);
bool decode(std::string_view bytes, Greeting* greeting);

inline constexpr std::size_t kDoubtBytesMax = 1024;

std::string encode(const Attendance& roster);
bool decode(std::string_view bytes, Attendance* roster);

}  // namespace forebay::internal
