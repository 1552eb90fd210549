#include "tests/fakes/cuda/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <utility>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

// One slab of addresses. Large, so that a process has few; they cost nothing until they are used.
constexpr std::size_t kSlabBytes = std::size_t{64} << 30;

// The bytes of never-written and given-back memory: as a float -2.7e7, as a bf16 the same, as an index far
// out of range.
constexpr unsigned char kPoison = 0xCB;

// Files of the fake have larger numbers than those of programs, so that small descriptors keep their order.
constexpr int kFirstFile = 1000;

// The most bytes of spare files.
constexpr std::size_t kSpareBytes = std::size_t{32} << 20;

// The name of a file of the fake tells an importing process its contents.
constexpr char kFileName[] = "fake_cuda-device-%d-rdma-%d-type-%u";

void* pointer(Address address) {
  return reinterpret_cast<void*>(address);
}

#if defined(__x86_64__)
void set_rights(int key, unsigned rights) {
  if (key >= 0) ::pkey_set(key, rights);
}
#else
void set_rights(int, unsigned) {}
#endif

// Kept for the life of the process: keys are few and a reset does not need another.
int take_protection_key() {
#if defined(__x86_64__)
  static const int key = ::pkey_alloc(0, PKEY_DISABLE_ACCESS);
  return key;
#else
  return -1;
#endif
}

// Atomic: a thread that began before a reset may come to read it while the next start writes it.
std::atomic<int> used_protection_key{-1};

}  // namespace

SpareFiles::~SpareFiles() {
  for (const File& file : files_) {
    ::munmap(file.alias, file.bytes);
    ::close(file.file);
  }
}

bool SpareFiles::put(File file) {
  const std::lock_guard lock(mutex_);
  if (process_ != ::getpid() || bytes_ + file.bytes > kSpareBytes) return false;
  bytes_ += file.bytes;
  files_.push_back(std::move(file));
  return true;
}

std::optional<SpareFiles::File> SpareFiles::take(const std::string& name, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (process_ != ::getpid()) return std::nullopt;
  const auto found = std::find_if(files_.rbegin(), files_.rend(),
                                  [&](const File& file) { return file.bytes == bytes && file.name == name; });
  if (found == files_.rend()) return std::nullopt;
  File result = std::move(*found);
  files_.erase(std::next(found).base());
  bytes_ -= bytes;
  return result;
}

Physical::~Physical() {
  if (charged != nullptr && !imported) *charged -= bytes;
  if (alias != nullptr) {
    if (poison && !imported) fill_with_poison();
    if (poison && !imported && !exported && spares->put({file_name, bytes, file, alias})) return;
    ::munmap(alias, bytes);
  }
  if (file >= 0) ::close(file);
}

void Physical::fill_with_poison() const {
  std::memset(alias, kPoison, bytes);
}

void deny_device_memory_to_this_thread() {
  set_rights(used_protection_key, PKEY_DISABLE_ACCESS);
}

void Memory::configure(const FakeOptions& options) {
  options_ = options;
  charged_.assign(static_cast<std::size_t>(options.device_count), 0);
  peak_charged_ = 0;
  protection_key_ = options.host_access == HostAccess::kDenied ? take_protection_key() : -1;
  used_protection_key = protection_key_;
  windows_ = options.host_access == HostAccess::kWindows ||
             (options.host_access == HostAccess::kDenied && protection_key_ < 0);
}

void Memory::clear() {
  while (!mappings_.empty()) remove_mapping(mappings_.begin()->first);
  chunks_.clear();
  while (!reservations_.empty()) release(reservations_.begin()->first);
}

CuResult Memory::create_physical(int device, std::size_t bytes, const CuMemAllocationProp& properties,
                                 PhysicalPtr* result) {
  std::uint64_t& charged = charged_[static_cast<std::size_t>(device)];
  if (bytes > options_.memory_bytes - charged) return CuResult::kOutOfMemory;
  char name[96];
  std::snprintf(name, sizeof(name), kFileName, device, properties.flags.gpu_direct_rdma_capable,
                static_cast<unsigned>(properties.requested_handle_types));
  auto physical = std::make_shared<Physical>();
  physical->poison = options_.poison;
  physical->file_name = name;
  physical->spares = spares_;
  if (auto spare = options_.poison ? spares_->take(name, bytes) : std::nullopt; spare.has_value()) {
    physical->file = spare->file;
    physical->alias = spare->alias;
  } else {
    const int low = ::memfd_create(name, MFD_CLOEXEC);
    if (low < 0) return CuResult::kOutOfMemory;
    const int high = ::fcntl(low, F_DUPFD_CLOEXEC, kFirstFile);
    physical->file = high >= 0 ? high : low;
    if (high >= 0) ::close(low);
    if (::ftruncate(physical->file, static_cast<off_t>(bytes)) != 0) return CuResult::kOutOfMemory;
    void* const alias = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, physical->file, 0);
    if (alias == MAP_FAILED) return CuResult::kOutOfMemory;
    physical->alias = static_cast<std::byte*>(alias);
    if (options_.poison) std::memset(alias, kPoison, bytes);
  }
  physical->bytes = bytes;
  physical->device = device;
  physical->properties = properties;
  physical->id = next_physical_id_++;
  physical->charged = &charged;
  charged += bytes;
  peak_charged_ =
      std::max(peak_charged_, std::accumulate(charged_.begin(), charged_.end(), std::uint64_t{0}));
  *result = std::move(physical);
  return CuResult::kSuccess;
}

CuResult Memory::import_physical(int file, PhysicalPtr* result) {
  char link[64], name[160] = {};
  std::snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
  if (::readlink(link, name, sizeof(name) - 1) <= 0) return CuResult::kInvalidValue;
  char format[64];
  std::snprintf(format, sizeof(format), "/memfd:%s", kFileName);
  int device = 0, rdma = 0;
  unsigned type = 0;
  struct stat facts {};
  if (std::sscanf(name, format, &device, &rdma, &type) != 3 || ::fstat(file, &facts) != 0 ||
      device >= options_.device_count) {
    return CuResult::kInvalidValue;
  }
  auto physical = std::make_shared<Physical>();
  physical->imported = true;
  physical->file = ::fcntl(file, F_DUPFD_CLOEXEC, kFirstFile);
  if (physical->file < 0) return CuResult::kOutOfMemory;
  physical->bytes = static_cast<std::size_t>(facts.st_size);
  void* const alias = ::mmap(nullptr, physical->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, physical->file, 0);
  if (alias == MAP_FAILED) return CuResult::kOutOfMemory;
  physical->alias = static_cast<std::byte*>(alias);
  physical->device = device;
  physical->id = next_physical_id_++;
  physical->properties.type = CuMemAllocationType::kPinned;
  physical->properties.location = {CuMemLocationType::kDevice, device};
  physical->properties.requested_handle_types = static_cast<CuMemHandleType>(type);
  physical->properties.flags.gpu_direct_rdma_capable = static_cast<unsigned char>(rdma);
  *result = std::move(physical);
  return CuResult::kSuccess;
}

CuResult Memory::reserve(std::size_t bytes, std::size_t alignment, Address hint, bool internal,
                         Address* result) {
  alignment = std::max(alignment, kPageBytes);
  const auto fit = [&](Address begin, std::size_t free_bytes, Address* at) {
    if (hint != 0 && hint % alignment == 0 && hint >= begin && hint + bytes <= begin + free_bytes) {
      *at = hint;
      return true;
    }
    *at = (begin + alignment - 1) / alignment * alignment;
    return *at + bytes <= begin + free_bytes && *at + bytes > *at;
  };
  auto found = free_.end();
  Address at = 0;
  for (auto i = free_.begin(); i != free_.end(); ++i) {
    Address candidate = 0;
    if (!fit(i->first, i->second, &candidate)) continue;
    if (found == free_.end() || candidate == hint) {
      found = i;
      at = candidate;
    }
    if (hint == 0 || candidate == hint) break;
  }
  if (found == free_.end()) {
    const std::size_t slab_bytes = std::max(kSlabBytes, bytes + alignment);
    if (slab_bytes < bytes) return CuResult::kOutOfMemory;
    void* const slab =
        ::mmap(nullptr, slab_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (slab == MAP_FAILED) return CuResult::kOutOfMemory;
    // A page at either end is never handed out: running off a range does not reach the next slab or the host.
    const Address begin = reinterpret_cast<Address>(slab);
    slabs_[begin] = slab_bytes;
    found = free_.emplace(begin + kPageBytes, slab_bytes - 2 * kPageBytes).first;
    if (!fit(found->first, found->second, &at)) return CuResult::kOutOfMemory;
  }
  const auto [free_begin, free_bytes] = *found;
  free_.erase(found);
  if (at > free_begin) free_[free_begin] = at - free_begin;
  if (at + bytes < free_begin + free_bytes) free_[at + bytes] = free_begin + free_bytes - (at + bytes);
  reservations_[at] = {bytes, internal};
  *result = at;
  return CuResult::kSuccess;
}

void Memory::release(Address address) {
  const auto found = reservations_.find(address);
  auto [begin, bytes] = std::pair(found->first, found->second.bytes);
  reservations_.erase(found);
  const auto after = free_.lower_bound(begin);
  if (after != free_.end() && after->first == begin + bytes) {
    bytes += after->second;
    free_.erase(after);
  }
  auto before = free_.lower_bound(begin);
  if (before != free_.begin()) {
    --before;
    if (before->first + before->second == begin) {
      before->second += bytes;
      return;
    }
  }
  free_[begin] = bytes;
}

Reservation* Memory::find_reservation(Address address, std::size_t bytes) {
  auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin()) return nullptr;
  --after;
  if (address + bytes > after->first + after->second.bytes || address + bytes < address) return nullptr;
  return &after->second;
}

int Memory::protection(const Mapping& mapping) const {
  if (mapping.kind != MappingKind::kVirtual) return PROT_READ | PROT_WRITE;
  int result = PROT_NONE;
  for (const CuMemAccessFlags flags : mapping.access) {
    if (flags == CuMemAccessFlags::kRead) result |= PROT_READ;
    if (flags == CuMemAccessFlags::kReadWrite) result |= PROT_READ | PROT_WRITE;
  }
  return result;
}

CuResult Memory::protect(const Mapping& mapping) const {
  int allowed = protection(mapping);
  if (windows_ && open_windows_ == 0) allowed = PROT_NONE;
  void* const begin = pointer(mapping.begin);
#if defined(__x86_64__)
  const int result = protection_key_ >= 0 ? ::pkey_mprotect(begin, mapping.bytes, allowed, protection_key_)
                                          : ::mprotect(begin, mapping.bytes, allowed);
#else
  const int result = ::mprotect(begin, mapping.bytes, allowed);
#endif
  return result == 0 ? CuResult::kSuccess : CuResult::kOutOfMemory;
}

Mapping& Memory::add_mapping(Mapping mapping) {
  const Address begin = mapping.begin;
  return mappings_.insert_or_assign(begin, std::move(mapping)).first->second;
}

CuResult Memory::open(Mapping& mapping) {
  // Kernels may run in an open mapping, when another device gets access to it.
  if (mapping.is_open) return protect(mapping);
  void* const mapped = ::mmap(pointer(mapping.begin), mapping.bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                              mapping.physical->file, 0);
  if (mapped == MAP_FAILED) return CuResult::kOutOfMemory;
  mapping.is_open = true;
  return protect(mapping);
}

void Memory::remove_mapping(Address begin) {
  const auto found = mappings_.find(begin);
  // Should the kernel refuse, the pages stay where the books say there is nothing; nothing else follows from
  // it.
  ::mmap(pointer(begin), found->second.bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  mappings_.erase(found);
}

Mapping* Memory::find(Address address) {
  auto after = mappings_.upper_bound(address);
  if (after == mappings_.begin()) return nullptr;
  --after;
  return address < after->second.end() ? &after->second : nullptr;
}

std::vector<Mapping*> Memory::overlapping(Address begin, std::size_t bytes) {
  std::vector<Mapping*> result;
  auto i = mappings_.upper_bound(begin);
  if (i != mappings_.begin() && std::prev(i)->second.end() > begin) --i;
  for (; i != mappings_.end() && i->first < begin + bytes; ++i) result.push_back(&i->second);
  return result;
}

bool Memory::is_device(Address address) const {
  auto after = slabs_.upper_bound(address);
  if (after == slabs_.begin()) return false;
  --after;
  return address < after->first + after->second;
}

void Memory::enter_kernel() {
  set_rights(protection_key_, 0);
  if (windows_ && open_windows_++ == 0) {
    for (auto& [begin, mapping] : mappings_) protect(mapping);
  }
}

void Memory::leave_kernel() {
  if (windows_ && --open_windows_ == 0) {
    for (auto& [begin, mapping] : mappings_) protect(mapping);
  }
  set_rights(protection_key_, PKEY_DISABLE_ACCESS);
}

}  // namespace forebay::fake_cuda
