// The functions of PMIx that forebay calls, over one map of values.
#include <string>

#include "tests/fakes/pmix/fake_pmix.h"

namespace pmix = forebay::pmix;
using forebay::fake_pmix::FakePmix;

extern "C" {

FakePmix* fake_pmix(bool reset) {
  static FakePmix state;
  if (reset) state = {};
  return &state;
}

int PMIx_Init(pmix::Process* process, void* /*information*/, std::size_t /*count*/) {
  process->rank = fake_pmix(false)->rank;
  return fake_pmix(false)->init_result;
}

int PMIx_Finalize(const void* /*information*/, std::size_t /*count*/) {
  ++fake_pmix(false)->finalize_count;
  return pmix::kSuccess;
}

int PMIx_Put(std::uint8_t scope, const char* key, pmix::Value* value) {
  FakePmix& state = *fake_pmix(false);
  if (scope != pmix::kGlobal || value->type != pmix::kString) return forebay::fake_pmix::kRefused;
  if (state.put_result == pmix::kSuccess) state.put[{state.rank, key}] = value->data.string;
  return state.put_result;
}

int PMIx_Commit() {
  FakePmix& state = *fake_pmix(false);
  if (state.commit_result == pmix::kSuccess) state.committed.merge(state.put);
  return state.commit_result;
}

int PMIx_Get_nb(const pmix::Process* process, const char* key, const void* /*information*/,
                std::size_t /*count*/, pmix::ValueFunction* function, void* data) {
  FakePmix& state = *fake_pmix(false);
  ++state.get_count;
  if (state.get_result != pmix::kSuccess) return state.get_result;
  if (state.keeps_answers) {
    state.kept.emplace_back(function, data);
    return pmix::kSuccess;
  }
  const auto found = state.committed.find({process->rank, key});
  if (state.get_count <= state.not_found_count || found == state.committed.end()) {
    function(pmix::kNotFound, nullptr, data);
    return pmix::kSuccess;
  }
  pmix::Value value{};
  value.type = state.type;
  value.data.string = state.has_text ? found->second.data() : nullptr;
  function(pmix::kSuccess, &value, data);
  return pmix::kSuccess;
}

const char* PMIx_Error_string(int status) {
  return status == pmix::kSuccess ? "SUCCESS" : status == pmix::kNotFound ? "NOT-FOUND" : "REFUSED";
}

}  // extern "C"
