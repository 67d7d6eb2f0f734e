/* Helpers of cuda that are plain C: scalar loads, done by all lanes alike. */

static inline float dt_load_bf16(const uint16_t* p) {
  return dt_f32_of_bits((uint32_t)p[0] << 16);
}

static inline float dt_load_f16(const uint16_t* p) {
  return dt_f32_of_f16(p[0]);
}
