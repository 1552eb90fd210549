// Linked with NVIDIA's static runtime, as programs built by nvcc are.
#include <cstdio>

extern "C" int cudaGetDeviceCount(int*);
extern "C" int cudaMalloc(void**, std::size_t);

int main() {
  int count = 0;
  void* address = nullptr;
  std::printf("cudaGetDeviceCount %d, ", cudaGetDeviceCount(&count));
  std::printf("cudaMalloc %d\n", cudaMalloc(&address, 4096));
  return 0;
}
