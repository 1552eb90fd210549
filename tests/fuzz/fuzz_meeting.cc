#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "collectives/fingerprint.h"
#include "collectives/process/shm_segment.h"
#include "collectives/rendezvous/authentication.h"
#include "collectives/rendezvous/meeting.h"
#include "collectives/rendezvous/store_address.h"
#include "collectives/rendezvous/store_book.h"
#include "collectives/rendezvous/store_messages.h"
#include "collectives/rendezvous/wait_monitor.h"
#include "forebay/check.h"

namespace {

using namespace forebay::internal;

// An accepted message is unchanged after it was encoded and decoded again.
void check_message(std::string_view bytes) {
  Message message;
  if (!decode(bytes, &message)) return;
  FOREBAY_CHECK(encode(message) == bytes, "a message of %zu bytes changed", bytes.size());
  if (Greeting greeting; decode(message.content, &greeting)) {
    FOREBAY_CHECK(encode(greeting) == message.content, "a greeting of %zu bytes changed", bytes.size());
    FOREBAY_CHECK(greeting.introduction.who.rank < greeting.introduction.who.size, "a rank beyond the size");
  }
  if (Attendance roster; decode(message.content, &roster)) {
    FOREBAY_CHECK(roster.hosts.size() == (roster.generation.empty() ? 0 : roster.came.size()),
                  "a roster of %zu ranks and %zu hosts", roster.came.size(), roster.hosts.size());
  }
}

void check_card(std::string_view bytes) {
  Card card;
  if (!decode(bytes, &card)) return;
  FOREBAY_CHECK(encode(card) == bytes, "a card of %zu bytes changed", bytes.size());
  FOREBAY_CHECK(card.numbers.size() == static_cast<std::size_t>(card.introduction.who.size),
                "a card of %zu numbers", card.numbers.size());
}

void check_report(std::string_view bytes) {
  WaitReport report;
  if (!decode(bytes, &report)) return;
  FOREBAY_CHECK(encode(report) == bytes, "a report of %zu bytes changed", bytes.size());
}

// As frames come from a socket: in pieces, by somebody who knows the key or does not.
void check_frames(std::string_view bytes) {
  constexpr Digest kKey{1, 2, 3};
  FrameReader reader(kKey);
  FrameWriter writer(kKey);
  std::string text;
  while (!bytes.empty()) {
    const std::size_t piece =
        std::min<std::size_t>(bytes.size(), 1 + static_cast<unsigned char>(bytes[0]) % 64);
    const bool knows = (static_cast<unsigned char>(bytes[0]) & 64) != 0;
    const std::string_view content = bytes.substr(0, piece);
    reader.add(knows ? writer.frame(content) : std::string(content));
    bytes.remove_prefix(piece);
    FrameReader::Next next = reader.next(&text);
    while (next == FrameReader::Next::kMessage) {
      FOREBAY_CHECK(text.size() <= kMessageBytesMax, "a message of %zu bytes", text.size());
      next = reader.next(&text);
    }
    if (next == FrameReader::Next::kBroken) return;
  }
}

// Messages that admitted ranks may send to a server, one after another.
void check_book(std::string_view bytes) {
  constexpr int kSize = 3;
  StoreBook book({"job", {{0, kSize, "same"}, "version", "host"}}, "tcp://host:1");
  while (bytes.size() > 1) {
    const int rank = static_cast<unsigned char>(bytes[0]) % kSize;
    const std::size_t length = std::min<std::size_t>(bytes.size() - 2, static_cast<unsigned char>(bytes[1]));
    const std::string_view said = bytes.substr(2, length);
    bytes.remove_prefix(2 + length);
    Message message;
    if (!decode(said, &message)) {
      book.lose(rank);
    } else if (message.type == MessageType::kGoodbye) {
      book.leave(rank);
    } else if (Greeting greeting;
               message.type == MessageType::kGreeting && decode(message.content, &greeting)) {
      static_cast<void>(book.greet(greeting, "somewhere"));
    } else {
      const Message answer = book.answer(rank, message);
      FOREBAY_CHECK(answer.type >= MessageType::kDone, "an answer that is none");
      check_message(encode(answer));
    }
    for (const Message& news : book.take_news()) check_message(encode(news));
  }
}

}  // namespace

// The first byte selects the parser (of messages from sockets and shared files) that gets the rest.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0]) {
    case 'm':
      check_message(bytes);
      break;
    case 'c':
      check_card(bytes);
      break;
    case 'f':
      check_frames(bytes);
      break;
    case 'b':
      check_book(bytes);
      break;
    case 'h':
      if (bytes.size() == kHelloBytes) static_cast<void>(decode_hello(bytes));
      break;
    case 'w':
      check_report(bytes);
      break;
    case 'e': {
      const forebay::Status cause = decode_failure(std::string(bytes));
      FOREBAY_CHECK(!cause.ok(), "a failure that is none");
      break;
    }
    case 's':
      if (const auto found = decode_shm_announcement(bytes)) {
        FOREBAY_CHECK(found->owner.id > 0 && found->descriptor >= 0, "memory of nobody");
      }
      break;
    case 't':
      if (const auto address = parse_store_address(std::string(bytes)); address.ok()) {
        FOREBAY_CHECK(address.value().port != 0 && !address.value().host.empty(), "an address of nobody");
      }
      break;
    default:
      break;
  }
  return 0;
}
