// A 1x32 GEMM micro-kernel with AVX-512 on packed weights; the remainder is stored under masks.
#include <immintrin.h>

void kn_gemm_1x32_avx512f(
    size_t mr, size_t nc, size_t kc,
    const float* restrict a, size_t a_stride,
    const float* restrict w,
    float* restrict c, size_t cm_stride, size_t cn_stride,
    const struct kn_minmax_params* restrict params)
{
  const float* a0 = a;
  float* c0 = c;
  do {
    __m512 vacc0x0 = _mm512_load_ps(w);
    __m512 vacc0x1 = _mm512_load_ps(w + 16);
    w += 32;
    size_t k = kc;
    do {
      const __m512 va0 = _mm512_set1_ps(*a0);
      vacc0x0 = _mm512_fmadd_ps(va0, _mm512_load_ps(w), vacc0x0);
      vacc0x1 = _mm512_fmadd_ps(va0, _mm512_load_ps(w + 16), vacc0x1);
      w += 32;
      a0 += 1;
      k -= sizeof(float);
    } while (k != 0);

    const __m512 vmin = _mm512_set1_ps(params->scalar.min);
    const __m512 vmax = _mm512_set1_ps(params->scalar.max);
    vacc0x0 = _mm512_min_ps(vmax, _mm512_max_ps(vmin, vacc0x0));
    vacc0x1 = _mm512_min_ps(vmax, _mm512_max_ps(vmin, vacc0x1));

    if KN_LIKELY(nc >= 32) {
      _mm512_storeu_ps(c0, vacc0x0);
      _mm512_storeu_ps(c0 + 16, vacc0x1);
      c0 = (float*) ((uintptr_t) c0 + cn_stride);
      a0 = (const float*) ((uintptr_t) a0 - kc);
      nc -= 32;
    } else {
      const __mmask16 vmask0 = _cvtu32_mask16((uint32_t) (((UINT64_C(1) << nc) - 1) >> 0));
      const __mmask16 vmask1 = _cvtu32_mask16((uint32_t) (((UINT64_C(1) << nc) - 1) >> 16));
      _mm512_mask_storeu_ps(c0, vmask0, vacc0x0);
      _mm512_mask_storeu_ps(c0 + 16, vmask1, vacc0x1);
      nc = 0;
    }
  } while (nc != 0);
}
