// A data operation that a LocalFault changes: one that fails, comes late, differs, or never comes.
#pragma once

#include <functional>

#include "collectives/fingerprint.h"
#include "collectives/local/ranks.h"

namespace forebay::internal {

// The error of `rank` after its scripted death.
Status died_by_script(const LocalRanks& ranks, int rank);

// Carries out `operation` of `rank` as the script says.
Status run_faulty(LocalRanks& ranks, int rank, const LocalFault& fault, const Fingerprint& fingerprint,
                  const std::function<Status(const Fingerprint&)>& operation);

}  // namespace forebay::internal
