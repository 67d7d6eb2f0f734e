/* Helpers of aarch64-neon. `n` counts lanes used, 0 <= n <= 4; the other lanes load as 0 and are not stored. */

#define DT_PART(load_n, store_n, element, vector, load, store) \
  static inline vector load_n(const element* p, int64_t n) { \
    element t[4] = {0, 0, 0, 0}; \
    for (int64_t i = 0; i < n; ++i) { \
      t[i] = p[i]; \
    } \
    return load(t); \
  } \
  static inline void store_n(element* p, vector v, int64_t n) { \
    element t[4]; \
    store(t, v); \
    for (int64_t i = 0; i < n; ++i) { \
      p[i] = t[i]; \
    } \
  }

DT_PART(dt_vload_n_f32, dt_vstore_n_f32, float, float32x4_t, vld1q_f32, vst1q_f32)
DT_PART(dt_vload_n_i32, dt_vstore_n_i32, int32_t, int32x4_t, vld1q_s32, vst1q_s32)
DT_PART(dt_load_n_u16, dt_store_n_u16, uint16_t, uint16x4_t, vld1_u16, vst1_u16)

static inline float32x4_t dt_widen_bf16(uint16x4_t bits) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(bits), 16));
}

/* To nearest even; NaN becomes 0x7fc0. */
static inline uint16x4_t dt_narrow_bf16(float32x4_t v) {
  uint32x4_t bits = vreinterpretq_u32_f32(v);
  uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  uint32x4_t rounded =
      vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  return vmovn_u32(vbslq_u32(vceqq_f32(v, v), rounded, vdupq_n_u32(0x7fc0)));
}

static inline float dt_load_f16(const uint16_t* p) {
  return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(p[0]))), 0);
}

static inline void dt_store_f16(uint16_t* p, float x) {
  p[0] = vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0);
}

static inline float32x4_t dt_vtail(float32x4_t v, float fill, int64_t n) {
  int32_t lanes[4] = {0, 1, 2, 3};
  return vbslq_f32(vcgtq_s32(vdupq_n_s32((int32_t)n), vld1q_s32(lanes)), v, vdupq_n_f32(fill));
}

static inline int32x4_t dt_viota(void) {
  int32_t lanes[4] = {0, 1, 2, 3};
  return vld1q_s32(lanes);
}

/* The first, or second, bfloat16 of each pair of a and b: pairs again. */
static inline int32x4_t dt_vpair_firsts(int32x4_t a, int32x4_t b) {
  return vorrq_s32(vandq_s32(a, vdupq_n_s32(65535)), vshlq_n_s32(b, 16));
}

static inline int32x4_t dt_vpair_seconds(int32x4_t a, int32x4_t b) {
  uint32x4_t second = vshrq_n_u32(vreinterpretq_u32_s32(a), 16);
  return vorrq_s32(vreinterpretq_s32_u32(second), vandq_s32(b, vdupq_n_s32(-65536)));
}

/* c + a . b of pairs; the upper products first. */
static inline float32x4_t dt_vdot_pairs(int32x4_t a, int32x4_t b, float32x4_t c) {
  int32x4_t upper = vdupq_n_s32(-65536);
  float32x4_t sum = vfmaq_f32(c, vreinterpretq_f32_s32(vandq_s32(a, upper)),
                              vreinterpretq_f32_s32(vandq_s32(b, upper)));
  return vfmaq_f32(sum, vreinterpretq_f32_s32(vshlq_n_s32(a, 16)), vreinterpretq_f32_s32(vshlq_n_s32(b, 16)));
}

/* Products of the bytes of w, -128 to 127, and of x, -127 to 127: neighbours' sums fit 16 bits. */
static inline int32x4_t dt_vdot_quads(int32x4_t w, int32x4_t x, int32x4_t acc) {
  int8x16_t a = vreinterpretq_s8_s32(w);
  int8x16_t b = vreinterpretq_s8_s32(x);
  int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
  int16x8_t high = vmull_s8(vget_high_s8(a), vget_high_s8(b));
  return vpadalq_s16(acc, vpaddq_s16(low, high));
}

static inline int32x4_t dt_vload_u8(const uint8_t* p) {
  uint8x8_t bytes = vreinterpret_u8_s32(vdup_n_s32(dt_load_quad(p)));
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
}

static inline int32x4_t dt_vload_i8(const int8_t* p) {
  int8x8_t bytes = vreinterpret_s8_s32(vdup_n_s32(dt_load_quad((const uint8_t*)p)));
  return vmovl_s16(vget_low_s16(vmovl_s8(bytes)));
}

/* The low byte of each lane. */
static inline void dt_vstore_i8(int8_t* p, int32x4_t v) {
  int16x4_t words = vmovn_s32(v);
  int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
  memcpy(p, &bytes, 4);
}

/* Four sums at once, by adding neighbours. */
static inline void dt_vreduce_add4(float* p, float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
  vst1q_f32(p, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}

static inline void dt_vreduce_add16(float* p, int64_t stride, float32x4_t v0, float32x4_t v1, float32x4_t v2, float32x4_t v3, float32x4_t v4, float32x4_t v5, float32x4_t v6, float32x4_t v7, float32x4_t v8, float32x4_t v9, float32x4_t v10, float32x4_t v11, float32x4_t v12, float32x4_t v13, float32x4_t v14, float32x4_t v15) {
  dt_vreduce_add4(p, v0, v1, v2, v3);
  dt_vreduce_add4(p + stride, v4, v5, v6, v7);
  dt_vreduce_add4(p + 2 * stride, v8, v9, v10, v11);
  dt_vreduce_add4(p + 3 * stride, v12, v13, v14, v15);
}
