#include "allocator/preload/shared_blocks.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "allocator/preload/routes.h"
#include "forebay/descriptor.h"
#include "forebay/log.h"

namespace forebay {
namespace {

using internal::Descriptor;

constexpr std::uint64_t kMagic = 0x3143504959424F46;  // "FOBYIPC1"
constexpr unsigned kPosixDescriptor = 1;
constexpr unsigned kReadWrite = 3;
constexpr unsigned kDeviceLocation = 1;
constexpr unsigned kLazyPeerAccess = 1;
// Descriptors in one message. The system allows 253.
constexpr std::size_t kBatch = 128;
// A process that does not answer for this long counts as dead.
constexpr int kDeadlineSeconds = 10;
// Callers that have not sent their request yet, such as a stopped process. With more, the first one is let
// go.
constexpr std::size_t kMostCallers = 64;
// How long to wait while the process has no free descriptor. Shorter: more processor time. Longer: the
// opening process waits longer.
constexpr long kFullPauseNs = 10'000'000;

// The largest shared block: no device has as much.
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 48;

// The contents of a handle.
struct HandleContent {
  std::uint64_t magic;
  std::uint64_t token;  // A random number that the process drew when it began to share.
  std::uint64_t block;
  std::int32_t process;
};
static_assert(sizeof(HandleContent) <= sizeof(DriverIpcHandle));

struct Request {
  std::uint64_t magic;
  std::uint64_t token;
  std::uint64_t block;
};

struct Reply {
  std::uint64_t magic;
  std::uint64_t is_known;
  std::uint64_t chunk_count;
  std::uint64_t offset;  // The block's beginning in its first chunk.
  std::uint64_t bytes;   // The block's size.
};

// Sent with a batch of descriptors: the sizes of their chunks.
struct Batch {
  std::uint64_t count;
  std::uint64_t bytes[kBatch];
};

// --- sockets ---

// The address of a process's socket. It is abstract, not a file, so nothing is left when the process is
// killed.
socklen_t address_of(std::int32_t process, std::uint64_t token, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  const int length =
      std::snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "forebay-ipc-%d-%016llx",
                    static_cast<int>(process), static_cast<unsigned long long>(token));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(length));
}

// Whether the descriptor is still that of the process's socket.
bool is_bound_to(int socket, std::uint64_t token, std::int32_t process) {
  sockaddr_un expected, found{};
  const socklen_t length = address_of(process, token, &expected);
  socklen_t found_length = sizeof found;
  return ::getsockname(socket, reinterpret_cast<sockaddr*>(&found), &found_length) == 0 &&
         found_length == length && std::memcmp(&found, &expected, length) == 0;
}

// Whether the peer is the same user or root. A process of another user gets nothing, even with the right
// token, and gives nothing: the address of a process that has ended can be taken by anyone.
bool is_welcome(int socket) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
         (peer.uid == ::getuid() || peer.uid == 0);
}

void set_deadline(int socket) {
  const timeval limit{.tv_sec = kDeadlineSeconds, .tv_usec = 0};
  (void)::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  (void)::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

// While the process has no free descriptor, the peer waits, up to its deadline, for the program to close
// some.
void wait_for_descriptors() {
  const timespec pause{.tv_sec = 0, .tv_nsec = kFullPauseNs};
  (void)::nanosleep(&pause, nullptr);
}

bool has_hung_up(int socket) {
  pollfd peer{.fd = socket, .events = 0, .revents = 0};
  return ::poll(&peer, 1, 0) > 0;
}

bool send_with(int socket, const void* data, std::size_t bytes, const int* descriptors, std::size_t count) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kBatch)] = {};
  iovec part{const_cast<void*>(data), bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (count > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * count);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * count);
    std::memcpy(CMSG_DATA(header), descriptors, sizeof(int) * count);
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(kDeadlineSeconds);
  for (;;) {
    const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
    if (sent >= 0) return sent == static_cast<ssize_t>(bytes);
    // The system bounds the descriptors that a user's processes have sent and nobody has received yet.
    if (errno == ETOOMANYREFS && std::chrono::steady_clock::now() < end && !has_hung_up(socket)) {
      wait_for_descriptors();
    } else if (errno != EINTR) {
      return false;
    }
  }
}

// The caller owns the received descriptors, even if it returns false.
bool receive_with(int socket, void* data, std::size_t bytes, std::vector<Descriptor>* descriptors) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kBatch)] = {};
  iovec part{data, bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t received = -1;
  do {
    received = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); received >= 0 && header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int value = -1;
      std::memcpy(&value, CMSG_DATA(header) + i * sizeof(int), sizeof value);
      descriptors->emplace_back(value);
    }
  }
  return received == static_cast<ssize_t>(bytes) && (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0;
}

// --- blocks that this process shares ---

struct SharedChunk {
  DriverMemory memory;
  std::size_t bytes;
};

// Keeps its chunks, also when the arena is gone.
struct SharedBlock {
  SharedBlock() = default;
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;
  ~SharedBlock() {
    for (const SharedChunk& chunk : chunks) (void)preload_state().used.cuMemRelease(chunk.memory);
  }

  int device = -1;
  std::uint64_t generation = 0;  // The arena's.
  DevicePtr begin = nullptr;
  std::size_t bytes = 0;
  std::size_t offset = 0;
  std::vector<SharedChunk> chunks;
};

class Sharing {
 public:
  // Zero if it cannot be shared.
  std::uint64_t share(const ProcessArenas::Use& use, DevicePtr begin, std::size_t bytes);
  // Releases the blocks for which `condition` is true. Their handles cannot be opened any more.
  template <typename Condition>
  void forget(Condition condition);
  std::uint64_t token();
  void serve();

 private:
  using Blocks =
      std::map<std::uint64_t, std::shared_ptr<const SharedBlock>>;  // Also owned by the thread that answers.

  bool listen();
  void answer(int socket);
  bool accept_caller(int listener, std::vector<Descriptor>* callers);

  std::mutex mutex_;
  // Guarded by mutex_.
  Descriptor listener_;
  std::uint64_t token_ = 0;
  Blocks blocks_;
  std::uint64_t next_block_ = 1;
};

Sharing& sharing() {
  static auto* const instance = new Sharing;
  return *instance;
}

// A child without exec answers nobody. If it kept the socket, callers would wait for it when this process is
// gone.
constinit std::atomic<int> listening{-1};
constinit std::atomic<std::uint64_t> listening_token{0};
constinit std::atomic<std::int32_t> listening_process{0};

void stop_listening_in_child() {
  // The program may have closed it, and another file may have the number.
  const int listener = listening.exchange(-1);
  if (listener >= 0 && is_bound_to(listener, listening_token, listening_process)) ::close(listener);
}

void* serve_until_the_end(void*) {
  sharing().serve();
  return nullptr;
}

// Requires: mutex_ is held.
bool Sharing::listen() {
  if (listener_.valid()) return true;
  std::uint64_t token = 0;
  const Descriptor random(::open("/dev/urandom", O_RDONLY | O_CLOEXEC));
  if (!random.valid() || ::read(random.number(), &token, sizeof token) != static_cast<ssize_t>(sizeof token))
    return false;
  Descriptor listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address;
  const socklen_t length = address_of(static_cast<std::int32_t>(::getpid()), token, &address);
  if (!listener.valid() || ::bind(listener.number(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::listen(listener.number(), SOMAXCONN) != 0) {
    return false;
  }
  // Signals are left to the program's own threads.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  static const int has_handler = ::pthread_atfork(nullptr, nullptr, &stop_listening_in_child);
  static_cast<void>(has_handler);
  token_ = token;
  listener_ = std::move(listener);
  listening_token = token;
  listening_process = static_cast<std::int32_t>(::getpid());
  listening = listener_.number();
  pthread_t thread;
  const bool started = ::pthread_create(&thread, nullptr, &serve_until_the_end, nullptr) == 0;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!started) {
    listening = -1;
    listener_.reset();
    return false;
  }
  (void)::pthread_setname_np(thread, "forebay-ipc");
  (void)::pthread_detach(thread);
  return true;
}

std::uint64_t Sharing::token() {
  const std::lock_guard lock(mutex_);
  return token_;
}

// Lists the chunks behind the block in the order of addresses.
bool find_chunks(SharedBlock* block) {
  const PreloadState& state = preload_state();
  if (state.real.cuMemGetAddressRange_v2 == nullptr || state.real.cuMemRetainAllocationHandle == nullptr ||
      state.used.cuMemExportToShareableHandle == nullptr) {
    return false;
  }
  DevicePtr next = block->begin;
  while (next < block->begin + block->bytes) {
    DriverAddress base = 0;
    SharedChunk chunk{};
    if (state.real.cuMemGetAddressRange_v2(&base, &chunk.bytes, driver_address(next)) != kDriverSuccess ||
        state.real.cuMemRetainAllocationHandle(&chunk.memory, next) != kDriverSuccess) {
      return false;
    }
    if (block->chunks.empty()) block->offset = static_cast<std::size_t>(driver_address(next) - base);
    block->chunks.push_back(chunk);
    next = device_pointer(base) + chunk.bytes;
  }
  return true;
}

std::uint64_t Sharing::share(const ProcessArenas::Use& use, DevicePtr begin, std::size_t bytes) {
  auto block = std::make_shared<SharedBlock>();
  block->device = use.device();
  block->generation = use.generation();
  block->begin = begin;
  block->bytes = bytes;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, known] : blocks_) {
      // A later arena may have another block there.
      if (known->begin == begin && known->bytes == bytes && known->device == block->device &&
          known->generation == block->generation)
        return number;
    }
    if (!listen()) return 0;
  }
  if (!find_chunks(block.get())) return 0;
  const std::lock_guard lock(mutex_);
  const std::uint64_t number = next_block_++;
  blocks_.emplace(number, std::move(block));
  return number;
}

template <typename Condition>
void Sharing::forget(Condition condition) {
  Blocks gone;  // Released without the mutex.
  const std::lock_guard lock(mutex_);
  for (auto i = blocks_.begin(); i != blocks_.end();) {
    const auto block = i++;
    if (condition(*block->second)) gone.insert(blocks_.extract(block));
  }
}

bool is_table_full(int descriptor) {
  const Descriptor copy(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
  return !copy.valid() && (errno == EMFILE || errno == ENFILE);
}

// A descriptor for the chunk. -1: there is none, or the peer has gone. The driver does not say when
// descriptors are missing.
int export_chunk(int socket, const SharedChunk& chunk) {
  // A descriptor may have become free meanwhile.
  for (int failures_with_room = 0; failures_with_room < 2;) {
    int descriptor = -1;
    if (preload_state().used.cuMemExportToShareableHandle(&descriptor, chunk.memory, kPosixDescriptor, 0) ==
        kDriverSuccess) {
      return descriptor;
    }
    if (!is_table_full(socket)) {
      ++failures_with_room;
    } else if (has_hung_up(socket)) {
      break;
    } else {
      wait_for_descriptors();
    }
  }
  return -1;
}

void Sharing::answer(int socket) {
  Request request{};
  std::vector<Descriptor> unwanted;
  if (!is_welcome(socket) || !receive_with(socket, &request, sizeof request, &unwanted) ||
      request.magic != kMagic)
    return;
  std::shared_ptr<const SharedBlock> block;
  {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(request.block);
    if (request.token == token_ && found != blocks_.end()) block = found->second;
  }
  Reply reply{
      .magic = kMagic, .is_known = block != nullptr ? 1u : 0u, .chunk_count = 0, .offset = 0, .bytes = 0};
  if (block != nullptr) {
    reply.chunk_count = block->chunks.size();
    reply.offset = block->offset;
    reply.bytes = block->bytes;
  }
  if (!send_with(socket, &reply, sizeof reply, nullptr, 0) || block == nullptr) return;
  for (std::size_t first = 0; first < block->chunks.size(); first += kBatch) {
    Batch batch{};
    batch.count = std::min(kBatch, block->chunks.size() - first);
    std::vector<Descriptor> descriptors;
    int numbers[kBatch];
    for (std::size_t i = 0; i < batch.count; ++i) {
      const SharedChunk& chunk = block->chunks[first + i];
      batch.bytes[i] = chunk.bytes;
      const int descriptor = export_chunk(socket, chunk);
      if (descriptor < 0) return;  // The peer sees the connection end.
      descriptors.emplace_back(descriptor);
      numbers[i] = descriptor;
    }
    if (!send_with(socket, &batch, sizeof batch, numbers, batch.count)) return;
  }
}

void Sharing::serve() {
  int listener = -1;
  {
    const std::lock_guard lock(mutex_);
    listener = listener_.number();
  }
  std::vector<Descriptor> callers;
  callers.reserve(kMostCallers);
  // The program may have closed all descriptors, and another file may have the number. Handles made from then
  // on cannot be opened.
  while (is_bound_to(listener, token(), static_cast<std::int32_t>(::getpid()))) {
    std::array<pollfd, kMostCallers + 1> waiting{};
    waiting[0] = {.fd = listener, .events = POLLIN, .revents = 0};
    for (std::size_t i = 0; i < callers.size(); ++i)
      waiting[i + 1] = {.fd = callers[i].number(), .events = POLLIN, .revents = 0};
    if (::poll(waiting.data(), callers.size() + 1, -1) < 0) {
      if (errno != EINTR) wait_for_descriptors();
      continue;
    }
    if (!is_bound_to(listener, token(), static_cast<std::int32_t>(::getpid()))) break;
    // From the last on, because the answered ones are taken out.
    for (std::size_t i = callers.size(); i > 0; --i) {
      if (waiting[i].revents == 0) continue;
      answer(callers[i - 1].number());
      callers.erase(callers.begin() + static_cast<std::ptrdiff_t>(i - 1));
    }
    if (waiting[0].revents != 0 && !accept_caller(listener, &callers)) break;
  }
  // They may be the program's files by now.
  for (Descriptor& caller : callers) (void)caller.release();
}

// False: no caller can come any more.
bool Sharing::accept_caller(int listener, std::vector<Descriptor>* callers) {
  Descriptor socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (socket.valid()) {
    set_deadline(socket.number());
    if (callers->size() == kMostCallers) callers->erase(callers->begin());
    callers->push_back(std::move(socket));
    return true;
  }
  if (errno == EINTR || errno == ECONNABORTED) return true;
  if (errno != EMFILE && errno != ENFILE) return false;
  wait_for_descriptors();
  return true;
}

// --- blocks that this process has opened ---

struct OpenedKey {
  std::int32_t process;
  std::uint64_t token;
  std::uint64_t block;
  DriverContext context;
  friend auto operator<=>(const OpenedKey&, const OpenedKey&) = default;
};

struct OpenedBlock {
  OpenedKey key;
  DriverAddress base = 0;
  std::size_t reserved_bytes = 0;
  std::vector<std::size_t> mapped;  // The chunks' sizes, side by side from `base`.
  OpenedRange range;
  std::size_t count = 0;
  DriverContext closing = nullptr;  // The one that was current when it was closed.
};

struct Opened {
  std::atomic<std::size_t> block_count{0};
  std::mutex mutex;
  // Guarded by mutex.
  std::map<DriverAddress, OpenedBlock> blocks;  // By the begin of the range.
  std::map<OpenedKey, DriverAddress> addresses;
  std::uint64_t last_id = std::uint64_t{3} << 62;  // Blocks of the arena have lower ones.

  using Place = std::map<DriverAddress, OpenedBlock>::iterator;
  // Requires: mutex is held.
  OpenedBlock take(Place place) {
    OpenedBlock taken = std::move(place->second);
    addresses.erase(taken.key);
    blocks.erase(place);
    block_count = blocks.size();
    return taken;
  }
};

Opened& opened() {
  static auto* const instance = new Opened;
  return *instance;
}

// Closed during a capture.
SharedList<OpenedBlock>& waiting_closes() {
  return SharedList<OpenedBlock>::of_process();
}

void unmap(const OpenedBlock& block) {
  const UsedCalls& used = preload_state().used;
  DriverAddress next = block.base;
  for (const std::size_t bytes : block.mapped) {
    (void)used.cuMemUnmap(next, bytes);
    next += bytes;
  }
  if (block.reserved_bytes != 0) (void)used.cuMemAddressFree(block.base, block.reserved_bytes);
}

struct Arriving {
  std::vector<DriverMemory> memories;
  std::vector<std::size_t> bytes;
  ~Arriving() {
    for (const DriverMemory memory : memories) (void)preload_state().used.cuMemRelease(memory);
  }
};

// Gets the chunks from the sharing process. False: it is gone, does not know the block, or breaks off.
bool fetch_chunks(const HandleContent& content, Reply* reply, Arriving* arriving) {
  const Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address;
  const socklen_t length = address_of(content.process, content.token, &address);
  if (!socket.valid()) return false;
  set_deadline(socket.number());
  int connected = -1;
  do {
    connected = ::connect(socket.number(), reinterpret_cast<sockaddr*>(&address), length);
  } while (connected != 0 && errno == EINTR);
  if (connected != 0 || !is_welcome(socket.number())) return false;
  const Request request{.magic = kMagic, .token = content.token, .block = content.block};
  std::vector<Descriptor> descriptors;
  if (!send_with(socket.number(), &request, sizeof request, nullptr, 0) ||
      !receive_with(socket.number(), reply, sizeof *reply, &descriptors) || reply->magic != kMagic ||
      reply->is_known == 0) {
    return false;
  }
  std::uint64_t total = 0;
  while (arriving->bytes.size() < reply->chunk_count) {
    Batch batch{};
    descriptors.clear();
    if (!receive_with(socket.number(), &batch, sizeof batch, &descriptors) || batch.count == 0 ||
        batch.count > kBatch || descriptors.size() != batch.count) {
      return false;
    }
    for (std::size_t i = 0; i < batch.count; ++i) {
      DriverMemory memory = 0;
      void* const os_handle = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptors[i].number()));
      if (preload_state().used.cuMemImportFromShareableHandle(&memory, os_handle, kPosixDescriptor) !=
          kDriverSuccess) {
        return false;
      }
      arriving->memories.push_back(memory);
      arriving->bytes.push_back(batch.bytes[i]);
      if (batch.bytes[i] > kMostBytes - total) return false;
      total += batch.bytes[i];
    }
  }
  return reply->offset < total && reply->bytes <= total - reply->offset;
}

DriverResult map_chunks(const Arriving& arriving, DriverDevice device, OpenedBlock* block) {
  const UsedCalls& used = preload_state().used;
  std::size_t total = 0;
  for (const std::size_t bytes : arriving.bytes) total += bytes;
  DriverResult result = used.cuMemAddressReserve(&block->base, total, 0, 0, 0);
  if (result != kDriverSuccess) return result;
  block->reserved_bytes = total;
  DriverAddress next = block->base;
  for (std::size_t i = 0; i < arriving.bytes.size(); ++i) {
    result = used.cuMemMap(next, arriving.bytes[i], 0, arriving.memories[i], 0);
    if (result != kDriverSuccess) return result;
    block->mapped.push_back(arriving.bytes[i]);
    next += arriving.bytes[i];
  }
  std::vector<DriverAccess> access{
      {.location = {.type = kDeviceLocation, .id = device}, .flags = kReadWrite}};
  int count = 0;
  if (used.cuDeviceGetCount != nullptr && used.cuDeviceCanAccessPeer != nullptr)
    (void)used.cuDeviceGetCount(&count);
  for (DriverDevice peer = 0; peer < count; ++peer) {
    unsigned flags = 0;
    int is_used = 0, can_access = 0;
    if (peer == device || used.cuDevicePrimaryCtxGetState(peer, &flags, &is_used) != kDriverSuccess ||
        is_used == 0 || used.cuDeviceCanAccessPeer(&can_access, peer, device) != kDriverSuccess ||
        can_access == 0) {
      continue;
    }
    access.push_back({.location = {.type = kDeviceLocation, .id = peer}, .flags = kReadWrite});
  }
  return used.cuMemSetAccess(block->base, total, access.data(), access.size());
}

HandleContent content_of(const DriverIpcHandle& handle) {
  HandleContent content;
  std::memcpy(&content, handle.bytes, sizeof content);
  return content;
}

}  // namespace

bool share_block(const ProcessArenas::Use& use, DevicePtr begin, std::size_t bytes, DriverIpcHandle* handle) {
  if (!use.backend().chunks_have_posix_fd()) return false;
  ProcessArenas::of_process().blocks().pin(begin, bytes, KnownOutside::kShared);
  const std::uint64_t block = sharing().share(use, begin, bytes);
  if (block == 0) return false;
  const HandleContent content{.magic = kMagic,
                              .token = sharing().token(),
                              .block = block,
                              .process = static_cast<std::int32_t>(::getpid())};
  *handle = {};
  std::memcpy(handle->bytes, &content, sizeof content);
  return true;
}

void forget_shared_blocks(int device, std::uint64_t generation) {
  sharing().forget(
      [=](const SharedBlock& block) { return block.device == device && block.generation == generation; });
}

void forget_shared_block(DevicePtr begin) {
  sharing().forget([=](const SharedBlock& block) { return block.begin == begin; });
}

bool is_shared_handle(const DriverIpcHandle& handle) {
  return content_of(handle).magic == kMagic;
}

DriverResult open_shared_block(const DriverIpcHandle& handle, unsigned flags, DriverAddress* address) {
  const HandleContent content = content_of(handle);
  DriverDevice device = 0;
  if (address == nullptr || (flags & ~kLazyPeerAccess) != 0) return kDriverInvalidValue;
  if (const DriverResult result = preload_state().used.cuCtxGetDevice(&device); result != kDriverSuccess)
    return result;
  // As with the driver, a process cannot open its own handles.
  if (content.process == static_cast<std::int32_t>(::getpid())) return kDriverInvalidContext;
  DriverContext context = nullptr;
  if (const DriverResult result = preload_state().used.cuCtxGetCurrent(&context); result != kDriverSuccess)
    return result;
  const OpenedKey key{content.process, content.token, content.block, context};
  Opened& all = opened();
  // Counts one more opening, if there is one.
  const auto open_again = [&] {
    const auto known = all.addresses.find(key);
    if (known == all.addresses.end()) return false;
    ++all.blocks[known->second].count;
    *address = known->second;
    return true;
  };
  {
    const std::lock_guard lock(all.mutex);
    if (open_again()) return kDriverSuccess;
  }
  Reply reply{};
  Arriving arriving;
  if (!fetch_chunks(content, &reply, &arriving)) return kDriverInvalidValue;
  OpenedBlock block;
  if (const DriverResult result = map_chunks(arriving, device, &block); result != kDriverSuccess) {
    unmap(block);
    return result == kDriverOutOfMemory ? result : static_cast<DriverResult>(kDriverMapFailed);
  }
  block.key = key;
  block.range = {.begin = block.base + reply.offset, .bytes = reply.bytes, .context = context};
  block.count = 1;
  {
    const std::lock_guard lock(all.mutex);
    if (!open_again()) {
      *address = block.range.begin;
      block.range.id = ++all.last_id;
      all.addresses.emplace(key, *address);
      all.blocks.emplace(*address, std::move(block));
      all.block_count = all.blocks.size();
      return kDriverSuccess;
    }
  }
  unmap(block);  // Another thread was faster.
  return kDriverSuccess;
}

bool find_opened_block(DriverAddress address, OpenedRange* range) {
  Opened& all = opened();
  if (all.block_count == 0) return false;
  const std::lock_guard lock(all.mutex);
  const auto after = all.blocks.upper_bound(address);
  if (after == all.blocks.begin()) return false;
  *range = std::prev(after)->second.range;
  return address - range->begin < range->bytes;
}

void forget_opened_blocks(DriverContext context) {
  Opened& all = opened();
  std::vector<OpenedBlock> gone;
  {
    const std::lock_guard lock(all.mutex);
    for (auto i = all.blocks.begin(); i != all.blocks.end();) {
      const auto place = i++;
      if (place->second.range.context == context) gone.push_back(all.take(place));
    }
  }
  for (const OpenedBlock& block : gone) unmap(block);
  for (const OpenedBlock& block :
       waiting_closes().take([=](const OpenedBlock& closed) { return closed.range.context == context; }))
    unmap(block);
}

bool close_shared_block(DriverAddress address, DriverResult* result) {
  Opened& all = opened();
  OpenedBlock last;
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.blocks.find(address);
    if (found == all.blocks.end()) return false;
    *result = kDriverSuccess;
    if (--found->second.count > 0) return true;
    last = all.take(found);
  }
  // Unmapping does not wait for queued work, so wait here.
  last.closing = current_context();
  *result = wait_for_users(last.range.context, last.closing);
  if (!is_captured_error(*result)) {
    unmap(last);
    return true;
  }
  *result = kDriverSuccess;
  std::list<OpenedBlock> closed;
  closed.push_back(std::move(last));
  waiting_closes().add(std::move(closed));
  return true;
}

void finish_waiting_closes() {
  if (waiting_closes().size() == 0 || any_capture()) return;
  auto closed = waiting_closes().take([](const OpenedBlock&) { return true; });
  for (; !closed.empty(); closed.pop_front()) {
    const OpenedBlock& block = closed.front();
    if (is_captured_error(wait_for_users(block.range.context, block.closing))) break;
    unmap(block);
  }
  waiting_closes().add(std::move(closed));
}

void forget_closing_user(DriverContext context) {
  waiting_closes().visit([=](OpenedBlock& block) {
    if (block.closing == context) block.closing = nullptr;
  });
}

}  // namespace forebay
