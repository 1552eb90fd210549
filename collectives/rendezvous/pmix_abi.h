// The part of PMIx, from version 3 on, that we use: declared here and loaded when a launcher offers it. A
// test compares this with pmix.h where that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::pmix {

inline constexpr int kSuccess = 0;
inline constexpr int kNotFound = -46;
inline constexpr std::uint16_t kString = 3;  // A pmix_data_type_t.
inline constexpr std::uint8_t kGlobal = 3;   // A pmix_scope_t.

struct Process {
  char job[256];
  std::uint32_t rank;
};

struct Value {
  std::uint16_t type;
  union {
    char* string;
    // Larger than the data of any version, so that the library may copy the whole.
    std::byte room[64];
  } data;
};

using ValueFunction = void(int status, Value* value, void* data);

using Init = int(Process* process, void* information, std::size_t count);
using Finalize = int(const void* information, std::size_t count);
using Put = int(std::uint8_t scope, const char* key, Value* value);
using Commit = int();
using GetNonBlocking = int(const Process* process, const char* key, const void* information,
                           std::size_t count, ValueFunction* function, void* data);
using ErrorString = const char*(int status);

}  // namespace forebay::pmix
