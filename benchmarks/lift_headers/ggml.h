/* What the headers of ggml say, as far as its kernels need it. */
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#define GGML_RESTRICT restrict
#define GGML_UNUSED(x) (void)(x)
#define GGML_ASSERT(x)
#ifdef __aarch64__
static inline float dt_half_to_float(uint16_t h) { __fp16 v; memcpy(&v, &h, 2); return v; }
static inline uint16_t dt_float_to_half(float f) { __fp16 v = f; uint16_t h; memcpy(&h, &v, 2); return h; }
#else
static inline float dt_half_to_float(uint16_t h) { return _cvtsh_ss(h); }
static inline uint16_t dt_float_to_half(float f) { return _cvtss_sh(f, 0); }
#endif
#define GGML_CPU_FP16_TO_FP32(x) dt_half_to_float(x)
#define GGML_CPU_FP32_TO_FP16(x) dt_float_to_half(x)
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define GGML_FP16_TO_FP32(x) GGML_CPU_FP16_TO_FP32(x)
#define GGML_FP32_TO_FP16(x) GGML_CPU_FP32_TO_FP16(x)
#define GGML_SOFT_MAX_UNROLL 4
#define MM256_SET_M128I(a, b) _mm256_insertf128_si256(_mm256_castsi128_si256(b), (a), 1)
typedef uint16_t ggml_half;
typedef uint16_t ggml_fp16_t;
typedef struct { uint16_t bits; } ggml_bf16_t;
#define QK_K 256
#define K_SCALE_SIZE 12
#define QK1_0 128
#define QK2_0 64
#define QK4_0 32
#define QK4_1 32
#define QK5_0 32
#define QK5_1 32
#define QK8_0 32
#define QK8_1 32
#define QK4_NL 32
#define QK_MXFP4 32
#define QK_NVFP4 64
#define QK_NVFP4_SUB 16
#define IQ1S_DELTA 0.125f
#define IQ1M_DELTA 0.125f
typedef struct { ggml_half d; uint8_t qs[16]; } block_q1_0;
typedef struct { ggml_half d; uint8_t qs[16]; } block_q2_0;
typedef struct { ggml_half d; uint8_t qs[16]; } block_q4_0;
typedef struct { ggml_half d; ggml_half m; uint8_t qs[16]; } block_q4_1;
typedef struct { ggml_half d; uint8_t qh[4]; uint8_t qs[16]; } block_q5_0;
typedef struct { ggml_half d; ggml_half m; uint8_t qh[4]; uint8_t qs[16]; } block_q5_1;
typedef struct { ggml_half d; int8_t qs[32]; } block_q8_0;
typedef struct { ggml_half d; ggml_half s; int8_t qs[32]; } block_q8_1;
typedef struct { uint8_t e; uint8_t qs[16]; } block_mxfp4;
typedef struct { uint8_t d[4]; uint8_t qs[32]; } block_nvfp4;
typedef struct { uint8_t qs[48]; uint8_t qh[4]; ggml_half d; } block_tq1_0;
typedef struct { uint8_t qs[64]; ggml_half d; } block_tq2_0;
typedef struct { uint8_t scales[16]; uint8_t qs[64]; ggml_half d; ggml_half dmin; } block_q2_K;
typedef struct { uint8_t hmask[32]; uint8_t qs[64]; uint8_t scales[12]; ggml_half d; } block_q3_K;
typedef struct { ggml_half d; ggml_half dmin; uint8_t scales[12]; uint8_t qs[128]; } block_q4_K;
typedef struct { ggml_half d; ggml_half dmin; uint8_t scales[12]; uint8_t qh[32]; uint8_t qs[128]; } block_q5_K;
typedef struct { uint8_t ql[128]; uint8_t qh[64]; int8_t scales[16]; ggml_half d; } block_q6_K;
typedef struct { float d; int8_t qs[256]; int16_t bsums[16]; } block_q8_K;
typedef struct { ggml_half d; uint16_t qs[32]; } block_iq2_xxs;
typedef struct { ggml_half d; uint16_t qs[32]; uint8_t scales[8]; } block_iq2_xs;
typedef struct { ggml_half d; uint8_t qs[64]; uint8_t qh[8]; uint8_t scales[8]; } block_iq2_s;
typedef struct { ggml_half d; uint8_t qs[96]; } block_iq3_xxs;
typedef struct { ggml_half d; uint8_t qs[64]; uint8_t qh[8]; uint8_t signs[32]; uint8_t scales[4]; } block_iq3_s;
typedef struct { ggml_half d; uint8_t qs[32]; uint16_t qh[8]; } block_iq1_s;
typedef struct { uint8_t qs[32]; uint8_t qh[16]; uint8_t scales[8]; } block_iq1_m;
typedef struct { ggml_half d; uint8_t qs[16]; } block_iq4_nl;
typedef struct { ggml_half d; uint16_t scales_h; uint8_t scales_l[4]; uint8_t qs[128]; } block_iq4_xs;
typedef union { ggml_half f16; uint16_t u16; } iq1m_scale_t;
static const int8_t kvalues_iq4nl[16] = {
  -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };
static const int8_t kvalues_mxfp4[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };
static const int8_t kvalues_fp4[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };
static const uint8_t kmask_iq2xs[8] = { 1, 2, 4, 8, 16, 32, 64, 128 };
static inline float ggml_e8m0_to_fp32_half(uint8_t x) {
  uint32_t bits = x < 2 ? 0x00200000u << x : (uint32_t)(x - 1) << 23;
  float made;
  memcpy(&made, &bits, 4);
  return made;
}
#define GGML_E8M0_TO_FP32_HALF(x) ggml_e8m0_to_fp32_half(x)
static inline float ggml_ue4m3_to_fp32(uint8_t x) {
  if (x == 0 || x == 0x7F) return 0.0f;
  int exp = (x >> 3) & 0xF;
  int man = x & 0x7;
  if (exp == 0) return (float)man * 0.0009765625f;
  uint32_t bits = ((uint32_t)(exp + 119) << 23) | ((uint32_t)man << 20);
  float made;
  memcpy(&made, &bits, 4);
  return made;
}
static inline float ggml_bf16_to_fp32(ggml_bf16_t h) {
  uint32_t bits = (uint32_t)h.bits << 16;
  float made;
  memcpy(&made, &bits, 4);
  return made;
}
#define GGML_BF16_TO_FP32(x) ggml_bf16_to_fp32(x)
static inline ggml_bf16_t ggml_fp32_to_bf16(float s) {
  uint32_t bits;
  memcpy(&bits, &s, 4);
  ggml_bf16_t h;
  h.bits = (bits + (0x7fff + ((bits >> 16) & 1))) >> 16;
  return h;
}
#define GGML_FP32_TO_BF16(x) ggml_fp32_to_bf16(x)
#ifdef __aarch64__
typedef int16x8x2_t ggml_int16x8x2_t;
typedef uint8x16x2_t ggml_uint8x16x2_t;
typedef uint8x16x4_t ggml_uint8x16x4_t;
typedef int8x16x2_t ggml_int8x16x2_t;
typedef int8x16x4_t ggml_int8x16x4_t;
#define ggml_vld1q_s16_x2 vld1q_s16_x2
#define ggml_vld1q_u8_x2 vld1q_u8_x2
#define ggml_vld1q_u8_x4 vld1q_u8_x4
#define ggml_vld1q_s8_x2 vld1q_s8_x2
#define ggml_vld1q_s8_x4 vld1q_s8_x4
#define ggml_vqtbl1q_s8 vqtbl1q_s8
#define ggml_vqtbl1q_u8 vqtbl1q_u8
#define ggml_vld1q_u32(w, x, y, z)                                  \
  vcombine_u32(vcreate_u32((w) + ((uint64_t)(x) << 32)), vcreate_u32((y) + ((uint64_t)(z) << 32)))
#define ggml_vdotq_s32(a, b, c) vdotq_s32(a, b, c)
#endif
