/* What a warp does for a kernel: a vector is one value in each of its 32 lanes; scalars, pointers and branches are alike
 * in all of them. Lanes meet around every store: what one lane wrote, the others may read next, and what the others have
 * still to read, no lane overwrites. -DDT_WARP_HEADER names another implementation, such as one of plain C++. */
#ifdef DT_WARP_HEADER
#include DT_WARP_HEADER
#else

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
#else
#include <math.h>
#include <stdint.h>
#endif
#pragma nv_diag_suppress 177 /* no kernel needs every function here */
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

typedef float dt_f32x32;
typedef int32_t dt_i32x32;

#define DT_DEVICE __device__ __forceinline__
#define DT_ENTRY(warps) extern "C" __global__ void __launch_bounds__(32 * (warps), 2)
/* An array of the warp's own, in shared memory. */
#define DT_LOCAL(type, name, count, warps)          \
  __shared__ __align__(64) type name##_of[warps][count]; \
  type* const name = name##_of[threadIdx.x / 32]

static DT_DEVICE int dt_lane(void) { return threadIdx.x % 32; }
static DT_DEVICE int64_t dt_warp(void) { return ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32; }
static DT_DEVICE int64_t dt_warps(void) { return (int64_t)gridDim.x * (blockDim.x / 32); }

static DT_DEVICE float dt_f32_of_bits(uint32_t bits) { return __uint_as_float(bits); }
static DT_DEVICE uint32_t dt_bits_of_f32(float x) { return __float_as_uint(x); }

static DT_DEVICE float dt_f32_of_f16(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

static DT_DEVICE uint16_t dt_narrow_f16(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

/* To nearest even; NaN becomes 0x7fc0. */
static DT_DEVICE uint16_t dt_narrow_bf16(float x) {
  uint32_t bits = __float_as_uint(x);
  return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static DT_DEVICE float dt_widen_bf16(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }
static DT_DEVICE float dt_same(float x) { return x; }
static DT_DEVICE int32_t dt_same(int32_t x) { return x; }

#define DT_STORE(element, type, value_type, narrow)                      \
  static DT_DEVICE void dt_store_##element(type* p, value_type x) {      \
    __syncwarp();                                                        \
    if (dt_lane() == 0) {                                                \
      p[0] = narrow(x);                                                  \
    }                                                                    \
    __syncwarp();                                                        \
  }

DT_STORE(f32, float, float, )
DT_STORE(f64, double, double, )
DT_STORE(i32, int32_t, int32_t, )
DT_STORE(i64, int64_t, int64_t, )
DT_STORE(u8, uint8_t, uint8_t, )
DT_STORE(i8, int8_t, int8_t, )
DT_STORE(i16, int16_t, int16_t, )
DT_STORE(u16, uint16_t, uint16_t, )
DT_STORE(u32, uint32_t, uint32_t, )
DT_STORE(u64, uint64_t, uint64_t, )
DT_STORE(bf16, uint16_t, float, dt_narrow_bf16)
DT_STORE(f16, uint16_t, float, dt_narrow_f16)

#define DT_MEMORY(element, type, vector, widen, narrow)                                 \
  static DT_DEVICE vector dt_vload_##element(const type* p) { return widen(p[dt_lane()]); } \
  static DT_DEVICE vector dt_vload_n_##element(const type* p, int64_t n) {              \
    return dt_lane() < n ? widen(p[dt_lane()]) : 0;                                     \
  }                                                                                     \
  static DT_DEVICE void dt_vstore_n_##element(type* p, vector v, int64_t n) {           \
    __syncwarp();                                                                       \
    if (dt_lane() < n) {                                                                \
      p[dt_lane()] = narrow(v);                                                         \
    }                                                                                   \
    __syncwarp();                                                                       \
  }                                                                                     \
  static DT_DEVICE void dt_vstore_##element(type* p, vector v) { dt_vstore_n_##element(p, v, 32); }

DT_MEMORY(f32, float, dt_f32x32, dt_same, dt_same)
DT_MEMORY(bf16, uint16_t, dt_f32x32, dt_widen_bf16, dt_narrow_bf16)
DT_MEMORY(f16, uint16_t, dt_f32x32, dt_f32_of_f16, dt_narrow_f16)
DT_MEMORY(i32, int32_t, dt_i32x32, dt_same, dt_same)

/* Two stretches of 16 elements: the upper half of the lanes takes what lies `stride` after the lower half's. */
#define DT_STRIPS(element, type, vector, widen)                                          \
  static DT_DEVICE vector dt_vload_strips_##element(const type* p, int64_t stride) {     \
    return widen(p[dt_lane() / 16 * stride + dt_lane() % 16]);                           \
  }

DT_STRIPS(f16, uint16_t, dt_f32x32, dt_f32_of_f16)
DT_STRIPS(i32, int32_t, dt_i32x32, dt_same)
DT_STRIPS(i8, int8_t, dt_i32x32, (int32_t))

/* Nothing is fetched ahead: other warps run while one waits. */
static DT_DEVICE void dt_prefetch(const void* p) { (void)p; }
static DT_DEVICE void dt_keep_order(void) {}

static DT_DEVICE dt_f32x32 dt_vbroadcast(float x) { return x; }
static DT_DEVICE dt_i32x32 dt_vbroadcast_i32(int32_t i) { return i; }
static DT_DEVICE dt_i32x32 dt_viota(void) { return dt_lane(); }
static DT_DEVICE dt_f32x32 dt_vadd(dt_f32x32 a, dt_f32x32 b) { return a + b; }
static DT_DEVICE dt_f32x32 dt_vsub(dt_f32x32 a, dt_f32x32 b) { return a - b; }
static DT_DEVICE dt_f32x32 dt_vmul(dt_f32x32 a, dt_f32x32 b) { return a * b; }
static DT_DEVICE dt_f32x32 dt_vdiv(dt_f32x32 a, dt_f32x32 b) { return a / b; }
static DT_DEVICE dt_f32x32 dt_vmin(dt_f32x32 a, dt_f32x32 b) { return a < b ? a : b; }
static DT_DEVICE dt_f32x32 dt_vmax(dt_f32x32 a, dt_f32x32 b) { return a > b ? a : b; }
static DT_DEVICE dt_f32x32 dt_vfma(dt_f32x32 a, dt_f32x32 b, dt_f32x32 c) { return __fmaf_rn(a, b, c); }
static DT_DEVICE dt_f32x32 dt_vfnma(dt_f32x32 a, dt_f32x32 b, dt_f32x32 c) { return __fmaf_rn(-a, b, c); }
static DT_DEVICE dt_f32x32 dt_vabs(dt_f32x32 v) { return fabsf(v); }
static DT_DEVICE dt_f32x32 dt_vneg(dt_f32x32 v) { return -v; }
static DT_DEVICE dt_f32x32 dt_vsqrt(dt_f32x32 v) { return sqrtf(v); }
static DT_DEVICE dt_f32x32 dt_vround(dt_f32x32 v) { return rintf(v); }
static DT_DEVICE dt_f32x32 dt_vfloor(dt_f32x32 v) { return floorf(v); }
static DT_DEVICE dt_f32x32 dt_vceil(dt_f32x32 v) { return ceilf(v); }
static DT_DEVICE dt_f32x32 dt_vtrunc(dt_f32x32 v) { return truncf(v); }
static DT_DEVICE dt_f32x32 dt_vselect_gt(dt_f32x32 a, dt_f32x32 b, dt_f32x32 x, dt_f32x32 y) { return a > b ? x : y; }
static DT_DEVICE dt_f32x32 dt_vtail(dt_f32x32 v, float fill, int64_t n) { return dt_lane() < n ? v : fill; }
static DT_DEVICE dt_i32x32 dt_vcvt_i32(dt_f32x32 v) { return __float2int_rn(v); }
static DT_DEVICE dt_f32x32 dt_vcvt_f32(dt_i32x32 v) { return (float)v; }
static DT_DEVICE dt_i32x32 dt_vadd_i32(dt_i32x32 a, dt_i32x32 b) { return (int32_t)((uint32_t)a + (uint32_t)b); }
static DT_DEVICE dt_i32x32 dt_vsub_i32(dt_i32x32 a, dt_i32x32 b) { return (int32_t)((uint32_t)a - (uint32_t)b); }
static DT_DEVICE dt_i32x32 dt_vmul_i32(dt_i32x32 a, dt_i32x32 b) { return (int32_t)((uint32_t)a * (uint32_t)b); }
static DT_DEVICE dt_i32x32 dt_vand_i32(dt_i32x32 a, dt_i32x32 b) { return a & b; }
static DT_DEVICE dt_i32x32 dt_vor_i32(dt_i32x32 a, dt_i32x32 b) { return a | b; }
static DT_DEVICE dt_i32x32 dt_vxor_i32(dt_i32x32 a, dt_i32x32 b) { return a ^ b; }
static DT_DEVICE dt_i32x32 dt_vshl_i32(dt_i32x32 v, int n) { return (int32_t)((uint32_t)v << n); }
static DT_DEVICE dt_i32x32 dt_vshr_i32(dt_i32x32 v, int n) { return (int32_t)((uint32_t)v >> n); }
/* The bytes of a table of 16 that lies in four words, each at the place that a byte of v names, 0 to 15. */
static DT_DEVICE dt_i32x32 dt_vlook_quads(dt_i32x32 v, int32_t a, int32_t b, int32_t c, int32_t d) {
  uint32_t found = 0;
  for (int at = 0; at < 32; at += 8) {
    int place = v >> at & 15;
    uint32_t word = place < 8 ? (place < 4 ? a : b) : (place < 12 ? c : d);
    found |= (word >> place % 4 * 8 & 255) << at;
  }
  return (int32_t)found;
}
static DT_DEVICE dt_f32x32 dt_vbitcast_f32(dt_i32x32 v) { return __int_as_float(v); }
static DT_DEVICE dt_i32x32 dt_vbitcast_i32(dt_f32x32 v) { return __float_as_int(v); }

/* The upper half is joined to the lower until lane 0 has all; its value goes to every lane. */
#define DT_REDUCE(name, join)                                                                           \
  static DT_DEVICE float dt_vreduce_##name(dt_f32x32 v) {                                               \
    for (int half = 16; half > 0; half /= 2) {                                                          \
      v = join(v, __shfl_down_sync(0xffffffffu, v, half));                                              \
    }                                                                                                   \
    return __shfl_sync(0xffffffffu, v, 0);                                                              \
  }

DT_REDUCE(add, dt_vadd)
DT_REDUCE(max, dt_vmax)
DT_REDUCE(min, dt_vmin)
#endif
