// Scaled difference between two limits, AVX-512, in the style of generated micro-kernels.
#include <assert.h>
#include <immintrin.h>

void kn_clamp_avx512f_u32(
    size_t batch,
    const float* a,
    const float* b,
    float* out,
    const struct kn_minmax_params* restrict params)
{
  assert(batch % sizeof(float) == 0);
  const __m512 vmin = _mm512_set1_ps(params->scalar.min);
  const __m512 vmax = _mm512_set1_ps(params->scalar.max);
  const __m512 vhalf = _mm512_set1_ps(0.5f);
  KN_FORCE_REALIZATION(vmin);

  for (; batch >= 32 * sizeof(float); batch -= 32 * sizeof(float)) {
    const __m512 va0 = _mm512_loadu_ps(a);
    const __m512 va1 = _mm512_loadu_ps(a + 16);
    a += 32;
    __m512 vacc0 = _mm512_fmadd_ps(va0, vhalf, _mm512_loadu_ps(b));
    __m512 vacc1 = _mm512_fmadd_ps(va1, vhalf, _mm512_loadu_ps(b + 16));
    b += 32;
    vacc0 = _mm512_max_ps(vmin, vacc0);
    vacc1 = _mm512_max_ps(vmin, vacc1);
    vacc0 = _mm512_min_ps(vmax, vacc0);
    vacc1 = _mm512_min_ps(vmax, vacc1);
    _mm512_storeu_ps(out, vacc0);
    _mm512_storeu_ps(out + 16, vacc1);
    out += 32;
  }
  for (; batch >= 16 * sizeof(float); batch -= 16 * sizeof(float)) {
    __m512 vacc = _mm512_fmadd_ps(_mm512_loadu_ps(a), vhalf, _mm512_loadu_ps(b));
    a += 16;
    b += 16;
    vacc = _mm512_min_ps(vmax, _mm512_max_ps(vmin, vacc));
    _mm512_storeu_ps(out, vacc);
    out += 16;
  }
  if KN_UNLIKELY(batch != 0) {
    batch >>= KN_LOG2_SIZEOF_FLOAT;
    const __mmask16 vmask = _cvtu32_mask16((uint32_t) ((UINT32_C(1) << batch) - UINT32_C(1)));
    const __m512 va = _mm512_maskz_loadu_ps(vmask, a);
    __m512 vacc = _mm512_fmadd_ps(va, vhalf, _mm512_maskz_loadu_ps(vmask, b));
    vacc = _mm512_min_ps(vmax, _mm512_max_ps(vmin, vacc));
    _mm512_mask_storeu_ps(out, vmask, vacc);
  }
}
