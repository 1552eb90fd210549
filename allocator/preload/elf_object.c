#include "allocator/preload/elf_object.h"

#include <stddef.h>
#include <sys/auxv.h>

/* A pointer of the dynamic section. The loader has added the base to it, unless the section is read-only. */
static uintptr_t located(const ElfObject* object, uintptr_t value) {
  return value < object->base ? value + object->base : value;
}

static uintptr_t entry_of(const ElfObject* object, ElfW(Sxword) tag) {
  for (const ElfW(Dyn)* entry = object->dynamic; entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == tag) return entry->d_un.d_ptr;
  }
  return 0;
}

static bool describe(const struct dl_phdr_info* info, ElfObject* object) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    object->base = info->dlpi_addr;
    object->dynamic = (const ElfW(Dyn)*)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    object->path = info->dlpi_name != NULL ? info->dlpi_name : "";
    return true;
  }
  return false;
}

typedef struct Search {
  uintptr_t address;
  const char* prefix;
  ElfObject* object;
} Search;

static int holds_address(struct dl_phdr_info* info, size_t bytes, void* argument) {
  (void)bytes;
  const Search* search = argument;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)* segment = &info->dlpi_phdr[i];
    if (segment->p_type != PT_LOAD) continue;
    if (search->address - (info->dlpi_addr + segment->p_vaddr) >= segment->p_memsz) continue;
    return describe(info, search->object) ? 1 : -1;
  }
  return 0;
}

static int has_name(struct dl_phdr_info* info, size_t bytes, void* argument) {
  (void)bytes;
  const Search* search = argument;
  ElfObject object;
  if (!describe(info, &object) || !elf_soname_begins(&object, search->prefix)) return 0;
  *search->object = object;
  return 1;
}

bool elf_object_at(const void* address, ElfObject* object) {
  Search search = {(uintptr_t)address, NULL, object};
  return dl_iterate_phdr(holds_address, &search) == 1;
}

bool elf_object_named(const char* prefix, ElfObject* object) {
  Search search = {0, prefix, object};
  return dl_iterate_phdr(has_name, &search) == 1;
}

bool elf_object_listed(const char* prefix, ElfObject* object) {
  const ElfW(Phdr)* segments = (const ElfW(Phdr)*)getauxval(AT_PHDR);
  const unsigned long count = segments != NULL ? getauxval(AT_PHNUM) : 0;
  const ElfW(Dyn)* entry = NULL;
  uintptr_t base = 0;
  for (unsigned long i = 0; i < count; ++i) {
    if (segments[i].p_type == PT_PHDR) base = (uintptr_t)segments - segments[i].p_vaddr;
  }
  for (unsigned long i = 0; i < count; ++i) {
    if (segments[i].p_type == PT_DYNAMIC) entry = (const ElfW(Dyn)*)(base + segments[i].p_vaddr);
  }
  const struct r_debug* list = NULL;
  for (; entry != NULL && entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == DT_DEBUG) list = (const struct r_debug*)entry->d_un.d_ptr;
  }
  for (const struct link_map* map = list != NULL ? list->r_map : NULL; map != NULL; map = map->l_next) {
    const ElfObject one = {map->l_addr, map->l_ld, map->l_name};
    if (map->l_ld == NULL || !elf_soname_begins(&one, prefix)) continue;
    *object = one;
    return true;
  }
  return false;
}

bool elf_text_equals(const char* a, const char* b) {
  while (*a != '\0' && *a == *b) {
    ++a;
    ++b;
  }
  return *a == *b;
}

bool elf_soname_begins(const ElfObject* object, const char* prefix) {
  const uintptr_t strings = entry_of(object, DT_STRTAB);
  const uintptr_t soname = entry_of(object, DT_SONAME);
  if (strings == 0 || soname == 0) return false;
  const char* name = (const char*)located(object, strings) + soname;
  while (*prefix != '\0' && *prefix == *name) {
    ++prefix;
    ++name;
  }
  return *prefix == '\0';
}

typedef struct Symbols {
  const ElfW(Sym) * table;
  const char* strings;
} Symbols;

static void* function_at(const ElfObject* object, const Symbols* symbols, uint32_t index, const char* name) {
  const ElfW(Sym)* symbol = &symbols->table[index];
  /* Both classes of ELF encode the type alike. A GNU_IFUNC is not the address of a function yet. */
  if (symbol->st_shndx == SHN_UNDEF || ELF64_ST_TYPE(symbol->st_info) != STT_FUNC) return NULL;
  if (!elf_text_equals(symbols->strings + symbol->st_name, name)) return NULL;
  return (void*)(object->base + symbol->st_value);
}

static void* find_by_gnu_hash(const ElfObject* object, const Symbols* symbols, const uint32_t* table,
                              const char* name) {
  const uint32_t bucket_count = table[0];
  const uint32_t first_index = table[1];
  const uint32_t filter_count = table[2];
  const uint32_t* buckets = (const uint32_t*)((const ElfW(Addr)*)(table + 4) + filter_count);
  const uint32_t* hashes = buckets + bucket_count;
  uint32_t hash = 5381;
  for (const char* letter = name; *letter != '\0'; ++letter) hash = hash * 33 + (unsigned char)*letter;
  if (bucket_count == 0) return NULL;
  uint32_t index = buckets[hash % bucket_count];
  if (index < first_index) return NULL;
  for (;; ++index) {
    const uint32_t other = hashes[index - first_index];
    if ((other | 1) == (hash | 1)) {
      void* found = function_at(object, symbols, index, name);
      if (found != NULL) return found;
    }
    if ((other & 1) != 0) return NULL; /* The end of the chain. */
  }
}

static void* find_by_hash(const ElfObject* object, const Symbols* symbols, const uint32_t* table,
                          const char* name) {
  const uint32_t bucket_count = table[0];
  const uint32_t* buckets = table + 2;
  const uint32_t* chain = buckets + bucket_count;
  uint32_t hash = 0;
  for (const char* letter = name; *letter != '\0'; ++letter) {
    hash = (hash << 4) + (unsigned char)*letter;
    const uint32_t high = hash & 0xF0000000u;
    hash = (hash ^ (high >> 24)) & ~high;
  }
  if (bucket_count == 0) return NULL;
  for (uint32_t index = buckets[hash % bucket_count]; index != STN_UNDEF; index = chain[index]) {
    void* found = function_at(object, symbols, index, name);
    if (found != NULL) return found;
  }
  return NULL;
}

void* elf_function(const ElfObject* object, const char* name) {
  const uintptr_t table = entry_of(object, DT_SYMTAB);
  const uintptr_t strings = entry_of(object, DT_STRTAB);
  const uintptr_t gnu_hash = entry_of(object, DT_GNU_HASH);
  const uintptr_t hash = entry_of(object, DT_HASH);
  if (table == 0 || strings == 0) return NULL;
  const Symbols symbols = {(const ElfW(Sym)*)located(object, table), (const char*)located(object, strings)};
  if (gnu_hash != 0) {
    return find_by_gnu_hash(object, &symbols, (const uint32_t*)located(object, gnu_hash), name);
  }
  if (hash != 0) return find_by_hash(object, &symbols, (const uint32_t*)located(object, hash), name);
  return NULL;
}
