// FOREBAY_DEVICE marks a function that nvcc compiles for the device too.
#pragma once

#ifdef __CUDACC__
#define FOREBAY_DEVICE __host__ __device__
#else
#define FOREBAY_DEVICE
#endif
