/* Loaded objects and the symbols they define, read from their dynamic sections: how the front end finds the
   real dlsym without calling dlsym, and the driver's functions without asking the loader.

   Nothing here allocates or takes a lock of its own. The loader's lock is taken by dl_iterate_phdr, as dlsym
   itself takes it. Texts are compared here and not by the C library: a sanitizer has functions of its own in
   their place, which look the real ones up by dlsym before they work. */
#ifndef FOREBAY_PRELOAD_ELF_OBJECT_H
#define FOREBAY_PRELOAD_ELF_OBJECT_H

#include <link.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct ElfObject {
  uintptr_t base;
  const ElfW(Dyn) * dynamic;
  const char* path; /* As the loader has it; empty for the program. */
} ElfObject;

/* The object that `address` lies in. */
bool elf_object_at(const void* address, ElfObject* object);

/* The first object whose DT_SONAME begins with `prefix`, in the order of loading. */
bool elf_object_named(const char* prefix, ElfObject* object);

/* The same by the loader's list of the first namespace, without its lock and without a call: for what is
   never unloaded, and before anything else of the process works. */
bool elf_object_listed(const char* prefix, ElfObject* object);

bool elf_text_equals(const char* a, const char* b);

bool elf_soname_begins(const ElfObject* object, const char* prefix);

/* The function that the object defines under this name, whatever its version; null when there is none, or
   when its address would have to be computed by running code of the object. */
void* elf_function(const ElfObject* object, const char* name);

#endif
