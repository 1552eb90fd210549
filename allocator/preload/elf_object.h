/* Loaded objects and the symbols they define, read from their dynamic sections. The front end finds the real
   dlsym this way without calling dlsym, and the driver's functions without asking the loader.

   Nothing here allocates or takes a lock of its own. dl_iterate_phdr takes the loader's lock, as dlsym does.
   Strings are compared here and not by the C library, because a sanitizer replaces those functions by its
   own, which call dlsym before they work. */
#ifndef FOREBAY_PRELOAD_ELF_OBJECT_H
#define FOREBAY_PRELOAD_ELF_OBJECT_H

#include <link.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct ElfObject {
  uintptr_t base;
  const ElfW(Dyn) * dynamic;
  const char* path; /* As the loader knows it; empty for the program. */
} ElfObject;

/* The object that contains `address`. */
bool elf_object_at(const void* address, ElfObject* object);

/* The first object whose DT_SONAME begins with `prefix`, in the order of loading. */
bool elf_object_named(const char* prefix, ElfObject* object);

/* The same, read from the loader's list of the first namespace without its lock and without a call. For
   objects that are never unloaded, before anything else in the process works. */
bool elf_object_listed(const char* prefix, ElfObject* object);

bool elf_text_equals(const char* a, const char* b);

bool elf_soname_begins(const ElfObject* object, const char* prefix);

/* The function that the object defines under this name, in any version. Null when there is none, or when code
   of the object would have to run to compute its address. */
void* elf_function(const ElfObject* object, const char* name);

#endif
