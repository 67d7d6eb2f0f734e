/* Helpers of x86-64-avx2. `n` counts lanes used, 0 <= n <= 8; the other lanes load as 0 and are not stored. */

static inline __m256i dt_mask(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline __m128i dt_load_n_u16(const uint16_t* p, int64_t n) {
  uint16_t t[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (int64_t i = 0; i < n; ++i) {
    t[i] = p[i];
  }
  return _mm_loadu_si128((const __m128i*)t);
}

static inline void dt_store_n_u16(uint16_t* p, __m128i v, int64_t n) {
  uint16_t t[8];
  _mm_storeu_si128((__m128i*)t, v);
  for (int64_t i = 0; i < n; ++i) {
    p[i] = t[i];
  }
}

static inline __m256 dt_widen_bf16(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

/* To nearest even; NaN becomes 0x7fc0. */
static inline __m128i dt_narrow_bf16(__m256 v) {
  __m256i bits = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  __m256i fixed = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(fixed), _mm256_extracti128_si256(fixed, 1));
}

#define DT_REDUCE(name) \
  static inline float dt_vreduce_##name(__m256 v) { \
    __m128 s = _mm_##name##_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); \
    s = _mm_##name##_ps(s, _mm_movehl_ps(s, s)); \
    return _mm_cvtss_f32(_mm_##name##_ss(s, _mm_movehdup_ps(s))); \
  }

DT_REDUCE(add)
DT_REDUCE(max)
DT_REDUCE(min)

/* c + a . b of pairs; the upper products first. */
static inline __m256 dt_vdot_pairs(__m256i a, __m256i b, __m256 c) {
  __m256i upper = _mm256_set1_epi32(-65536);
  __m256 sum = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper)), c);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), sum);
}

/* Products of the bytes of w, 0 to 127, or 128 where it is a magnitude, and of x, -127 to 127: neighbours' sums fit 16 bits. */
static inline __m256i dt_vdot_quads(__m256i w, __m256i x, __m256i acc) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}

/* The low byte of each lane. */
static inline void dt_vstore_i8(int8_t* p, __m256i v) {
  __m256i bytes = _mm256_shuffle_epi8(v, _mm256_set1_epi32(0x0c080400));
  __m128i low = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storel_epi64((__m128i*)p, low);
}

/* Four sums at once: neighbours are added within halves of 4 lanes, then the halves. */
static inline void dt_vreduce_add4(float* p, __m256 a, __m256 b, __m256 c, __m256 d) {
  __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

static inline void dt_vreduce_add16(float* p, int64_t stride, __m256 v0, __m256 v1, __m256 v2, __m256 v3, __m256 v4, __m256 v5, __m256 v6, __m256 v7, __m256 v8, __m256 v9, __m256 v10, __m256 v11, __m256 v12, __m256 v13, __m256 v14, __m256 v15) {
  dt_vreduce_add4(p, v0, v1, v2, v3);
  dt_vreduce_add4(p + stride, v4, v5, v6, v7);
  dt_vreduce_add4(p + 2 * stride, v8, v9, v10, v11);
  dt_vreduce_add4(p + 3 * stride, v12, v13, v14, v15);
}
