// Element-wise addition with AVX, unrolled by two, in the style of generated micro-kernels.
#include <assert.h>
#include <immintrin.h>

void kn_add_avx_u16(
    size_t batch,
    const float* a,
    const float* b,
    float* out,
    const struct kn_default_params params[restrict KN_MIN_ELEMENTS(1)]) KN_OOB_READS
{
  assert(batch != 0);
  assert(a != NULL);

  static const int32_t mask_table[14] = {-1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0};

  for (; batch >= 16 * sizeof(float); batch -= 16 * sizeof(float)) {
    const __m256 va0 = _mm256_loadu_ps(a);
    const __m256 va1 = _mm256_loadu_ps(a + 8);
    a += 16;

    __m256 vacc0 = _mm256_add_ps(va0, _mm256_loadu_ps(b));
    __m256 vacc1 = _mm256_add_ps(va1, _mm256_loadu_ps(b + 8));
    b += 16;

    _mm256_storeu_ps(out, vacc0);
    _mm256_storeu_ps(out + 8, vacc1);
    out += 16;
  }
  for (; batch >= 8 * sizeof(float); batch -= 8 * sizeof(float)) {
    const __m256 va = _mm256_loadu_ps(a);
    a += 8;
    __m256 vacc = _mm256_add_ps(va, _mm256_loadu_ps(b));
    b += 8;
    _mm256_storeu_ps(out, vacc);
    out += 8;
  }
  if KN_UNLIKELY(batch != 0) {
    assert(batch <= 7 * sizeof(float));
    const __m256i vmask =
        _mm256_loadu_si256((const __m256i*) ((uintptr_t) &mask_table[7] - batch));
    const __m256 va = _mm256_maskload_ps(a, vmask);
    const __m256 vb = _mm256_maskload_ps(b, vmask);
    __m256 vacc = _mm256_add_ps(va, vb);
    __m128 low = _mm256_castps256_ps128(vacc);
    if (batch & (4 * sizeof(float))) {
      _mm_storeu_ps(out, low);
      low = _mm256_extractf128_ps(vacc, 1);
      out += 4;
    }
    if (batch & (2 * sizeof(float))) {
      _mm_storel_pi((__m64*) out, low);
      low = _mm_movehl_ps(low, low);
      out += 2;
    }
    if (batch & (1 * sizeof(float))) {
      _mm_store_ss(out, low);
    }
  }
}
