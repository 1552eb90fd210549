// Linked statically: nothing can be preloaded under it, and it says so by its list of mappings.
#include <cstdio>
#include <cstring>

int main() {
  std::FILE* const maps = std::fopen("/proc/self/maps", "r");
  char line[4096];
  int found = 0;
  while (maps != nullptr && std::fgets(line, sizeof line, maps) != nullptr) {
    found += std::strstr(line, "libforebay") != nullptr;
  }
  std::printf("preloaded %d\n", found);
  return 0;
}
