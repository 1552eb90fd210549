// A program written on the runtime API, as users write them; it knows nothing of a fake. It prints its
// findings, one line each, and ends with 0 when all was as it should be.
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/fakes/cudart/fake_cudart.h"

namespace {

#define CHECK_CUDA(call)                                                   \
  do {                                                                     \
    const cudaError_t result = (call);                                     \
    if (result != cudaSuccess) {                                           \
      std::printf("%s: %d %s\n", #call, result, cudaGetErrorName(result)); \
      return 1;                                                            \
    }                                                                      \
  } while (false)

constexpr std::size_t kBytes = 1 << 20;

int copy_through_streams() {
  cudaStream_t first = nullptr, second = nullptr;
  cudaEvent_t event = nullptr;
  void *pinned = nullptr, *plain = nullptr, *ordered = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
  CHECK_CUDA(cudaStreamCreate(&second));
  CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  CHECK_CUDA(cudaMallocHost(&pinned, kBytes));
  CHECK_CUDA(cudaMalloc(&plain, kBytes));
  CHECK_CUDA(cudaMallocAsync(&ordered, kBytes, second));
  std::memset(pinned, 0x5A, kBytes);
  CHECK_CUDA(cudaMemcpyAsync(plain, pinned, kBytes, cudaMemcpyHostToDevice, first));
  CHECK_CUDA(cudaEventRecord(event, first));
  CHECK_CUDA(cudaStreamWaitEvent(second, event, 0));
  CHECK_CUDA(cudaMemcpyAsync(ordered, plain, kBytes, cudaMemcpyDeviceToDevice, second));
  CHECK_CUDA(cudaStreamSynchronize(second));
  std::vector<unsigned char> back(kBytes);
  CHECK_CUDA(cudaMemcpy(back.data(), ordered, kBytes, cudaMemcpyDeviceToHost));
  for (const unsigned char byte : back) {
    if (byte != 0x5A) return 1;
  }
  CHECK_CUDA(cudaFreeAsync(ordered, second));
  CHECK_CUDA(cudaFree(plain));
  CHECK_CUDA(cudaFreeHost(pinned));
  CHECK_CUDA(cudaEventDestroy(event));
  CHECK_CUDA(cudaStreamDestroy(first));
  CHECK_CUDA(cudaStreamDestroy(second));
  return 0;
}

// As a program compiled for per-thread default streams calls it.
int allocate_on_the_thread_stream() {
  void* address = nullptr;
  unsigned char byte = 0;
  CHECK_CUDA(cudaMallocAsync_ptsz(&address, kBytes, nullptr));
  CHECK_CUDA(cudaMemcpyAsync_ptsz(address, "\x17", 1, cudaMemcpyHostToDevice, nullptr));
  CHECK_CUDA(cudaMemcpyAsync_ptsz(&byte, address, 1, cudaMemcpyDeviceToHost, nullptr));
  CHECK_CUDA(cudaStreamSynchronize_ptsz(nullptr));
  CHECK_CUDA(cudaFreeAsync_ptsz(address, nullptr));
  return byte == 0x17 ? 0 : 1;
}

int errors_are_kept_until_asked_for() {
  void* address = nullptr;
  const cudaError_t refused = cudaMalloc(&address, std::size_t{1} << 50);
  std::printf("too much: %s\n", cudaGetErrorName(refused));
  if (refused != cudaErrorMemoryAllocation || cudaPeekAtLastError() != refused) return 1;
  return cudaGetLastError() == refused && cudaGetLastError() == cudaSuccess ? 0 : 1;
}

}  // namespace

int main() {
  int count = 0, version = 0, here = -1;
  const cudaError_t started = cudaGetDeviceCount(&count);
  if (started != cudaSuccess) {
    std::printf("no driver: %d %s\n", started, cudaGetErrorName(started));
    return 2;
  }
  CHECK_CUDA(cudaDriverGetVersion(&version));
  CHECK_CUDA(cudaSetDevice(count - 1));
  CHECK_CUDA(cudaGetDevice(&here));
  void* function = nullptr;
  int status = -1;
  CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuMemAlloc", &function, 13000, 0, &status));
  std::printf("devices %d, driver %d, on %d, entry point %s\n", count, version, here,
              function != nullptr ? "yes" : "no");
  int worse = 0;
  worse |= copy_through_streams();
  worse |= allocate_on_the_thread_stream();
  worse |= errors_are_kept_until_asked_for();
  // A new thread begins on device 0 and without a context.
  std::thread([&] { worse |= copy_through_streams(); }).join();
  std::size_t free = 0, total = 0;
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK_CUDA(cudaMemGetInfo(&free, &total));
  std::printf("free %zu of %zu\n", free, total);
  CHECK_CUDA(cudaDeviceReset());
  return worse;
}
