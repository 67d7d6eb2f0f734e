/* What the headers of XNNPACK say, as far as its kernels need it. */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#define XNN_LIKELY(condition) (__builtin_expect(!!(condition), 1))
#define XNN_UNLIKELY(condition) (__builtin_expect(!!(condition), 0))
#define XNN_UNPREDICTABLE(condition) (condition)
#define XNN_MIN_ELEMENTS(count) static count
#define XNN_RESTRICT restrict
#define XNN_OOB_READS
#define XNN_DISABLE_UBSAN
#define XNN_DISABLE_TSAN
#define XNN_INTERNAL
#define XNN_INLINE inline
#define XNN_ALIGN(bytes) __attribute__((aligned(bytes)))
#define XNN_FORCE_REALIZATION(x)
#define XNN_LOG2_SIZEOF_FLOAT 2
#define XNN_LOG2_SIZEOF_INT32_T 2
#define XNN_LOG2_SIZEOF_UINT16_T 1
#define XNN_LOG2_SIZEOF_INT8_T 0
#ifdef __aarch64__
#define XNN_ARCH_ARM64 1
#define XNN_ARCH_X86_64 0
typedef float16_t xnn_float16;
#else
#define XNN_ARCH_ARM64 0
#define XNN_ARCH_X86_64 1
typedef uint16_t xnn_float16;
#endif
struct xnn_f32_default_params { char unused; };
struct xnn_f32_minmax_params { struct { float min; float max; } scalar; };
struct xnn_f16_minmax_params { struct { xnn_float16 min; xnn_float16 max; } scalar; };
struct xnn_f32_scale_params { struct { float scale; } scalar; };
struct xnn_f32_scaleminmax_params { struct { float scale; float min; float max; } scalar; };
struct xnn_f32_lrelu_params { struct { float slope; } scalar; };
struct xnn_f32_qb4w_minmax_params { struct { float min; float max; size_t blocksize; } scalar; };
struct xnn_f32_qs8_cvt_params { struct { float scale; int16_t output_zero_point; } scalar; };
struct xnn_f32_qu8_cvt_params { struct { float scale; int16_t output_zero_point; } scalar; };
struct xnn_qs8_f32_cvt_params { struct { int32_t zero_point; float scale; } scalar; };
struct xnn_qu8_f32_cvt_params { struct { int32_t zero_point; float scale; } scalar; };
struct xnn_qu8_cvt_params {
  struct { uint16_t input_zero_point; int16_t multiplier; int16_t output_zero_point; } scalar;
};
struct xnn_qs8_lrelu_params {
  struct {
    int32_t input_zero_point; int32_t positive_multiplier; int32_t negative_multiplier;
    int32_t output_zero_point;
  } scalar;
};
struct xnn_qu8_lrelu_params {
  struct {
    int32_t input_zero_point; int32_t positive_multiplier; int32_t negative_multiplier;
    int32_t output_zero_point;
  } scalar;
};
struct xnn_qs8_rsum_params { char unused; };
struct xnn_qs8_packw_params { int8_t input_zero_point; };
struct xnn_qs8_qc4w_packing_params { int8_t input_zero_point; uint8_t kernel_zero_point; };
struct xnn_s8_minmax_params { struct { int32_t min; int32_t max; } scalar; };
struct xnn_u8_minmax_params { struct { uint32_t min; uint32_t max; } scalar; };
union xnn_qs8_mul_minmax_params {
  struct {
    int8_t a_zero_point; int8_t b_zero_point; float scale; int16_t output_zero_point;
    int8_t output_min; int8_t output_max;
  } scalar;
  struct {
    int8_t a_zero_point; int8_t b_zero_point; int32_t left_pre_shift; int32_t multiplier;
    int32_t left_post_shift; int16_t output_zero_point; int8_t output_min; int8_t output_max;
  } rndnu_neon;
};
union xnn_qs8_conv_minmax_params {
  struct { float scale; int16_t output_zero_point; int16_t output_min; int16_t output_max; } fp32_scalar;
  struct { float scale; int16_t output_zero_point; int8_t output_min; int8_t output_max; } fp32_neonv8;
  struct {
    float scale; float magic_bias; int32_t magic_bias_less_output_zero_point;
    int8_t output_min; int8_t output_max;
  } fp32_neon;
  struct {
    int32_t right_pre_shift; int32_t multiplier; int32_t right_post_shift; int16_t output_zero_point;
    int8_t output_min; int8_t output_max;
  } rndnu_neon;
};
struct xnn_f32_elu_params { struct { float prescale; float alpha; float beta; } scalar; };
struct xnn_f32_qc4w_minmax_params {
  struct { float min; float max; uint8_t kernel_zero_point; } scalar;
};
struct xnn_qd8_quantization_params { int32_t zero_point; float inv_scale; };
union xnn_qs8_qc8w_conv_minmax_params {
  struct { int16_t output_zero_point; int8_t output_min; int8_t output_max; } fp32_scalar;
  struct { int16_t output_zero_point; int8_t output_min; int8_t output_max; } fp32_neonv8;
  struct {
    float magic_bias; int32_t magic_bias_less_output_zero_point; int8_t output_min; int8_t output_max;
  } fp32_neon;
};
struct xnn_qs8_add_minmax_params {
  struct {
    int32_t bias; int32_t a_multiplier; int32_t b_multiplier; uint32_t shift;
    int16_t output_zero_point; int8_t output_min; int8_t output_max;
    int16_t a_zero_point; int16_t b_zero_point;
  } scalar;
};
struct xnn_qs8_cvt_params {
  struct { int16_t input_zero_point; int32_t multiplier; int16_t output_zero_point; } scalar;
};
union xnn_qs8_vprelu_scalar_params {
  struct {
    int32_t input_zero_point; int32_t slope_zero_point; int32_t output_zero_point;
    float positive_multiplier; float negative_multiplier; int32_t output_min; int32_t output_max;
  } scalar;
};
static inline float math_min_f32(float a, float b) { return b < a ? b : a; }
static inline float math_max_f32(float a, float b) { return b < a ? a : b; }
static inline float math_muladd_f32(float x, float y, float acc) { return x * y + acc; }
static inline int32_t math_min_s32(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t math_max_s32(int32_t a, int32_t b) { return a > b ? a : b; }
static inline size_t math_min_sz(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t doz(size_t a, size_t b) { return a > b ? a - b : 0; }
static inline size_t round_up_po2(size_t n, size_t q) { return (n + q - 1) & -q; }
static inline size_t round_down_po2(size_t n, size_t q) { return n & -q; }
static inline size_t divide_round_up(size_t n, size_t q) { return n % q == 0 ? n / q : n / q + 1; }
static inline int32_t math_asr_s32(int32_t x, uint32_t n) { return x >> n; }
static inline uint32_t float_as_uint32(float f) { union { float f; uint32_t u; } b; b.f = f; return b.u; }
static inline float uint32_as_float(uint32_t u) { union { float f; uint32_t u; } b; b.u = u; return b.f; }
static inline int64_t math_asr_s64(int64_t x, uint32_t n) { return x >> n; }
static inline int64_t math_mulext_s32(int32_t a, int32_t b) { return (int64_t)a * (int64_t)b; }
static inline uint32_t math_max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }
static inline uint32_t math_min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline int32_t math_round_f32_to_s32(float x) { return (int32_t)lrintf(x); }
static inline float unaligned_load_f32(const void* p) { float v; memcpy(&v, p, 4); return v; }
static inline float unaligned_indexed_load_f32(const void* p, size_t i) {
  float v;
  memcpy(&v, (const char*)p + 4 * i, 4);
  return v;
}
static inline int32_t unaligned_load_s32(const void* p) { int32_t v; memcpy(&v, p, 4); return v; }
static inline uint64_t unaligned_load_u64(const void* p) { uint64_t v; memcpy(&v, p, 8); return v; }
static inline uint32_t unaligned_load_u32(const void* p) { uint32_t v; memcpy(&v, p, 4); return v; }
static inline uint16_t unaligned_load_u16(const void* p) { uint16_t v; memcpy(&v, p, 2); return v; }
static inline int32_t unaligned_indexed_load_s32(const void* p, size_t i) {
  int32_t v;
  memcpy(&v, (const char*)p + 4 * i, 4);
  return v;
}
static inline void unaligned_store_u32(void* p, uint32_t v) { memcpy(p, &v, 4); }
static inline void unaligned_store_u16(void* p, uint16_t v) { memcpy(p, &v, 2); }
static inline void xnn_prefetch_to_l1(const void* p) { __builtin_prefetch(p); }
#ifndef __aarch64__
#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32
#define _mm_dpbusd_avx_epi32 _mm_dpbusd_epi32
#define DPBUSD_MADD(width, type) \
  static inline type _mm##width##_dpbusd_epi32_madd(type i, type u, type s) { \
    type p = _mm##width##_madd_epi16(_mm##width##_maddubs_epi16(u, s), _mm##width##_set1_epi16(1)); \
    return _mm##width##_add_epi32(i, p); \
  }
DPBUSD_MADD(, __m128i)
DPBUSD_MADD(256, __m256i)
#ifdef __AVX512BW__
DPBUSD_MADD(512, __m512i)
#endif
#endif
