// The parts of a Muon step (muon.h) on host memory.
//
// Threads: those of the BlockRunner, the caller among them; the bits do not depend on them. The work is done
// when a function returns.
#pragma once

#include "forebay/block_runner.h"
#include "forebay/muon.h"

namespace forebay {

void muon_momentum(const MuonMomentumArguments& arguments, const BlockRunner& runner);
void orthogonalise(const OrthogonaliseArguments& arguments, const BlockRunner& runner);
void muon_update(const MuonUpdateArguments& arguments, const BlockRunner& runner);

}  // namespace forebay
