// Our declarations of PMIx against its header, where that is installed: compiling it is the test.
#include "collectives/rendezvous/pmix_abi.h"

#include <gtest/gtest.h>
#include <pmix.h>

#include <cstddef>
#include <type_traits>

namespace forebay::pmix {
namespace {

static_assert(kSuccess == PMIX_SUCCESS);
static_assert(kNotFound == PMIX_ERR_NOT_FOUND);
static_assert(kString == PMIX_STRING);
static_assert(kGlobal == PMIX_GLOBAL);
static_assert(sizeof(Process) == sizeof(pmix_proc_t));
static_assert(offsetof(Process, rank) == offsetof(pmix_proc_t, rank));
static_assert(sizeof(Process::job) == sizeof(pmix_nspace_t));
static_assert(sizeof(Value) >= sizeof(pmix_value_t));
static_assert(offsetof(Value, type) == offsetof(pmix_value_t, type));
static_assert(offsetof(Value, data) == offsetof(pmix_value_t, data));
static_assert(sizeof(Value::type) == sizeof(pmix_data_type_t));
static_assert(sizeof(pmix_scope_t) == sizeof(std::uint8_t));
static_assert(std::is_same_v<pmix_status_t, int>);
// The functions, as they are to be called, with our words for theirs.
static_assert(std::is_same_v<decltype(&PMIx_Init), int (*)(pmix_proc_t*, pmix_info_t*, std::size_t)>);
static_assert(std::is_same_v<decltype(&PMIx_Finalize), int (*)(const pmix_info_t*, std::size_t)>);
static_assert(std::is_same_v<decltype(&PMIx_Put), int (*)(std::uint8_t, const char*, pmix_value_t*)>);
static_assert(std::is_same_v<decltype(&PMIx_Commit), int (*)()>);
static_assert(std::is_same_v<pmix_value_cbfunc_t, void (*)(int, pmix_value_t*, void*)>);
static_assert(
    std::is_same_v<decltype(&PMIx_Get_nb), int (*)(const pmix_proc_t*, const char*, const pmix_info_t*,
                                                   std::size_t, pmix_value_cbfunc_t, void*)>);
static_assert(std::is_same_v<decltype(&PMIx_Error_string), const char* (*)(int)>);

TEST(PmixAbi, OursIsThatOfTheHeader) {
  SUCCEED() << "checked when this was compiled";
}

}  // namespace
}  // namespace forebay::pmix
