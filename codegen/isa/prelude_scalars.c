/* Helpers of all CPU targets: bfloat16, pairs of these and quads of bytes, one at a time. */

static inline float dt_load_bf16(const uint16_t* p) {
  return dt_f32_of_bits((uint32_t)p[0] << 16);
}

/* To nearest even; NaN becomes 0x7fc0. */
static inline void dt_store_bf16(uint16_t* p, float x) {
  uint32_t bits = dt_bits_of_f32(x);
  p[0] = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* A bfloat16 and the next one, as the lower and upper half of an integer. */
static inline int32_t dt_load_pair(const uint16_t* p) {
  return (int32_t)((uint32_t)p[0] | (uint32_t)p[1] << 16);
}

/* Four bytes as one integer, the first lowest. */
static inline int32_t dt_load_quad(const uint8_t* p) {
  return (int32_t)((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
}
