/* Floats in vectors of the instruction set that a file of XNNPACK includes: SIMD_ and its name. */
#if defined SIMD_scalar
#define xnn_simd_size_f32 1
#define xnn_simd_log2_size_f32 0
typedef float xnn_simd_f32_t;
#define XNN_SIMD_CONST_F32(name, value) const float name = value;
#define XNN_SIMD_CONST_F32_FROM_INT32(name, value) const float name = uint32_as_float(value);
#define SIMD_BITS(a) float_as_uint32(a)
#define SIMD_FLOAT(a) uint32_as_float(a)
#define SIMD_TWO(name, value) \
  static inline float xnn_##name##_f32(float a, float b) { return value; }
SIMD_TWO(add, a + b)
SIMD_TWO(sub, a - b)
SIMD_TWO(mul, a * b)
SIMD_TWO(div, a / b)
SIMD_TWO(max, math_max_f32(a, b))
SIMD_TWO(min, math_min_f32(a, b))
SIMD_TWO(and, SIMD_FLOAT(SIMD_BITS(a) & SIMD_BITS(b)))
SIMD_TWO(or, SIMD_FLOAT(SIMD_BITS(a) | SIMD_BITS(b)))
SIMD_TWO(xor, SIMD_FLOAT(SIMD_BITS(a) ^ SIMD_BITS(b)))
SIMD_TWO(andnot, SIMD_FLOAT(~SIMD_BITS(a) & SIMD_BITS(b)))
SIMD_TWO(cmpeq, SIMD_FLOAT(a == b ? 0xFFFFFFFFu : 0u))
SIMD_TWO(cmpneq, SIMD_FLOAT(a != b ? 0xFFFFFFFFu : 0u))
static inline float xnn_abs_f32(float a) { return fabsf(a); }
static inline float xnn_neg_f32(float a) { return -a; }
static inline float xnn_round_f32(float a) { return rintf(a); }
static inline float xnn_sqrt_f32(float a) { return sqrtf(a); }
static inline float xnn_sll_f32(float a, uint8_t n) { return SIMD_FLOAT(SIMD_BITS(a) << n); }
static inline float xnn_srl_f32(float a, uint8_t n) { return SIMD_FLOAT(SIMD_BITS(a) >> n); }
static inline float xnn_sra_f32(float a, uint8_t n) { return SIMD_FLOAT((int32_t)SIMD_BITS(a) >> n); }
static inline float xnn_set1_f32(float v) { return v; }
static inline float xnn_loadu_f32(const float* p) { return *p; }
static inline void xnn_storeu_f32(float* p, float v) { *p = v; }
#elif defined SIMD_neon
#define xnn_simd_size_f32 4
#define xnn_simd_log2_size_f32 2
#define XNN_SIMD_SHIFTS_ARE_MACROS 1
typedef float32x4_t xnn_simd_f32_t;
#define XNN_SIMD_CONST_F32(name, value) const float32x4_t name = vdupq_n_f32(value);
#define XNN_SIMD_CONST_F32_FROM_INT32(name, value) \
  const float32x4_t name = vreinterpretq_f32_u32(vdupq_n_u32(value));
#define SIMD_BITS(a) vreinterpretq_u32_f32(a)
#define SIMD_FLOAT(a) vreinterpretq_f32_u32(a)
#define SIMD_TWO(name, value) \
  static inline float32x4_t xnn_##name##_f32(float32x4_t a, float32x4_t b) { return value; }
SIMD_TWO(add, vaddq_f32(a, b))
SIMD_TWO(sub, vsubq_f32(a, b))
SIMD_TWO(mul, vmulq_f32(a, b))
SIMD_TWO(div, vdivq_f32(a, b))
SIMD_TWO(max, vmaxq_f32(a, b))
SIMD_TWO(min, vminq_f32(a, b))
SIMD_TWO(and, SIMD_FLOAT(vandq_u32(SIMD_BITS(a), SIMD_BITS(b))))
SIMD_TWO(or, SIMD_FLOAT(vorrq_u32(SIMD_BITS(a), SIMD_BITS(b))))
SIMD_TWO(xor, SIMD_FLOAT(veorq_u32(SIMD_BITS(a), SIMD_BITS(b))))
SIMD_TWO(andnot, SIMD_FLOAT(vbicq_u32(SIMD_BITS(b), SIMD_BITS(a))))
SIMD_TWO(cmpeq, SIMD_FLOAT(vceqq_f32(a, b)))
SIMD_TWO(cmpneq, SIMD_FLOAT(vmvnq_u32(vceqq_f32(a, b))))
static inline float32x4_t xnn_abs_f32(float32x4_t a) { return vabsq_f32(a); }
static inline float32x4_t xnn_neg_f32(float32x4_t a) { return vnegq_f32(a); }
static inline float32x4_t xnn_round_f32(float32x4_t a) { return vrndnq_f32(a); }
static inline float32x4_t xnn_sqrt_f32(float32x4_t a) { return vsqrtq_f32(a); }
#define xnn_sll_f32(a, n) vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(a), n))
#define xnn_srl_f32(a, n) vreinterpretq_f32_u32(vshrq_n_u32(vreinterpretq_u32_f32(a), n))
#define xnn_sra_f32(a, n) vreinterpretq_f32_s32(vshrq_n_s32(vreinterpretq_s32_f32(a), n))
static inline float32x4_t xnn_set1_f32(float v) { return vdupq_n_f32(v); }
static inline float32x4_t xnn_loadu_f32(const float* p) { return vld1q_f32(p); }
static inline void xnn_storeu_f32(float* p, float32x4_t v) { vst1q_f32(p, v); }
#else
#if defined SIMD_avx512f
#define xnn_simd_size_f32 16
#define xnn_simd_log2_size_f32 4
#define SIMD(name) _mm512_##name
#define SIMD_BITS(a) _mm512_castps_si512(a)
#define SIMD_FLOAT(a) _mm512_castsi512_ps(a)
#define SIMD_EQUAL(a, b) _mm512_movm_epi32(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ))
#define SIMD_DIFFER(a, b) _mm512_movm_epi32(_mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ))
#define SIMD_NEAREST(a) _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT)
typedef __m512 xnn_simd_f32_t;
#elif defined SIMD_sse2 || defined SIMD_sse2fma
#define xnn_simd_size_f32 4
#define xnn_simd_log2_size_f32 2
#define SIMD(name) _mm_##name
#define SIMD_BITS(a) _mm_castps_si128(a)
#define SIMD_FLOAT(a) _mm_castsi128_ps(a)
#define SIMD_EQUAL(a, b) SIMD_BITS(_mm_cmpeq_ps(a, b))
#define SIMD_DIFFER(a, b) SIMD_BITS(_mm_cmpneq_ps(a, b))
#define SIMD_NEAREST(a) _mm_round_ps(a, _MM_FROUND_TO_NEAREST_INT)
typedef __m128 xnn_simd_f32_t;
#else
#define xnn_simd_size_f32 8
#define xnn_simd_log2_size_f32 3
#define SIMD(name) _mm256_##name
#define SIMD_BITS(a) _mm256_castps_si256(a)
#define SIMD_FLOAT(a) _mm256_castsi256_ps(a)
#define SIMD_EQUAL(a, b) SIMD_BITS(_mm256_cmp_ps(a, b, _CMP_EQ_OQ))
#define SIMD_DIFFER(a, b) SIMD_BITS(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ))
#define SIMD_NEAREST(a) _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT)
typedef __m256 xnn_simd_f32_t;
#endif
#define XNN_SIMD_CONST_F32(name, value) const xnn_simd_f32_t name = SIMD(set1_ps)(value);
#define XNN_SIMD_CONST_F32_FROM_INT32(name, value) \
  const xnn_simd_f32_t name = SIMD_FLOAT(SIMD(set1_epi32)(value));
#define SIMD_TWO(name, value) \
  static inline xnn_simd_f32_t xnn_##name##_f32(xnn_simd_f32_t a, xnn_simd_f32_t b) { return value; }
SIMD_TWO(add, SIMD(add_ps)(a, b))
SIMD_TWO(sub, SIMD(sub_ps)(a, b))
SIMD_TWO(mul, SIMD(mul_ps)(a, b))
SIMD_TWO(div, SIMD(div_ps)(a, b))
SIMD_TWO(max, SIMD(max_ps)(a, b))
SIMD_TWO(min, SIMD(min_ps)(a, b))
SIMD_TWO(and, SIMD(and_ps)(a, b))
SIMD_TWO(or, SIMD(or_ps)(a, b))
SIMD_TWO(xor, SIMD(xor_ps)(a, b))
SIMD_TWO(andnot, SIMD(andnot_ps)(a, b))
SIMD_TWO(cmpeq, SIMD_FLOAT(SIMD_EQUAL(a, b)))
SIMD_TWO(cmpneq, SIMD_FLOAT(SIMD_DIFFER(a, b)))
#define SIMD_ONE(name, value) \
  static inline xnn_simd_f32_t xnn_##name##_f32(xnn_simd_f32_t a) { return value; }
SIMD_ONE(abs, SIMD(andnot_ps)(SIMD(set1_ps)(-0.0f), a))
SIMD_ONE(neg, SIMD(xor_ps)(SIMD(set1_ps)(-0.0f), a))
SIMD_ONE(round, SIMD_NEAREST(a))
SIMD_ONE(sqrt, SIMD(sqrt_ps)(a))
#define SIMD_SHIFT(name, of) \
  static inline xnn_simd_f32_t xnn_##name##_f32(xnn_simd_f32_t a, uint8_t n) { \
    return SIMD_FLOAT(SIMD(of)(SIMD_BITS(a), n)); \
  }
SIMD_SHIFT(sll, slli_epi32)
SIMD_SHIFT(srl, srli_epi32)
SIMD_SHIFT(sra, srai_epi32)
static inline xnn_simd_f32_t xnn_set1_f32(float v) { return SIMD(set1_ps)(v); }
static inline xnn_simd_f32_t xnn_loadu_f32(const float* p) { return SIMD(loadu_ps)(p); }
static inline void xnn_storeu_f32(float* p, xnn_simd_f32_t v) { SIMD(storeu_ps)(p, v); }
#endif
#define xnn_simd_bytes_f32 (xnn_simd_size_f32 * 4)
#define XNN_SIMD_HAS_NATIVE_FMA 0
#define XNN_SIMD_HAVE_RCP_F32 1
#define XNN_SIMD_NUM_RCP_ITER_F32 1
#define XNN_SIMD_HAVE_RSQRT_F32 1
#define XNN_SIMD_NUM_RSQRT_ITER_F32 1
#define SIMD_THREE(name, value) \
  static inline xnn_simd_f32_t xnn_##name##_f32(xnn_simd_f32_t a, xnn_simd_f32_t b, xnn_simd_f32_t c) { \
    return value; \
  }
SIMD_THREE(fmadd, xnn_add_f32(xnn_mul_f32(a, b), c))
SIMD_THREE(fnmadd, xnn_sub_f32(c, xnn_mul_f32(a, b)))
SIMD_THREE(fmsub, xnn_sub_f32(xnn_mul_f32(a, b), c))
static inline xnn_simd_f32_t xnn_rcp_f32(xnn_simd_f32_t a) {
  return xnn_div_f32(xnn_set1_f32(1.0f), a);
}
static inline xnn_simd_f32_t xnn_rsqrt_f32(xnn_simd_f32_t a) {
  return xnn_rcp_f32(xnn_sqrt_f32(a));
}
static inline xnn_simd_f32_t xnn_zero_f32() { return xnn_set1_f32(0.0f); }
static inline xnn_simd_f32_t xnn_load_f32(const float* p) { return xnn_loadu_f32(p); }
static inline void xnn_store_f32(float* p, xnn_simd_f32_t v) { xnn_storeu_f32(p, v); }
static inline xnn_simd_f32_t xnn_load_tail_safe_f32(const float* p, size_t n) {
  float t[xnn_simd_size_f32];
  for (size_t i = 0; i < xnn_simd_size_f32; i++) t[i] = i < n ? p[i] : 0.0f;
  return xnn_loadu_f32(t);
}
static inline xnn_simd_f32_t xnn_load_tail_f32(const float* p, size_t n) {
  return xnn_load_tail_safe_f32(p, n);
}
static inline void xnn_store_tail_f32(float* p, xnn_simd_f32_t v, size_t n) {
  float t[xnn_simd_size_f32];
  xnn_storeu_f32(t, v);
  for (size_t i = 0; i < n; i++) p[i] = t[i];
}
#define SIMD_SUM(name, value) \
  static inline float xnn_reduce_##name##_f32(xnn_simd_f32_t v) { \
    float t[xnn_simd_size_f32]; \
    xnn_storeu_f32(t, v); \
    float a = t[0]; \
    for (size_t i = 1; i < xnn_simd_size_f32; i++) { \
      float b = t[i]; \
      a = value; \
    } \
    return a; \
  }
SIMD_SUM(add, a + b)
SIMD_SUM(max, math_max_f32(a, b))
SIMD_SUM(min, math_min_f32(a, b))
