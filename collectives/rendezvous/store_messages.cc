#include "collectives/rendezvous/store_messages.h"

#include <algorithm>

#include "collectives/rendezvous/byte_text.h"
#include "forebay/check.h"

namespace forebay::internal {
namespace {

constexpr std::size_t kLengthBytes = sizeof(std::uint32_t);
constexpr std::size_t kGenerationBytesMax = 64;

Digest digest_of(std::string_view bytes) {
  Digest digest{};
  std::copy_n(bytes.begin(), digest.size(), digest.begin());
  return digest;
}

Digest frame_proof(const Digest& key, std::uint64_t number, std::string_view length_and_message) {
  std::string bytes;
  append_number(bytes, number);
  bytes += length_and_message;
  return hmac_sha256(bytes_of(key), bytes);
}

bool is_known(std::uint8_t type) {
  const auto in = [type](MessageType first, MessageType last) {
    return type >= static_cast<std::uint8_t>(first) && type <= static_cast<std::uint8_t>(last);
  };
  return in(MessageType::kGreeting, MessageType::kPost) || in(MessageType::kDone, MessageType::kPosted);
}

}  // namespace

std::string encode_hello(const Digest& nonce) {
  return std::string(kStoreMagic).append(bytes_of(nonce));
}

std::optional<Digest> decode_hello(std::string_view bytes) {
  if (bytes.size() != kHelloBytes || !bytes.starts_with(kStoreMagic)) return std::nullopt;
  return digest_of(bytes.substr(kStoreMagic.size()));
}

StoreKeys derive_store_keys(std::string_view secret, const Digest& client_nonce, const Digest& server_nonce) {
  const auto derive = [&](std::string_view purpose) {
    std::string bytes(kStoreMagic);
    bytes += bytes_of(client_nonce);
    bytes += bytes_of(server_nonce);
    return hmac_sha256(secret, bytes.append(purpose));
  };
  return {derive("client proof"), derive("server proof"), derive("to server"), derive("to client")};
}

std::string FrameWriter::frame(std::string_view message) {
  FOREBAY_CHECK(message.size() <= kMessageBytesMax, "a message of %zu bytes", message.size());
  std::string bytes;
  append_text(bytes, message);
  const Digest proof = frame_proof(key_, number_++, bytes);
  return bytes.append(bytes_of(proof));
}

FrameReader::Next FrameReader::next(std::string* message) {
  if (broken_) return Next::kBroken;
  std::string_view rest = buffer_;
  std::uint32_t length = 0;
  if (!take_number(&rest, &length)) return Next::kMore;
  if (length > kMessageBytesMax) {
    broken_ = true;
    return Next::kBroken;
  }
  const std::size_t proven = kLengthBytes + length;
  if (buffer_.size() < proven + sizeof(Digest)) return Next::kMore;
  const Digest given = digest_of(std::string_view(buffer_).substr(proven));
  if (!equal_digests(given, frame_proof(key_, number_, std::string_view(buffer_).substr(0, proven)))) {
    broken_ = true;
    return Next::kBroken;
  }
  ++number_;
  message->assign(buffer_, kLengthBytes, length);
  buffer_.erase(0, proven + sizeof(Digest));
  return Next::kMessage;
}

std::string encode(const Message& message) {
  std::string bytes;
  append_number(bytes, static_cast<std::uint8_t>(message.type));
  append_text(bytes, message.name);
  return bytes += message.content;
}

bool decode(std::string_view bytes, Message* message) {
  std::uint8_t type = 0;
  if (!take_number(&bytes, &type) || !is_known(type)) return false;
  message->type = static_cast<MessageType>(type);
  if (!take_text(&bytes, kNameBytesMax, &message->name)) return false;
  message->content.assign(bytes);
  return true;
}

std::string encode(const Greeting& greeting) {
  std::string bytes;
  append_text(bytes, greeting.job);
  return bytes += encode(greeting.introduction);
}

bool decode(std::string_view bytes, Greeting* greeting) {
  return take_text(&bytes, kJobBytesMax, &greeting->job) && decode(&bytes, &greeting->introduction) &&
         bytes.empty();
}

std::string encode(const Attendance& roster) {
  std::string bytes;
  append_text(bytes, roster.generation);
  append_text(bytes, roster.doubt);
  append_number(bytes, static_cast<std::uint32_t>(roster.came.size()));
  for (const bool came : roster.came) append_number(bytes, static_cast<std::uint8_t>(came));
  for (const std::string& host : roster.hosts) append_text(bytes, host);
  return bytes;
}

bool decode(std::string_view bytes, Attendance* roster) {
  std::uint32_t size = 0;
  if (!take_text(&bytes, kGenerationBytesMax, &roster->generation) ||
      !take_text(&bytes, kDoubtBytesMax, &roster->doubt) || !take_number(&bytes, &size) ||
      size > bytes.size()) {
    return false;
  }
  roster->came.assign(size, false);
  for (std::uint32_t i = 0; i < size; ++i) roster->came[i] = bytes[i] != 0;
  bytes.remove_prefix(size);
  roster->hosts.clear();
  if (roster->generation.empty()) return bytes.empty();
  for (std::uint32_t i = 0; i < size; ++i) {
    if (!take_text(&bytes, kHostBytesMax, &roster->hosts.emplace_back())) return false;
  }
  return bytes.empty();
}

}  // namespace forebay::internal
