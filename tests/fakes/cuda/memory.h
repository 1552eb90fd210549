// Device memory: addresses, the physical memory behind them, and who may use it.
//
// Addresses come from slabs: large PROT_NONE ranges that are never given back, so that a device address is
// never a host address later. Physical memory is a memfd of its own per chunk or allocation, with an alias: a
// second mapping through which the fake itself copies, fills and poisons, independent of the host's access to
// the device address.
//
// Threads: guarded by the driver's mutex, except that bytes are moved through aliases without it.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tests/fakes/cuda/scheduler.h"

namespace forebay::fake_cuda {

using Address = std::uintptr_t;

constexpr std::size_t kPageBytes = 4096;

// Files of the fake with their aliases whose memory went and is poisoned: making one takes the kernel longer
// than all the rest of an allocation. Files that another process may have, and those of a process that made
// this one by fork, are not among them. Threads: any.
class SpareFiles {
 public:
  struct File {
    std::string name;
    std::size_t bytes = 0;
    int file = -1;
    std::byte* alias = nullptr;
  };
  ~SpareFiles();
  // Takes the file, if there is room for it.
  bool put(File file);
  std::optional<File> take(const std::string& name, std::size_t bytes);

 private:
  std::mutex mutex_;
  std::vector<File> files_;
  std::size_t bytes_ = 0;
  pid_t process_ = ::getpid();
};

// The memory behind a chunk or an allocation. Shared by its handle, its mappings and the operations that use
// it now.
struct Physical {
  ~Physical();
  void fill_with_poison() const;

  int device = 0;
  std::size_t bytes = 0;
  int file = -1;
  std::byte* alias = nullptr;
  CuMemAllocationProp properties{};
  std::uint64_t id = 0;   // Never reused: CU_POINTER_ATTRIBUTE_BUFFER_ID.
  bool imported = false;  // From another process, which is charged for it.
  bool poison = false;    // When it goes.
  bool exported = false;  // Another process may have it.
  std::string file_name;
  std::shared_ptr<SpareFiles> spares;
  std::uint64_t* charged = nullptr;  // The device's account.
};
using PhysicalPtr = std::shared_ptr<Physical>;

struct Pool;

enum class MappingKind : std::uint8_t { kVirtual, kAllocation, kPool, kImported };

struct Mapping {
  Address begin = 0;
  std::size_t bytes = 0;
  PhysicalPtr physical;
  MappingKind kind = MappingKind::kVirtual;
  CuMemHandle chunk = 0;                 // kVirtual: the handle it was mapped from.
  std::vector<CuMemAccessFlags> access;  // kVirtual: by device.
  std::weak_ptr<Context> context;        // The context that allocated or imported it.
  std::shared_ptr<Pool> pool;            // kPool.
  std::size_t requested_bytes = 0;       // Not kVirtual: the requested size; the rest is rounding.
  // kImported: its owner, and how often it was opened.
  std::int32_t import_process = 0;
  std::int32_t import_file = -1;
  int import_count = 0;
  // kPool: freed in the order of a stream, and by whom. `available` follows the streams: set when the
  // allocation runs, cleared when the free runs.
  bool freed = false;
  MarkPtr free_mark;
  std::uint64_t free_stream_id = 0;
  bool graph_owned = false;
  bool available = true;
  bool sync_memops = false;
  bool is_open = false;  // Its file is mapped.
  Address end() const { return begin + bytes; }
};

struct Reservation {
  std::size_t bytes = 0;
  bool internal = false;  // Behind an allocation: cuMemAddressFree and cuMemMap do not know it.
};

struct Chunk {
  PhysicalPtr physical;
  std::uint64_t references = 0;
};

class Memory {
 public:
  void configure(const FakeOptions& options);
  // Unmaps and forgets everything.
  void clear();

  std::size_t granularity() const { return options_.granularity; }
  std::size_t capacity() const { return options_.memory_bytes; }
  std::uint64_t charged_bytes(int device) const { return charged_[static_cast<std::size_t>(device)]; }
  std::uint64_t peak_charged_bytes() const { return peak_charged_; }

  // Takes `bytes` of the device, a multiple of a page. Errors: kOutOfMemory.
  CuResult create_physical(int device, std::size_t bytes, const CuMemAllocationProp& properties,
                           PhysicalPtr* result);
  // Memory of another process, given as a file of the fake. The file stays the caller's. Errors:
  // kInvalidValue.
  CuResult import_physical(int file, PhysicalPtr* result);

  // Addresses, at `hint` when that is free. `bytes` and `alignment` are multiples of a page.
  CuResult reserve(std::size_t bytes, std::size_t alignment, Address hint, bool internal, Address* result);
  void release(Address address);
  Reservation* find_reservation(Address address, std::size_t bytes);

  // Puts memory at free addresses within one reservation; usable once `open` is called.
  Mapping& add_mapping(Mapping mapping);
  // Makes memory usable at its address, as the books allow. Errors: kOutOfMemory when the kernel refuses.
  CuResult open(Mapping& mapping);
  void remove_mapping(Address begin);
  // The mapping that holds the address, or null.
  Mapping* find(Address address);
  // All mappings that overlap the range, in order.
  std::vector<Mapping*> overlapping(Address begin, std::size_t bytes);
  // Whether the address belongs to the device's address space, mapped or not.
  bool is_device(Address address) const;

  std::map<Address, Reservation>& reservations() { return reservations_; }
  std::map<Address, Mapping>& mappings() { return mappings_; }
  std::map<CuMemHandle, Chunk>& chunks() { return chunks_; }

  // Around a kernel: device memory is usable at its own addresses to the calling thread.
  void enter_kernel();
  void leave_kernel();

 private:
  int protection(const Mapping& mapping) const;
  CuResult protect(const Mapping& mapping) const;

  FakeOptions options_;
  std::vector<std::uint64_t> charged_;
  std::uint64_t peak_charged_ = 0;  // All devices together.
  std::map<Address, std::size_t> slabs_;
  std::map<Address, std::size_t> free_;  // Free extents of the slabs, never adjacent.
  std::map<Address, Reservation> reservations_;
  std::map<Address, Mapping> mappings_;
  std::map<CuMemHandle, Chunk> chunks_;
  std::uint64_t next_physical_id_ = 1;
  std::shared_ptr<SpareFiles> spares_ = std::make_shared<SpareFiles>();
  int protection_key_ = -1;
  bool windows_ = false;
  int open_windows_ = 0;
};

// Executors are refused device memory outside kernels, as every host thread is.
void deny_device_memory_to_this_thread();

}  // namespace forebay::fake_cuda
