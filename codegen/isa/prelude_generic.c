/* Helpers of the generic target: a vector is one float. `n` is 0 or 1. */

static inline void dt_vstore_n_f32(float* p, float v, int64_t n) {
  if (n > 0) {
    p[0] = v;
  }
}

/* Nearest even; what no int32_t holds, NaN included, gives the least one, as on x86. */
static inline int32_t dt_vcvt_i32(float x) {
  return x >= -2147483648.0f && x < 2147483648.0f ? (int32_t)rintf(x) : -2147483647 - 1;
}

static inline void dt_vstore_n_i32(int32_t* p, int32_t v, int64_t n) {
  if (n > 0) {
    p[0] = v;
  }
}

static inline void dt_store_n_bf16(uint16_t* p, float x, int64_t n) {
  if (n > 0) {
    dt_store_bf16(p, x);
  }
}

/* Exact: a subnormal half is its integer significand times 2^-24. */
static inline float dt_load_f16(const uint16_t* p) {
  uint32_t h = p[0];
  uint32_t sign = (h & 0x8000) << 16;
  uint32_t exponent = (h >> 10) & 31;
  uint32_t significand = h & 0x3ff;
  if (exponent == 0) {
    float tiny = (float)significand * 5.9604644775390625e-8f;
    return dt_f32_of_bits(dt_bits_of_f32(tiny) | sign);
  }
  if (exponent == 31) {
    uint32_t quiet = significand != 0 ? 0x400000 : 0;
    return dt_f32_of_bits(sign | 0x7f800000 | quiet | (significand << 13));
  }
  return dt_f32_of_bits(sign | ((exponent + 112) << 23) | (significand << 13));
}

/* To nearest even, subnormals included: adding 0.5 aligns a small value so that the FPU rounds it at 2^-24. */
static inline void dt_store_f16(uint16_t* p, float x) {
  uint32_t bits = dt_bits_of_f32(x);
  uint32_t sign = (bits >> 16) & 0x8000;
  uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  } else if (magnitude >= 0x47800000) {
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {
    half = dt_bits_of_f32(dt_f32_of_bits(magnitude) + 0.5f) - 0x3f000000;
  } else {
    half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  p[0] = (uint16_t)(sign | half);
}

static inline void dt_store_n_f16(uint16_t* p, float x, int64_t n) {
  if (n > 0) {
    dt_store_f16(p, x);
  }
}

static inline float dt_vmin(float a, float b) {
  return a < b ? a : b;
}

static inline float dt_vmax(float a, float b) {
  return a > b ? a : b;
}

/* The first, or second, bfloat16 of each pair of a and b: pairs again. */
static inline int32_t dt_vpair_firsts(int32_t a, int32_t b) {
  return (int32_t)(((uint32_t)a & 0xffffu) | (uint32_t)b << 16);
}

static inline int32_t dt_vpair_seconds(int32_t a, int32_t b) {
  return (int32_t)((uint32_t)a >> 16 | ((uint32_t)b & 0xffff0000u));
}

/* c + a . b; the upper products first, as hardware does where it has this. */
static inline float dt_vdot_pairs(int32_t a, int32_t b, float c) {
  float high = dt_f32_of_bits((uint32_t)a & 0xffff0000u) * dt_f32_of_bits((uint32_t)b & 0xffff0000u);
  return dt_f32_of_bits((uint32_t)a << 16) * dt_f32_of_bits((uint32_t)b << 16) + (high + c);
}

/* The products of the bytes of a quad w, without a sign or with one, and of x, with one; and acc. */
static inline int32_t dt_vdot_quads(int32_t w, int32_t x, int32_t acc) {
  for (int32_t at = 0; at < 32; at += 8) {
    acc += (int32_t)(uint8_t)(w >> at) * (int32_t)(int8_t)(x >> at);
  }
  return acc;
}

static inline int32_t dt_vdot_quads_signed(int32_t w, int32_t x, int32_t acc) {
  for (int32_t at = 0; at < 32; at += 8) {
    acc += (int32_t)(int8_t)(w >> at) * (int32_t)(int8_t)(x >> at);
  }
  return acc;
}

static inline void dt_vreduce_add4(float* p, float a, float b, float c, float d) {
  p[0] = a;
  p[1] = b;
  p[2] = c;
  p[3] = d;
}

static inline void dt_vreduce_add16(float* p, int64_t stride, float v0, float v1, float v2, float v3, float v4, float v5, float v6, float v7, float v8, float v9, float v10, float v11, float v12, float v13, float v14, float v15) {
  dt_vreduce_add4(p, v0, v1, v2, v3);
  dt_vreduce_add4(p + stride, v4, v5, v6, v7);
  dt_vreduce_add4(p + 2 * stride, v8, v9, v10, v11);
  dt_vreduce_add4(p + 3 * stride, v12, v13, v14, v15);
}
