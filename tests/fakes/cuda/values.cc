// Waits of a stream for a 32-bit value in memory, which the host or another stream writes, and writes of one.
#include <utility>

#include "tests/fakes/cuda/driver.h"

namespace forebay::fake_cuda {
namespace {

// The word at the address: pinned host memory, or memory that the context's device can use.
// Errors: kInvalidValue.
CuResult find_word(const Context& context, CuDevicePtr address, bool write, std::vector<Piece>* word) {
  const auto begin = static_cast<Address>(address);
  if (begin == 0 || begin % sizeof(std::uint32_t) != 0) return CuResult::kInvalidValue;
  if (driver().memory.is_device(begin)) return resolve(context, begin, sizeof(std::uint32_t), write, word);
  if (!is_mapped(begin, sizeof(std::uint32_t))) return CuResult::kInvalidValue;
  word->push_back({nullptr, reinterpret_cast<std::byte*>(begin), sizeof(std::uint32_t)});
  return CuResult::kSuccess;
}

std::uint32_t* word_of(const Piece& piece) {
  return reinterpret_cast<std::uint32_t*>(piece.alias);
}

// Queues the operation that `make` makes of the word. `last_flags`: the highest valid flags.
template <typename Make>
CuResult queue(const char* what, CuStream handle, CuDevicePtr address, bool write, unsigned flags,
               unsigned last_flags, Make make) {
  const Lock lock(driver().mutex);
  StreamPtr stream;
  CuResult result = find_stream(handle, &stream);
  if (result != CuResult::kSuccess) return result;
  std::vector<Piece> word;
  result = flags > last_flags ? CuResult::kInvalidValue : find_word(*stream->context, address, write, &word);
  if (result != CuResult::kSuccess) return result;
  Operation operation;
  operation.what = what;
  operation.touches.push_back({static_cast<Address>(address), static_cast<Address>(address) + 4});
  make(operation, word.front());
  return enqueue(stream, std::move(operation));
}

}  // namespace

CuResult cuStreamWaitValue32_v2(CuStream stream, CuDevicePtr address, std::uint32_t value, unsigned flags) {
  return queue("cuStreamWaitValue32", stream, address, false, flags, kWaitValueAnd,
               [value, flags](Operation& operation, const Piece& piece) {
                 operation.ready = [piece, value, flags] {
                   const std::uint32_t found = __atomic_load_n(word_of(piece), __ATOMIC_ACQUIRE);
                   if (flags == kWaitValueEq) return found == value;
                   if (flags == kWaitValueAnd) return (found & value) != 0;
                   return static_cast<std::int32_t>(found - value) >= 0;
                 };
               });
}

CuResult cuStreamWriteValue32_v2(CuStream stream, CuDevicePtr address, std::uint32_t value, unsigned flags) {
  return queue("cuStreamWriteValue32", stream, address, true, flags, kWriteValueNoMemoryBarrier,
               [value](Operation& operation, const Piece& piece) {
                 operation.run = [piece, value](Lock&) {
                   __atomic_store_n(word_of(piece), value, __ATOMIC_RELEASE);
                   return CuResult::kSuccess;
                 };
               });
}

}  // namespace forebay::fake_cuda
