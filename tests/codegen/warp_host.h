/* templates/warp.cuh in plain C++: a warp is one CPU thread, a vector 32 floats. The kernels' own text stays as it is. */
#include <cmath>
#include <cstdint>
#include <cstring>

struct dt_f32x32 { float lane[32]; };
struct dt_i32x32 { int32_t lane[32]; };

#define DT_DEVICE __attribute__((unused))
#define DT_ENTRY(warps) extern "C" void
#define DT_LOCAL(type, name, count, warps) alignas(64) type name[count]

static int64_t dt_host_warp, dt_host_warps;
extern "C" void dt_host_set(int64_t warp, int64_t warps) { dt_host_warp = warp; dt_host_warps = warps; }
static int64_t dt_warp(void) { return dt_host_warp; }
static int64_t dt_warps(void) { return dt_host_warps; }

template <class To, class From> static To dt_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
static inline float dt_f32_of_bits(uint32_t bits) { return dt_bits<float>(bits); }
static inline uint32_t dt_bits_of_f32(float x) { return dt_bits<uint32_t>(x); }
static inline float dt_f32_of_f16(uint16_t bits) { return (float)dt_bits<_Float16>(bits); }
static inline uint16_t dt_narrow_f16(float x) { return dt_bits<uint16_t>((_Float16)x); }
static inline float dt_widen_bf16(uint16_t bits) { return dt_f32_of_bits((uint32_t)bits << 16); }
static inline uint16_t dt_narrow_bf16(float x) {
  uint32_t bits = dt_bits_of_f32(x);
  return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
template <class T> static T dt_same(T x) { return x; }

#define DT_STORE(element, type, value_type, narrow) \
  static inline void dt_store_##element(type* p, value_type x) { p[0] = narrow(x); }
DT_STORE(f32, float, float, )
DT_STORE(f64, double, double, )
DT_STORE(i32, int32_t, int32_t, )
DT_STORE(i64, int64_t, int64_t, )
DT_STORE(u8, uint8_t, uint8_t, )
DT_STORE(i8, int8_t, int8_t, )
DT_STORE(i16, int16_t, int16_t, )
DT_STORE(u16, uint16_t, uint16_t, )
DT_STORE(u32, uint32_t, uint32_t, )
DT_STORE(bf16, uint16_t, float, dt_narrow_bf16)
DT_STORE(f16, uint16_t, float, dt_narrow_f16)

#define DT_MEMORY(element, type, vector, widen, narrow)                                  \
  static inline vector dt_vload_n_##element(const type* p, int64_t n) {                  \
    vector v = {};                                                                       \
    for (int i = 0; i < n; ++i) v.lane[i] = widen(p[i]);                                 \
    return v;                                                                            \
  }                                                                                      \
  static inline vector dt_vload_##element(const type* p) { return dt_vload_n_##element(p, 32); } \
  static inline void dt_vstore_n_##element(type* p, vector v, int64_t n) {               \
    for (int i = 0; i < n; ++i) p[i] = narrow(v.lane[i]);                                \
  }                                                                                      \
  static inline void dt_vstore_##element(type* p, vector v) { dt_vstore_n_##element(p, v, 32); }
DT_MEMORY(f32, float, dt_f32x32, dt_same, dt_same)
DT_MEMORY(bf16, uint16_t, dt_f32x32, dt_widen_bf16, dt_narrow_bf16)
DT_MEMORY(f16, uint16_t, dt_f32x32, dt_f32_of_f16, dt_narrow_f16)
DT_MEMORY(i32, int32_t, dt_i32x32, dt_same, dt_same)

#define DT_STRIPS(element, type, vector, widen)                                           \
  static inline vector dt_vload_strips_##element(const type* p, int64_t stride) {         \
    vector v;                                                                             \
    for (int i = 0; i < 32; ++i) v.lane[i] = widen(p[i / 16 * stride + i % 16]);          \
    return v;                                                                             \
  }
DT_STRIPS(f16, uint16_t, dt_f32x32, dt_f32_of_f16)
DT_STRIPS(i32, int32_t, dt_i32x32, )
DT_STRIPS(i8, int8_t, dt_i32x32, )

static inline void dt_prefetch(const void*) {}

#define DT_LANES(result, expression)                             \
  result r;                                                      \
  for (int i = 0; i < 32; ++i) r.lane[i] = expression;           \
  return r
#define DT_ONE(name, from, to, expression) \
  static inline to dt_##name(from v) { DT_LANES(to, expression); }
#define DT_TWO(name, vector, expression) \
  static inline vector dt_##name(vector a, vector b) { DT_LANES(vector, expression); }
DT_ONE(vbroadcast, float, dt_f32x32, v)
DT_ONE(vbroadcast_i32, int32_t, dt_i32x32, v)
DT_ONE(vabs, dt_f32x32, dt_f32x32, std::fabs(v.lane[i]))
DT_ONE(vneg, dt_f32x32, dt_f32x32, -v.lane[i])
DT_ONE(vsqrt, dt_f32x32, dt_f32x32, std::sqrt(v.lane[i]))
DT_ONE(vround, dt_f32x32, dt_f32x32, std::rint(v.lane[i]))
DT_ONE(vfloor, dt_f32x32, dt_f32x32, std::floor(v.lane[i]))
DT_ONE(vceil, dt_f32x32, dt_f32x32, std::ceil(v.lane[i]))
DT_ONE(vtrunc, dt_f32x32, dt_f32x32, std::trunc(v.lane[i]))
DT_ONE(vcvt_f32, dt_i32x32, dt_f32x32, (float)v.lane[i])
DT_ONE(vbitcast_f32, dt_i32x32, dt_f32x32, dt_bits<float>(v.lane[i]))
DT_ONE(vbitcast_i32, dt_f32x32, dt_i32x32, dt_bits<int32_t>(v.lane[i]))
DT_TWO(vadd, dt_f32x32, a.lane[i] + b.lane[i])
DT_TWO(vsub, dt_f32x32, a.lane[i] - b.lane[i])
DT_TWO(vmul, dt_f32x32, a.lane[i] * b.lane[i])
DT_TWO(vdiv, dt_f32x32, a.lane[i] / b.lane[i])
DT_TWO(vmin, dt_f32x32, a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i])
DT_TWO(vmax, dt_f32x32, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i])
DT_TWO(vadd_i32, dt_i32x32, (int32_t)((uint32_t)a.lane[i] + (uint32_t)b.lane[i]))
DT_TWO(vsub_i32, dt_i32x32, (int32_t)((uint32_t)a.lane[i] - (uint32_t)b.lane[i]))
DT_TWO(vmul_i32, dt_i32x32, (int32_t)((uint32_t)a.lane[i] * (uint32_t)b.lane[i]))
DT_TWO(vand_i32, dt_i32x32, a.lane[i] & b.lane[i])
DT_TWO(vor_i32, dt_i32x32, a.lane[i] | b.lane[i])
DT_TWO(vxor_i32, dt_i32x32, a.lane[i] ^ b.lane[i])
static inline dt_i32x32 dt_viota(void) { DT_LANES(dt_i32x32, i); }
static inline dt_i32x32 dt_vshl_i32(dt_i32x32 v, int n) { DT_LANES(dt_i32x32, (int32_t)((uint32_t)v.lane[i] << n)); }
static inline dt_i32x32 dt_vshr_i32(dt_i32x32 v, int n) { DT_LANES(dt_i32x32, (int32_t)((uint32_t)v.lane[i] >> n)); }
static inline int32_t dt_look(int32_t v, const int32_t* words) {
  uint32_t found = 0;
  for (int at = 0; at < 32; at += 8) {
    int place = v >> at & 15;
    found |= ((uint32_t)words[place / 4] >> place % 4 * 8 & 255) << at;
  }
  return (int32_t)found;
}
static inline dt_i32x32 dt_vlook_quads(dt_i32x32 v, int32_t a, int32_t b, int32_t c, int32_t d) {
  int32_t words[4] = {a, b, c, d};
  DT_LANES(dt_i32x32, dt_look(v.lane[i], words));
}
static inline dt_i32x32 dt_vcvt_i32(dt_f32x32 v) {
  DT_LANES(dt_i32x32, v.lane[i] != v.lane[i]        ? 0
                      : v.lane[i] >= 2147483648.0f  ? INT32_MAX
                      : v.lane[i] <= -2147483648.0f ? INT32_MIN
                                                    : (int32_t)std::rint(v.lane[i]));
}
static inline dt_f32x32 dt_vfma(dt_f32x32 a, dt_f32x32 b, dt_f32x32 c) {
  DT_LANES(dt_f32x32, std::fma(a.lane[i], b.lane[i], c.lane[i]));
}
static inline dt_f32x32 dt_vfnma(dt_f32x32 a, dt_f32x32 b, dt_f32x32 c) {
  DT_LANES(dt_f32x32, std::fma(-a.lane[i], b.lane[i], c.lane[i]));
}
static inline dt_f32x32 dt_vselect_gt(dt_f32x32 a, dt_f32x32 b, dt_f32x32 x, dt_f32x32 y) {
  DT_LANES(dt_f32x32, a.lane[i] > b.lane[i] ? x.lane[i] : y.lane[i]);
}
static inline dt_f32x32 dt_vtail(dt_f32x32 v, float fill, int64_t n) { DT_LANES(dt_f32x32, i < n ? v.lane[i] : fill); }

#define DT_REDUCE(name, join)                                                   \
  static inline float dt_vreduce_##name(dt_f32x32 v) {                          \
    for (int half = 16; half > 0; half /= 2) {                                  \
      dt_f32x32 upper = v;                                                      \
      for (int i = 0; i < half; ++i) upper.lane[i] = v.lane[i + half];          \
      v = join(v, upper);                                                       \
    }                                                                           \
    return v.lane[0];                                                           \
  }
DT_REDUCE(add, dt_vadd)
DT_REDUCE(max, dt_vmax)
DT_REDUCE(min, dt_vmin)
