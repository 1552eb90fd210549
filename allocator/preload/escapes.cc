#include <link.h>

#include <atomic>
#include <cstring>
#include <string>

#include "allocator/preload/state.h"

namespace forebay {
namespace {

constinit std::atomic<int> looks_left{kEscapeLooks};

struct Library {
  const dl_phdr_info* info;
  const dl_phdr_info* front_end;
  const ElfW(Sym) * symbols = nullptr;
  const char* strings = nullptr;
  const char* soname = "";
};

std::uintptr_t located(const dl_phdr_info& info, std::uintptr_t value) {
  return value < info.dlpi_addr ? value + info.dlpi_addr : value;
}

bool holds(const dl_phdr_info& info, std::uintptr_t address) {
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = info.dlpi_phdr[i];
    if (segment.p_type == PT_LOAD && address - (info.dlpi_addr + segment.p_vaddr) < segment.p_memsz)
      return true;
  }
  return false;
}

// Whether the front end has a function of this name.
bool is_hooked(const char* name) {
  static constexpr const char* kHooked[] = {
#define FOREBAY_PRELOAD_ROW(name, symbol, version, NULL_STREAM, parameters, arguments) #symbol,
      FOREBAY_PRELOAD_HOOKED(FOREBAY_PRELOAD_ROW)
#undef FOREBAY_PRELOAD_ROW
  };
  if (std::strcmp(name, "dlsym") == 0) return true;
  if (name[0] != 'c' || name[1] != 'u') return false;
  for (const char* hooked : kHooked) {
    if (std::strcmp(name, hooked) == 0) return true;
  }
  return false;
}

// Whether a relocation has bound such a name to another object.
bool has_escaped(const Library& library, std::uintptr_t table, std::size_t bytes) {
  const auto* relocations = reinterpret_cast<const ElfW(Rela)*>(table);
  for (std::size_t i = 0; i < bytes / sizeof(ElfW(Rela)); ++i) {
    const auto index = ELF64_R_SYM(relocations[i].r_info);
    if (index == 0) continue;
    const char* name = library.strings + library.symbols[index].st_name;
    if (!is_hooked(name)) continue;
    void* bound = nullptr;
    std::memcpy(&bound, reinterpret_cast<const void*>(library.info->dlpi_addr + relocations[i].r_offset),
                sizeof bound);
    const auto address = reinterpret_cast<std::uintptr_t>(bound);
    // Null: a weak symbol that no object defines. Within the library: its own stub, until the first call.
    if (bound == nullptr || holds(*library.front_end, address) || holds(*library.info, address)) continue;
    return true;
  }
  return false;
}

// Whether the library's constants name the driver. Libraries that do not look up other symbols.
bool mentions_driver(const dl_phdr_info& info) {
  static constexpr char kName[] = "libcuda.so";
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = info.dlpi_phdr[i];
    if (segment.p_type != PT_LOAD || (segment.p_flags & PF_R) == 0 || (segment.p_flags & PF_W) != 0) continue;
    const auto* begin = reinterpret_cast<const char*>(info.dlpi_addr + segment.p_vaddr);
    if (::memmem(begin, segment.p_memsz, kName, sizeof kName - 1) != nullptr) return true;
  }
  return false;
}

struct Look {
  dl_phdr_info front_end{};  // All zeros: not found yet.
  std::string found;
};

int find_front_end(dl_phdr_info* info, std::size_t, void* argument) {
  if (!holds(*info, reinterpret_cast<std::uintptr_t>(preload_state().hooked_dlsym))) return 0;
  static_cast<Look*>(argument)->front_end = *info;
  return 1;
}

int look_at(dl_phdr_info* info, std::size_t, void* argument) {
  Look& look = *static_cast<Look*>(argument);
  Library library{.info = info, .front_end = &look.front_end};
  const ElfW(Dyn)* entry = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) {
      entry = reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    }
  }
  if (entry == nullptr) return 0;
  const auto value = [&](ElfW(Sxword) tag) -> std::uintptr_t {
    const ElfW(Dyn)* found = entry;
    while (found->d_tag != DT_NULL && found->d_tag != tag) ++found;
    return found->d_tag == tag ? found->d_un.d_val : 0;
  };
  const std::uintptr_t symbols = value(DT_SYMTAB);
  const std::uintptr_t strings = value(DT_STRTAB);
  const std::uintptr_t jumps = value(DT_JMPREL);
  const std::uintptr_t others = value(DT_RELA);
  if (symbols == 0 || strings == 0) return 0;
  library.symbols = reinterpret_cast<const ElfW(Sym)*>(located(*info, symbols));
  library.strings = reinterpret_cast<const char*>(located(*info, strings));
  library.soname = library.strings + value(DT_SONAME);
  // The driver itself and forebay's libraries are meant to call the driver directly.
  if (std::strncmp(library.soname, "libcuda.so", 10) == 0 ||
      std::strncmp(library.soname, "libforebay", 10) == 0)
    return 0;
  const bool escaped = (jumps != 0 && has_escaped(library, located(*info, jumps), value(DT_PLTRELSZ))) ||
                       (others != 0 && has_escaped(library, located(*info, others), value(DT_RELASZ)));
  if (!escaped || !mentions_driver(*info)) return 0;
  if (!look.found.empty()) look.found += ", ";
  look.found += info->dlpi_name[0] != '\0' ? info->dlpi_name : "the program itself";
  return 0;
}

}  // namespace

void look_for_escapes() {
  PreloadState& state = preload_state();
  if (state.record->around.state.load(std::memory_order_relaxed) != 0) return;
  if (looks_left.load(std::memory_order_relaxed) <= 0 ||
      looks_left.fetch_sub(1, std::memory_order_relaxed) <= 0)
    return;
  Look look;
  if (::dl_iterate_phdr(find_front_end, &look) == 0) return;
  (void)::dl_iterate_phdr(look_at, &look);
  if (!look.found.empty()) set_preload_text(state.record->around, look.found);
}

void look_for_escapes_now_and_then(std::uint64_t count) {
  // At the 16th, 256th, 4096th and so on.
  if (count >= 16 && (count & (count - 1)) == 0 && __builtin_ctzll(count) % 4 == 0) look_for_escapes();
}

}  // namespace forebay
