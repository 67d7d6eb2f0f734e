// A 2x16 GEMM micro-kernel with FMA3 on packed weights, in the style of generated ones.
#include <assert.h>
#include <immintrin.h>

void kn_gemm_2x16_fma3(
    size_t mr, size_t nc, size_t kc,
    const float* restrict a, size_t a_stride,
    const float* restrict w,
    float* restrict c, size_t cm_stride, size_t cn_stride,
    const struct kn_minmax_params* restrict params)
{
  assert(mr != 0 && mr <= 2);
  assert(nc != 0);
  const float* a0 = a;
  float* c0 = c;
  const float* a1 = (const float*) ((uintptr_t) a0 + a_stride);
  float* c1 = (float*) ((uintptr_t) c0 + cm_stride);
  if KN_UNPREDICTABLE(mr != 2) {
    a1 = a0;
    c1 = c0;
  }
  const __m256 vmin = _mm256_set1_ps(params->scalar.min);
  const __m256 vmax = _mm256_set1_ps(params->scalar.max);

  do {
    __m256 vacc0x0 = _mm256_load_ps(w + 0);
    __m256 vacc0x1 = _mm256_load_ps(w + 8);
    __m256 vacc1x0 = vacc0x0;
    __m256 vacc1x1 = vacc0x1;
    w += 16;

    size_t k = kc;
    do {
      const __m256 va0 = _mm256_broadcast_ss(a0);
      a0 += 1;
      const __m256 va1 = _mm256_broadcast_ss(a1);
      a1 += 1;
      const __m256 vb0 = _mm256_load_ps(w);
      const __m256 vb1 = _mm256_load_ps(w + 8);
      w += 16;
      vacc0x0 = _mm256_fmadd_ps(va0, vb0, vacc0x0);
      vacc1x0 = _mm256_fmadd_ps(va1, vb0, vacc1x0);
      vacc0x1 = _mm256_fmadd_ps(va0, vb1, vacc0x1);
      vacc1x1 = _mm256_fmadd_ps(va1, vb1, vacc1x1);
      k -= sizeof(float);
    } while (k != 0);

    vacc0x0 = _mm256_min_ps(vmax, _mm256_max_ps(vmin, vacc0x0));
    vacc1x0 = _mm256_min_ps(vmax, _mm256_max_ps(vmin, vacc1x0));
    vacc0x1 = _mm256_min_ps(vmax, _mm256_max_ps(vmin, vacc0x1));
    vacc1x1 = _mm256_min_ps(vmax, _mm256_max_ps(vmin, vacc1x1));

    if KN_LIKELY(nc >= 16) {
      _mm256_storeu_ps(c0, vacc0x0);
      _mm256_storeu_ps(c0 + 8, vacc0x1);
      c0 = (float*) ((uintptr_t) c0 + cn_stride);
      _mm256_storeu_ps(c1, vacc1x0);
      _mm256_storeu_ps(c1 + 8, vacc1x1);
      c1 = (float*) ((uintptr_t) c1 + cn_stride);
      a0 = (const float*) ((uintptr_t) a0 - kc);
      a1 = (const float*) ((uintptr_t) a1 - kc);
      nc -= 16;
    } else {
      if (nc & 8) {
        _mm256_storeu_ps(c0, vacc0x0);
        _mm256_storeu_ps(c1, vacc1x0);
        vacc0x0 = vacc0x1;
        vacc1x0 = vacc1x1;
        c0 += 8;
        c1 += 8;
      }
      __m128 low0 = _mm256_castps256_ps128(vacc0x0);
      __m128 low1 = _mm256_castps256_ps128(vacc1x0);
      if (nc & 4) {
        _mm_storeu_ps(c0, low0);
        _mm_storeu_ps(c1, low1);
        low0 = _mm256_extractf128_ps(vacc0x0, 1);
        low1 = _mm256_extractf128_ps(vacc1x0, 1);
        c0 += 4;
        c1 += 4;
      }
      if (nc & 2) {
        _mm_storel_pi((__m64*) c0, low0);
        _mm_storel_pi((__m64*) c1, low1);
        low0 = _mm_movehl_ps(low0, low0);
        low1 = _mm_movehl_ps(low1, low1);
        c0 += 2;
        c1 += 2;
      }
      if (nc & 1) {
        _mm_store_ss(c0, low0);
        _mm_store_ss(c1, low1);
      }
      nc = 0;
    }
  } while (nc != 0);
}
