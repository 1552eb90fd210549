// Ranks agree on a status, and on texts of keys and values: every rank learns of a difference, in the same
// words.

#include "forebay/agreement.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "tests/support/forwarding_communicator.h"
#include "tests/support/local_world.h"

namespace forebay::testing {
namespace {

std::vector<std::string> messages_of(int ranks, const std::function<void(Communicator&, int rank)>& work) {
  std::vector<std::string> messages(static_cast<std::size_t>(ranks));
  run_ranks(ranks, {}, [&](Rank& rank) {
    const int number = rank.communicator->rank();
    try {
      work(*rank.communicator, number);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
      messages[static_cast<std::size_t>(number)] = error.status().message();
    }
  });
  return messages;
}

class BarrierCount : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  Status barrier() override {
    ++count;
    return ForwardingCommunicator::barrier();
  }
  int count = 0;
};

// A rank may end after its error, and the others must not take it for lost.
TEST(Agreement, RanksWaitForEachOtherAfterADifference) {
  messages_of(2, [](Communicator& communicator, int rank) {
    BarrierCount counted(value_or_throw(communicator.split(0, rank)));
    agree(counted, Status());
    agree_on_text(counted, "options", "a 1\n");
    EXPECT_EQ(counted.count, 0);
    EXPECT_THROW(agree(counted, rank == 0 ? Status() : Status(StatusCode::kIoError, "x")), Error);
    EXPECT_EQ(counted.count, 1);
    EXPECT_THROW(agree_on_text(counted, "options", rank == 0 ? "a 1\n" : "a 2\n"), Error);
    EXPECT_EQ(counted.count, 2);
  });
}

TEST(Agreement, ALongMessageIsCutOffForOtherRanks) {
  const std::string text(2000, 'x');
  const std::vector<std::string> messages = messages_of(2, [&](Communicator& communicator, int rank) {
    agree(communicator, rank == 0 ? Status(StatusCode::kInvalidArgument, text) : Status());
  });
  EXPECT_EQ(messages[0], text);
  EXPECT_EQ(messages[1], "rank 0: " + text.substr(0, 1023));
}

TEST(Agreement, NamesTheFirstKeyThatDiffers) {
  const auto message = [](const std::vector<std::string>& texts) {
    const std::vector<std::string> messages =
        messages_of(static_cast<int>(texts.size()), [&](Communicator& communicator, int rank) {
          agree_on_text(communicator, "options", texts[static_cast<std::size_t>(rank)]);
        });
    for (const std::string& other : messages) EXPECT_EQ(other, messages[0]);
    return messages[0];
  };
  EXPECT_EQ(message({"a 1\nb 2\n", "a 1\nb 2\n"}), "");
  EXPECT_EQ(
      message({"a 1\nb 2\nc 3\n", "a 1\nb 3\nc 4\n", "a 1\nb 2\nc 3\n"}),
      "the ranks were given different options: b is 2 on ranks 0, 2, 3 on rank 1; give every rank the same "
      "options");
  EXPECT_EQ(
      message({"a 1\n", "a 1\nlonger key\n"}),
      "the ranks were given different options: longer is key on rank 1, nothing on rank 0; give every rank "
      "the same options");
  // Keys that end with a tab may have spaces. Long values are cut off.
  EXPECT_EQ(message({"beta of group 1\t" + std::string(81, 'x'), "beta of group 1\ty"}),
            "the ranks were given different options: beta of group 1 is " + std::string(80, 'x') +
                "... on rank 0, y on rank 1; give every rank the same options");
}

}  // namespace
}  // namespace forebay::testing
