// The public structs compare member by member, by hand for C++17: a member that is added is to be compared
// too.

#include <gtest/gtest.h>

#include <cstring>

#include "forebay/activation_checkpointer.h"
#include "forebay/engine.h"
#include "forebay/model_shape.h"
#include "forebay/plan.h"
#include "forebay/rank_grid.h"

namespace forebay {
namespace {

// Bytes of a T whose change makes it another value.
template <typename T>
std::size_t compared_bytes() {
  static_assert(std::is_trivially_copyable_v<T>);
  std::size_t count = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    unsigned char bytes[sizeof(T)];
    const T original{};
    std::memcpy(bytes, &original, sizeof(T));
    bytes[i] ^= 1;
    T changed;
    std::memcpy(&changed, bytes, sizeof(T));
    EXPECT_TRUE(original == original);
    EXPECT_EQ(original == changed, !(original != changed));
    count += original != changed;
  }
  return count;
}

TEST(Equality, ReadsEveryMember) {
  EXPECT_EQ(compared_bytes<Stream>(), sizeof(Stream));
  EXPECT_EQ(compared_bytes<Event>(), sizeof(Event));
  EXPECT_EQ(compared_bytes<Chunk>(), sizeof(Chunk));
  EXPECT_EQ(compared_bytes<GridCoordinates>(), sizeof(GridCoordinates));
  EXPECT_EQ(compared_bytes<ParameterId>(), sizeof(ParameterId));
  EXPECT_EQ(compared_bytes<ModelPart>(), sizeof(ModelPart));
  EXPECT_EQ(compared_bytes<ActivationKey>(), sizeof(ActivationKey));
  EXPECT_EQ(compared_bytes<PoolBytes>(), sizeof(PoolBytes));
  EXPECT_EQ(compared_bytes<HostBytes>(), sizeof(HostBytes));
  EXPECT_EQ(compared_bytes<FileBytes>(), sizeof(FileBytes));
  EXPECT_EQ(compared_bytes<WireBytes>(), sizeof(WireBytes));
  // These two have padding.
  EXPECT_EQ(compared_bytes<ActivationPlace>(), sizeof(ActivationPlace) - 4);
  EXPECT_EQ(compared_bytes<StatePlacement>(), sizeof(StatePlacement) - 2);
}

}  // namespace
}  // namespace forebay
