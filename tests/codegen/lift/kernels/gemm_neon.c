// A 1x8 GEMM micro-kernel with NEON on packed weights, two steps of k at once by lanes.
#include <arm_neon.h>

void kn_gemm_1x8_neonfma(
    size_t mr, size_t nc, size_t kc,
    const float* restrict a, size_t a_stride,
    const float* restrict w,
    float* restrict c, size_t cm_stride, size_t cn_stride,
    const struct kn_minmax_params* restrict params)
{
  const float* a0 = a;
  float* c0 = c;
  do {
    float32x4_t vacc0x0 = vld1q_f32(w); w += 4;
    float32x4_t vacc0x1 = vld1q_f32(w); w += 4;
    size_t k = kc;
    for (; k >= 2 * sizeof(float); k -= 2 * sizeof(float)) {
      const float32x2_t va0 = vld1_f32(a0); a0 += 2;
      const float32x4_t vb0 = vld1q_f32(w); w += 4;
      const float32x4_t vb1 = vld1q_f32(w); w += 4;
      vacc0x0 = vfmaq_lane_f32(vacc0x0, vb0, va0, 0);
      vacc0x1 = vfmaq_lane_f32(vacc0x1, vb1, va0, 0);
      const float32x4_t vb2 = vld1q_f32(w); w += 4;
      const float32x4_t vb3 = vld1q_f32(w); w += 4;
      vacc0x0 = vfmaq_lane_f32(vacc0x0, vb2, va0, 1);
      vacc0x1 = vfmaq_lane_f32(vacc0x1, vb3, va0, 1);
    }
    if KN_UNLIKELY(k != 0) {
      const float32x4_t va0 = vld1q_dup_f32(a0); a0 += 1;
      const float32x4_t vb0 = vld1q_f32(w); w += 4;
      const float32x4_t vb1 = vld1q_f32(w); w += 4;
      vacc0x0 = vfmaq_f32(vacc0x0, va0, vb0);
      vacc0x1 = vfmaq_f32(vacc0x1, va0, vb1);
    }
    const float32x4_t vmax = vdupq_n_f32(params->scalar.max);
    const float32x4_t vmin = vdupq_n_f32(params->scalar.min);
    vacc0x0 = vmaxq_f32(vminq_f32(vacc0x0, vmax), vmin);
    vacc0x1 = vmaxq_f32(vminq_f32(vacc0x1, vmax), vmin);

    if KN_LIKELY(nc >= 8) {
      vst1q_f32(c0, vacc0x0);
      vst1q_f32(c0 + 4, vacc0x1);
      c0 = (float*) ((uintptr_t) c0 + cn_stride);
      a0 = (const float*) ((uintptr_t) a0 - kc);
      nc -= 8;
    } else {
      if (nc & 4) {
        vst1q_f32(c0, vacc0x0); c0 += 4;
        vacc0x0 = vacc0x1;
      }
      float32x2_t low = vget_low_f32(vacc0x0);
      if (nc & 2) {
        vst1_f32(c0, low); c0 += 2;
        low = vget_high_f32(vacc0x0);
      }
      if (nc & 1) {
        vst1_lane_f32(c0, low, 0);
      }
      nc = 0;
    }
  } while (nc != 0);
}
