// Our declarations of NCCL's interface against its own header: values, layouts and signatures.
#include "collectives/nccl/abi.h"

#include <gtest/gtest.h>
#include <nccl.h>

#include <type_traits>

namespace forebay::nccl {
namespace {

#define FOREBAY_TEST_VALUE(name, real, value) static_assert(real == value, #real);
FOREBAY_NCCL_RESULTS(FOREBAY_TEST_VALUE)
FOREBAY_NCCL_TYPES(FOREBAY_TEST_VALUE)
#undef FOREBAY_TEST_VALUE
static_assert(static_cast<int>(NcclReduction::kSum) == ncclSum);
static_assert(kUniqueIdBytes == NCCL_UNIQUE_ID_BYTES && sizeof(NcclUniqueId) == sizeof(ncclUniqueId));
static_assert(kUndefinedInt == NCCL_CONFIG_UNDEF_INT);
static_assert(version_code(2, 30, 7) == NCCL_VERSION(2, 30, 7));

// Ours is the beginning of NCCL's.
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));
#define FOREBAY_TEST_FIELD(ours, real)                                        \
  static_assert(offsetof(NcclConfig, ours) == offsetof(ncclConfig_t, real) && \
                    sizeof(NcclConfig::ours) == sizeof(ncclConfig_t::real),   \
                #real);
FOREBAY_TEST_FIELD(size, size)
FOREBAY_TEST_FIELD(magic, magic)
FOREBAY_TEST_FIELD(version, version)
FOREBAY_TEST_FIELD(blocking, blocking)
FOREBAY_TEST_FIELD(cga_cluster_size, cgaClusterSize)
FOREBAY_TEST_FIELD(min_ctas, minCTAs)
FOREBAY_TEST_FIELD(max_ctas, maxCTAs)
FOREBAY_TEST_FIELD(net_name, netName)
FOREBAY_TEST_FIELD(split_share, splitShare)
#undef FOREBAY_TEST_FIELD

// NCCL's name for each of our types.
template <typename T>
struct Real {
  using type = T;
};
template <typename T>
struct Real<T*> {
  using type = typename Real<T>::type*;
};
template <>
struct Real<NcclResult> {
  using type = ncclResult_t;
};
template <>
struct Real<NcclType> {
  using type = ncclDataType_t;
};
template <>
struct Real<NcclReduction> {
  using type = ncclRedOp_t;
};
template <>
struct Real<NcclComm> {
  using type = ncclComm_t;
};
template <>
struct Real<NcclStream> {
  using type = cudaStream_t;
};
template <>
struct Real<NcclUniqueId> {
  using type = ncclUniqueId;
};
template <>
struct Real<NcclConfig> {
  using type = ncclConfig_t;
};
template <typename Result, typename... Arguments>
struct Real<Result(Arguments...)> {
  using type = typename Real<Result>::type(typename Real<Arguments>::type...);
};

#define FOREBAY_TEST_SIGNATURE(symbol, result, parameters) \
  static_assert(std::is_same_v<Real<symbol##_function>::type, decltype(::symbol)>, #symbol);
FOREBAY_NCCL_REQUIRED(FOREBAY_TEST_SIGNATURE)
#if NCCL_VERSION_CODE >= 22807  // The first with all of the optional ones.
FOREBAY_NCCL_OPTIONAL(FOREBAY_TEST_SIGNATURE)
#endif
#undef FOREBAY_TEST_SIGNATURE

TEST(NcclAbi, OurDeclarationsAgreeWithTheHeader) {
  // The compiler has checked the constants; these values are not constants.
  const ncclConfig_t real = NCCL_CONFIG_INITIALIZER;
  const NcclConfig ours;
  EXPECT_EQ(ours.magic, real.magic);
  EXPECT_EQ(ours.blocking, real.blocking);
  EXPECT_EQ(ours.split_share, real.splitShare);
  EXPECT_EQ(ours.net_name, real.netName);
}

}  // namespace
}  // namespace forebay::nccl
