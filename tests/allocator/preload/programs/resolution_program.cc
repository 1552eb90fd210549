// Asks the driver for every function, in every version and with every meaning of a null stream, and prints
// the library and the symbol of each answer.
//   resolution_program [a version to ask for besides]
#include <set>

#include "tests/allocator/preload/driver_access.h"

namespace {

using namespace forebay::cuda;  // NOLINT

std::string place_of(void* function) {
  if (function == nullptr) return "none";
  Dl_info info;
  if (::dladdr(function, &info) == 0 || info.dli_sname == nullptr) return "unknown";
  const std::string path = info.dli_fname;
  return path.substr(path.rfind('/') + 1) + " " + info.dli_sname;
}

}  // namespace

int main(int argc, char** argv) {
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) return 2;
  auto* const get = reinterpret_cast<cuGetProcAddress_v2_function*>(::dlsym(library, "cuGetProcAddress_v2"));
  auto* const get_old = reinterpret_cast<cuGetProcAddress_function*>(::dlsym(library, "cuGetProcAddress"));
  std::set<int> versions = {2000, kInterfaceVersion};
  for (const EntryPoint& row : kEntryPoints) versions.insert({row.version - 1, row.version});
  if (argc > 1) versions = {std::atoi(argv[1])};
  std::set<std::string> names;
  for (const EntryPoint& row : kEntryPoints) {
    std::printf("symbol %s: %s\n", row.symbol, place_of(::dlsym(library, row.symbol)).c_str());
    if (row.variant_symbol != nullptr) {
      std::printf("symbol %s: %s\n", row.variant_symbol,
                  place_of(::dlsym(library, row.variant_symbol)).c_str());
    }
    if (!names.insert(row.name).second) continue;
    for (const int version : versions) {
      for (const std::uint64_t flags : {0, 1, 2}) {
        void* found = nullptr;
        CuProcAddressQueryResult status{};
        const CuResult result = get(row.name, &found, version, flags, &status);
        void* found_old = nullptr;
        const CuResult result_old = get_old(row.name, &found_old, version, flags);
        std::printf("%s %d %d: %u %u %s; %u %s\n", row.name, version, static_cast<int>(flags),
                    static_cast<unsigned>(result), static_cast<unsigned>(status), place_of(found).c_str(),
                    static_cast<unsigned>(result_old), place_of(found_old).c_str());
      }
    }
  }
  // Look-ups that are invalid, but occur.
  std::printf("no name: %u\n", static_cast<unsigned>(get(nullptr, nullptr, 12000, 0, nullptr)));
  void* found = nullptr;
  std::printf("no place: %u\n", static_cast<unsigned>(get("cuMemAlloc", nullptr, 12000, 0, nullptr)));
  std::printf("no reason: %u %s\n", static_cast<unsigned>(get("cuMemAlloc", &found, 12000, 0, nullptr)),
              place_of(found).c_str());
  found = nullptr;
  std::printf("other flags: %u\n", static_cast<unsigned>(get("cuMemAlloc", &found, 12000, 16, nullptr)));
  return 0;
}
