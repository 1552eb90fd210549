/* The front end of the preload: dlsym, cuGetProcAddress and the hooked calls of the driver, as a program
   under it finds them. It needs only the C library. It has no constructor, starts no thread and takes no lock
   of its own; it prints only why it cannot start. Until cuInit has succeeded it passes all calls on. Then it
   opens the core, which replaces some of them.

   A call goes to the driver unchanged (1) before that, (2) in a child made by fork after that, where the
   driver answers that it is not initialised, and (3) if the core has not replaced it.

   Threads: every function may be called from any thread, and before the program's constructors have run. */
#include <ctype.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "allocator/preload/calls.h"
#include "allocator/preload/elf_object.h"

#define EXPORTED __attribute__((visibility("default")))

/* FOREBAY_CORE_SONAME: the name of the core of this build, "libforebay-core.so.N". */
static const char kCorePrefix[] = "libforebay-core.so";
static const char kDriverPrefix[] = "libcuda.so";

/* --- the driver's functions --- */

/* The driver's functions by index, null until they are known. */
typedef union RealCalls {
  HookedCalls calls;
  _Atomic(void*) pointers[kHookedCount];
} RealCalls;
_Static_assert(sizeof(HookedCalls) == sizeof(_Atomic(void*)) * kHookedCount, "one pointer for each call");

static RealCalls real_calls;
static UsedCalls used_calls;
static HookedCalls core_calls;
static _Atomic(const HookedCalls*) started_calls; /* core_calls, once the core has filled it in. */

typedef struct HookedCall {
  const char* name;
  const char* symbol;
  int version;
  int null_stream;
  void* ours;
} HookedCall;

#define FOREBAY_PRELOAD_ROW(name, symbol, version, NULL_STREAM, parameters, arguments) \
  EXPORTED DriverResult symbol parameters;
FOREBAY_PRELOAD_HOOKED(FOREBAY_PRELOAD_ROW)
#undef FOREBAY_PRELOAD_ROW

static const HookedCall hooked_calls[kHookedCount] = {
#define FOREBAY_PRELOAD_ROW(name, symbol, version, NULL_STREAM, parameters, arguments) \
  {#name, #symbol, version, kNullStream##NULL_STREAM, (void*)symbol},
    FOREBAY_PRELOAD_HOOKED(FOREBAY_PRELOAD_ROW)
#undef FOREBAY_PRELOAD_ROW
};

static void* real_call(int index) {
  void* real = atomic_load_explicit(&real_calls.pointers[index], memory_order_acquire);
  if (real != NULL) return real;
  /* A program linked against the driver calls without a look-up before. */
  ElfObject driver;
  if (!elf_object_named(kDriverPrefix, &driver)) return NULL;
  real = elf_function(&driver, hooked_calls[index].symbol);
  atomic_store_explicit(&real_calls.pointers[index], real, memory_order_release);
  return real;
}

/* Later look-ups count: until the core keeps the driver open, a program may close it and open it elsewhere.
 */
static void keep_real_call(int index, void* real) {
  if (atomic_load_explicit(&started_calls, memory_order_acquire) != NULL) return;
  /* A driver that looks its own functions up by name finds ours, because this library comes first. */
  if (real == hooked_calls[index].ours) return;
  atomic_store_explicit(&real_calls.pointers[index], real, memory_order_release);
}

/* --- telling a child from its parent --- */

/* A page that is empty in a child after fork tells it from its parent, without a system call in each hooked
   call and without a fork handler. On a kernel without such pages the process's number is compared. */
static _Atomic(volatile unsigned char*) process_mark;
static _Atomic(pid_t) process_number;

static void mark_process(void) {
  const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
  void* page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page != MAP_FAILED && madvise(page, bytes, MADV_WIPEONFORK) == 0) {
    *(volatile unsigned char*)page = 1;
    atomic_store_explicit(&process_mark, page, memory_order_release);
    return;
  }
  if (page != MAP_FAILED) munmap(page, bytes);
  atomic_store_explicit(&process_number, getpid(), memory_order_release);
}

static bool is_marked_process(void) {
  const volatile unsigned char* mark = atomic_load_explicit(&process_mark, memory_order_acquire);
  if (mark != NULL) return *mark != 0;
  return atomic_load_explicit(&process_number, memory_order_acquire) == getpid();
}

/* --- the start --- */

enum { kIdle, kStarting, kStarted, kFailed };
static atomic_int start_state = kIdle;

/* The core's calls; null while all calls go to the driver. */
static const HookedCalls* active_calls(void) {
  const HookedCalls* calls = atomic_load_explicit(&started_calls, memory_order_acquire);
  return calls != NULL && is_marked_process() ? calls : NULL;
}

/* Writes one line with one system call. */
static void complain(const char* what, const char* why) {
  char line[1024];
  const char* parts[] = {"forebay: preload: ", what, ": ", why, "; the program goes on without it\n"};
  size_t length = 0;
  for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); ++i) {
    size_t bytes = strlen(parts[i]);
    if (bytes > sizeof(line) - length) bytes = sizeof(line) - length;
    memcpy(line + length, parts[i], bytes);
    length += bytes;
  }
  const ssize_t ignored = write(STDERR_FILENO, line, length);
  (void)ignored;
}

/* A function of the C library, which older versions have in libdl. Works before anything else does. */
static void* libc_function(const char* name) {
  static const char* const kLibraries[] = {"libc.so.6", "libdl.so.2"};
  for (size_t i = 0; i < sizeof(kLibraries) / sizeof(kLibraries[0]); ++i) {
    ElfObject library;
    if (!elf_object_listed(kLibraries[i], &library) && !elf_object_named(kLibraries[i], &library)) continue;
    void* found = elf_function(&library, name);
    if (found != NULL) return found;
  }
  return NULL;
}

typedef void* OpenFunction(const char* path, int flags);
typedef char* ErrorFunction(void);

/* Opens the core: the one already loaded, or else the one beside this library. */
static ForebayPreloadStart* open_core(void) {
  static const char kWhat[] = "cannot open " FOREBAY_CORE_SONAME;
  OpenFunction* const open_library = (OpenFunction*)libc_function("dlopen");
  ErrorFunction* const error_of = (ErrorFunction*)libc_function("dlerror");
  ElfObject self;
  if (open_library == NULL || error_of == NULL || !elf_object_at(hooked_calls, &self)) {
    complain(kWhat, "the C library has no dlopen");
    return NULL;
  }
  if (open_library(FOREBAY_CORE_SONAME, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD | RTLD_NODELETE) == NULL) {
    char path[4096];
    const char* slash = strrchr(self.path, '/');
    const size_t directory_bytes = slash == NULL ? 0 : (size_t)(slash + 1 - self.path);
    if (directory_bytes + sizeof(FOREBAY_CORE_SONAME) > sizeof(path)) {
      complain(kWhat, "the path is too long");
      return NULL;
    }
    memcpy(path, self.path, directory_bytes);
    memcpy(path + directory_bytes, FOREBAY_CORE_SONAME, sizeof(FOREBAY_CORE_SONAME));
    if (open_library(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE) == NULL) {
      const char* why = error_of();
      complain(kWhat, why != NULL ? why : path);
      return NULL;
    }
  }
  ElfObject core;
  void* start = NULL;
  if (elf_object_named(FOREBAY_CORE_SONAME, &core)) start = elf_function(&core, FOREBAY_PRELOAD_START_SYMBOL);
  if (start == NULL) complain(kWhat, "it is of another build; install both from one build");
  return (ForebayPreloadStart*)start;
}

/* Called after cuInit has succeeded. If another thread is in here, or the libraries that it opens call
   cuInit, this returns at once: until the start is done, calls go to the driver. */
static void start(void) {
  int idle = kIdle;
  if (!atomic_compare_exchange_strong(&start_state, &idle, kStarting)) return;
  ElfObject driver;
  if (!elf_object_at(real_call(kHooked_cuInit), &driver)) {
    atomic_store(&start_state, kFailed);
    return;
  }
  for (int i = 0; i < kHookedCount; ++i) {
    /* An earlier look-up may have found a driver that has been closed since. */
    ElfObject holder;
    void* known = atomic_load(&real_calls.pointers[i]);
    if (known != NULL && elf_object_at(known, &holder) && holder.dynamic == driver.dynamic) continue;
    void* own = elf_function(&driver, hooked_calls[i].symbol);
    if (own != NULL || known == NULL) keep_real_call(i, own);
  }
#define FOREBAY_PRELOAD_ROW(symbol, parameters) \
  used_calls.symbol = (Driver_##symbol*)elf_function(&driver, #symbol);
  FOREBAY_PRELOAD_USED(FOREBAY_PRELOAD_ROW)
#undef FOREBAY_PRELOAD_ROW
  mark_process();
  ForebayPreloadStart* const start_core = open_core();
  core_calls = real_calls.calls;
  const PreloadStart facts = {sizeof(facts), kHookedCount,       &real_calls.calls,
                              &used_calls,   (const void*)dlsym, &core_calls};
  if (start_core == NULL || start_core(&facts) != 0) {
    atomic_store(&start_state, kFailed);
    return;
  }
  atomic_store_explicit(&started_calls, &core_calls, memory_order_release);
  atomic_store(&start_state, kStarted);
}

/* --- dlsym --- */

typedef void* SymbolFunction(void* handle, const char* name);

/* dlsym_entry.S jumps to it. */
_Atomic(SymbolFunction*) forebay_real_dlsym __attribute__((visibility("hidden")));

typedef struct Answer {
  void* function;
  uintptr_t is_answered; /* 0: let the real dlsym answer. */
} Answer;
Answer forebay_answer_dlsym(void* handle, const char* name, const void* caller)
    __attribute__((visibility("hidden")));

static int find_symbol(const char* symbol) {
  for (int i = 0; i < kHookedCount; ++i) {
    if (elf_text_equals(hooked_calls[i].symbol, symbol)) return i;
  }
  return -1;
}

static bool is_driver(const void* function) {
  ElfObject object;
  return elf_object_at(function, &object) && elf_soname_begins(&object, kDriverPrefix);
}

Answer forebay_answer_dlsym(void* handle, const char* name, const void* caller) {
  const Answer leave_it = {NULL, 0};
  SymbolFunction* real = atomic_load_explicit(&forebay_real_dlsym, memory_order_acquire);
  if (real == NULL) {
    real = (SymbolFunction*)libc_function("dlsym");
    if (real == NULL) return (Answer){NULL, 1};
    atomic_store_explicit(&forebay_real_dlsym, real, memory_order_release);
  }
  /* "cu" is not enough: names of cublas, cudnn and curl begin with it too. */
  if (name == NULL || name[0] != 'c' || name[1] != 'u' || !(name[2] >= 'A' && name[2] <= 'Z'))
    return leave_it;
  const int index = find_symbol(name);
  if (index < 0) return leave_it;
  ElfObject asking;
  /* The core asks for the driver itself, and so does a driver that looks its own functions up. */
  if (elf_object_at(caller, &asking) &&
      (elf_soname_begins(&asking, kCorePrefix) || elf_soname_begins(&asking, kDriverPrefix))) {
    return leave_it;
  }

  void* found = NULL;
  if (handle == RTLD_NEXT || handle == RTLD_DEFAULT) {
    /* Searched behind this library, which comes before the driver and has functions of the same names. */
    found = real(RTLD_NEXT, name);
    if (found != NULL && !is_driver(found)) return leave_it; /* Another hook, which comes before ours. */
    if (found == NULL) {
      if (handle == RTLD_NEXT) return leave_it;
      /* Not in the global scope; the caller's own libraries may have loaded a driver. */
      ElfObject driver;
      if (elf_object_named(kDriverPrefix, &driver)) found = elf_function(&driver, name);
      if (found == NULL) return (Answer){NULL, 1};
    }
  } else {
    found = real(handle, name);
    if (found == NULL || !is_driver(found)) return (Answer){found, 1};
  }
  keep_real_call(index, found);
  return (Answer){hooked_calls[index].ours, 1};
}

/* --- cuGetProcAddress --- */

/* The index of the hooked call that the driver returns for this look-up; -1 when it is not hooked. Name,
   version and the meaning of a null stream decide together, since functions of one name take different
   arguments. */
static int find_versioned(const char* name, int version, uint64_t flags) {
  const bool per_thread = flags == kProcAddressPerThreadFlag;
  int best = -1;
  for (int i = 0; i < kHookedCount; ++i) {
    const HookedCall* call = &hooked_calls[i];
    if (call->version > version || !elf_text_equals(call->name, name)) continue;
    if (call->null_stream == (per_thread ? kNullStreamLEGACY : kNullStreamTHREAD)) continue;
    if (best < 0 || call->version > hooked_calls[best].version) best = i;
  }
  return best;
}

static bool is_hooked_name(const char* name) {
  for (int i = 0; i < kHookedCount; ++i) {
    if (elf_text_equals(hooked_calls[i].name, name)) return true;
  }
  return false;
}

/* Asks the driver by the newer interface or, if there is no `newer`, the older one. */
static DriverResult ask(Driver_cuGetProcAddress_v2* newer, Driver_cuGetProcAddress* older, const char* name,
                        void** function, int version, uint64_t flags, unsigned* found) {
  return newer != NULL ? newer(name, function, version, flags, found) : older(name, function, version, flags);
}

static DriverResult look_up(Driver_cuGetProcAddress_v2* newer, Driver_cuGetProcAddress* older,
                            const char* name, void** function, int version, uint64_t flags, unsigned* found) {
  if (newer == NULL && older == NULL) return kDriverNotInitialized;
  const DriverResult result = ask(newer, older, name, function, version, flags, found);
  if (result != kDriverSuccess || *function == NULL || !is_hooked_name(name)) return result;
  if (version > kKnownInterfaceVersion) {
    /* A newer interface is unknown here, unless the driver returns the same function for a known one. */
    void* known = NULL;
    version = kKnownInterfaceVersion;
    if (ask(newer, older, name, &known, version, flags, NULL) != kDriverSuccess || known != *function)
      return result;
  }
  const int index = flags > kProcAddressPerThreadFlag ? -1 : find_versioned(name, version, flags);
  if (index < 0) return result;
  keep_real_call(index, *function);
  *function = hooked_calls[index].ours;
  return result;
}

EXPORTED DriverResult cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags,
                                          unsigned* found) {
  return look_up((Driver_cuGetProcAddress_v2*)real_call(kHooked_cuGetProcAddress_v2), NULL, name, function,
                 version, flags, found);
}

EXPORTED DriverResult cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return look_up(NULL, (Driver_cuGetProcAddress*)real_call(kHooked_cuGetProcAddress), name, function, version,
                 flags, NULL);
}

/* --- the hooked calls --- */

EXPORTED DriverResult cuInit(unsigned flags) {
  Driver_cuInit* const real = (Driver_cuInit*)real_call(kHooked_cuInit);
  if (real == NULL) return kDriverNoDevice;
  const DriverResult result = real(flags);
  if (result == kDriverSuccess && atomic_load_explicit(&start_state, memory_order_acquire) == kIdle) start();
  return result;
}

/* The core is built without exceptions: a thread that is cancelled within it would never unlock its locks. */
#define FOREBAY_PRELOAD_ROW(name, symbol, version, NULL_STREAM, parameters, arguments) \
  EXPORTED DriverResult symbol parameters {                                            \
    const HookedCalls* const calls = active_calls();                                   \
    if (calls != NULL && calls->symbol != NULL) {                                      \
      int before = PTHREAD_CANCEL_ENABLE;                                              \
      (void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);                   \
      const DriverResult result = calls->symbol arguments;                             \
      (void)pthread_setcancelstate(before, &before);                                   \
      return result;                                                                   \
    }                                                                                  \
    Driver_##symbol* const real = (Driver_##symbol*)real_call(kHooked_##symbol);       \
    return real != NULL ? real arguments : kDriverNotInitialized;                      \
  }
FOREBAY_PRELOAD_REPLACED(FOREBAY_PRELOAD_ROW)
#undef FOREBAY_PRELOAD_ROW
