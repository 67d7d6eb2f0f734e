// Multiplication by one scalar with NEON, unrolled by two; reads past the end, writes not.
#include <arm_neon.h>

void kn_mulc_neon_u8(
    size_t batch,
    const float* a,
    const float* b,
    float* out,
    const struct kn_default_params params[restrict KN_MIN_ELEMENTS(1)]) KN_OOB_READS
{
  const float32x4_t vb = vld1q_dup_f32(b);

  for (; batch >= 8 * sizeof(float); batch -= 8 * sizeof(float)) {
    const float32x4_t va0 = vld1q_f32(a); a += 4;
    const float32x4_t va1 = vld1q_f32(a); a += 4;
    vst1q_f32(out, vmulq_f32(va0, vb)); out += 4;
    vst1q_f32(out, vmulq_f32(va1, vb)); out += 4;
  }
  for (; batch >= 4 * sizeof(float); batch -= 4 * sizeof(float)) {
    const float32x4_t va = vld1q_f32(a); a += 4;
    vst1q_f32(out, vmulq_f32(va, vb)); out += 4;
  }
  if KN_UNLIKELY(batch != 0) {
    const float32x4_t vacc = vmulq_f32(vld1q_f32(a), vb);
    float32x2_t low = vget_low_f32(vacc);
    if (batch & (2 * sizeof(float))) {
      vst1_f32(out, low); out += 2;
      low = vget_high_f32(vacc);
    }
    if (batch & (1 * sizeof(float))) {
      vst1_lane_f32(out, low, 0);
    }
  }
}
