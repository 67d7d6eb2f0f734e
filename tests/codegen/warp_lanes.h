/* The words of CUDA that templates/warp.cuh is written in, for CPU threads: each lane of one block is a thread, so that
 * the device's own header runs, and a thread sanitizer sees lanes that do not wait for each other. */
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define asm(...) ((void)0) /* conversions of halves: not here */

struct dt_dim { unsigned x; };
static thread_local dt_dim threadIdx;
static dt_dim blockIdx, blockDim, gridDim = {1};
static pthread_barrier_t dt_barriers[8];
static float dt_boxes[8][32];

static void dt_meet(void) { pthread_barrier_wait(&dt_barriers[threadIdx.x / 32]); }
static inline void __syncwarp(void) {
#ifndef DT_LANES_APART
  dt_meet();
#endif
}
static inline float dt_exchange(float x, unsigned from) {
  float *box = dt_boxes[threadIdx.x / 32], result;
  box[threadIdx.x % 32] = x;
  dt_meet();
  result = box[from];
  dt_meet();
  return result;
}
static inline float __shfl_sync(unsigned, float x, int lane) { return dt_exchange(x, lane); }
static inline float __shfl_down_sync(unsigned, float x, int by) {
  unsigned from = threadIdx.x % 32 + by;
  return dt_exchange(x, from < 32 ? from : threadIdx.x % 32);
}

template <class To, class From> static inline To dt_cast_bits(From from) {
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
static inline float __uint_as_float(uint32_t x) { return dt_cast_bits<float>(x); }
static inline float __int_as_float(int32_t x) { return dt_cast_bits<float>(x); }
static inline uint32_t __float_as_uint(float x) { return dt_cast_bits<uint32_t>(x); }
static inline int32_t __float_as_int(float x) { return dt_cast_bits<int32_t>(x); }
static inline int32_t __float2int_rn(float x) { return (int32_t)std::rint(x); }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
