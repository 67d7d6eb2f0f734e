/* Helpers of x86-64-avx512. `n` counts lanes used, 0 <= n <= 16; the other lanes load as 0 and are not stored. */

static inline __mmask16 dt_mask(int64_t n) {
  return (__mmask16)((1u << n) - 1u);
}

static inline __m512 dt_widen_bf16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/* To nearest even; NaN becomes 0x7fc0. */
static inline __m256i dt_narrow_bf16(__m512 v) {
  __m512i bits = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc0)));
}

/* c + a . b of pairs; the upper products first. */
static inline __m512 dt_vdot_pairs(__m512i a, __m512i b, __m512 c) {
  __m512i upper = _mm512_set1_epi32(-65536);
  __m512 sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, upper)), _mm512_castsi512_ps(_mm512_and_si512(b, upper)), c);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
}

/* Products of the bytes of w, 0 to 127, or 128 where it is a magnitude, and of x, -127 to 127: neighbours' sums fit 16 bits. */
static inline __m512i dt_vdot_quads(__m512i w, __m512i x, __m512i acc) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
}

/* The bytes of x, negated where those of w are below 0. */
static inline __m512i dt_with_sign(__m512i x, __m512i w) {
  return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
}

/* Four sums at once: halves first, so that the shuffles are of 8 lanes. */
static inline __m256 dt_fold(__m512 v) {
  return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}

static inline void dt_vreduce_add4(float* p, __m512 a, __m512 b, __m512 c, __m512 d) {
  __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(dt_fold(a), dt_fold(b)), _mm256_hadd_ps(dt_fold(c), dt_fold(d)));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

/* Sixteen sums at once: two registers become one whose 4-lane blocks, then lanes, belong to either. What can be is blended: shuffles are few and slow. */
static inline __m512 dt_join_halves(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
}

static inline __m512 dt_join_blocks(__m512 a, __m512 b, __m512 c, __m512 d) {
  __m512 x = dt_join_halves(a, b);
  __m512 y = dt_join_halves(c, d);
  __m512 other = _mm512_mask_blend_ps(0x0f0f, x, y);
  return _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, x, y), _mm512_shuffle_f32x4(other, other, 0xb1));
}

static inline __m512 dt_join_pairs(__m512 x, __m512 y) {
  return _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, x, y), _mm512_shuffle_ps(x, y, 0x4e));
}

static inline void dt_vreduce_add16(float* p, int64_t stride, __m512 v0, __m512 v1, __m512 v2, __m512 v3, __m512 v4, __m512 v5, __m512 v6, __m512 v7, __m512 v8, __m512 v9, __m512 v10, __m512 v11, __m512 v12, __m512 v13, __m512 v14, __m512 v15) {
  __m512 x = dt_join_pairs(dt_join_blocks(v0, v8, v4, v12), dt_join_blocks(v2, v10, v6, v14));
  __m512 y = dt_join_pairs(dt_join_blocks(v1, v9, v5, v13), dt_join_blocks(v3, v11, v7, v15));
  __m512 other = _mm512_mask_blend_ps(0x5555, x, y);
  __m512 sums = _mm512_add_ps(_mm512_mask_blend_ps(0xaaaa, x, y), _mm512_permute_ps(other, 0xb1));
  _mm_storeu_ps(p, _mm512_castps512_ps128(sums));
  _mm_storeu_ps(p + stride, _mm512_extractf32x4_ps(sums, 1));
  _mm_storeu_ps(p + 2 * stride, _mm512_extractf32x4_ps(sums, 2));
  _mm_storeu_ps(p + 3 * stride, _mm512_extractf32x4_ps(sums, 3));
}
