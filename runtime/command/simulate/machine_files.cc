#include "runtime/command/simulate/machine_files.h"

namespace forebay {
namespace {

constexpr MachineFile kFiles[] = {
    {
        "device",
        "V100-32",
#include "V100-32.json.inc"
    },
    {
        "device",
        "A100-40",
#include "A100-40.json.inc"
    },
    {
        "device",
        "A100-80",
#include "A100-80.json.inc"
    },
    {
        "device",
        "H100",
#include "H100.json.inc"
    },
    {
        "device",
        "H200",
#include "H200.json.inc"
    },
    {
        "device",
        "B200",
#include "B200.json.inc"
    },
    {
        "device",
        "RTX-4090",
#include "RTX-4090.json.inc"
    },
    {
        "cluster",
        "dgx-2",
#include "dgx-2.json.inc"
    },
    {
        "cluster",
        "dgx-a100",
#include "dgx-a100.json.inc"
    },
    {
        "cluster",
        "dgx-h100",
#include "dgx-h100.json.inc"
    },
};

}  // namespace

std::span<const MachineFile> machine_files() {
  return kFiles;
}

}  // namespace forebay
