/* Helpers of x86-64-amx. A tile is 16 rows of 64 bytes: 16 x 16 sums, 16 rows of A by 32 values of K, or 32 values of K by
 * 16 columns of B in pairs. Registers 0 to 3 are sums, by rows, then panels; 4 and 5 rows of A; 6 and 7 panels of B.
 * Compilers do not know that tiles are loaded from memory: a fence keeps what is stored before where it is. */

static inline void dt_tiles_begin(void) {
  uint8_t config[64];
  for (int64_t i = 0; i < 64; ++i) {
    config[i] = 0;
  }
  config[0] = 1;
  for (int64_t i = 0; i < 8; ++i) {
    config[16 + 2 * i] = 64;
    config[48 + i] = 16;
  }
  __atomic_signal_fence(5);
  _tile_loadconfig(config);
}

/* The products of 32 values of K: of 16 rows, or of 32, and of two panels. */
static inline void dt_tile_step(int64_t rows, const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t panel_stride) {
  _tile_loadd(6, b, 64);
  _tile_loadd(4, a, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, b + panel_stride, 64);
  _tile_dpbf16ps(1, 4, 7);
  if (rows > 16) {
    _tile_loadd(5, a + a_stride, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

/* The first n <= 32 values of K of a panel, zeros after them. */
static inline void dt_tile_tail(uint16_t* out, const uint16_t* b, int64_t n) {
  for (int64_t i = 0; i < 16; ++i) {
    if (2 * i < n) {
      _mm512_storeu_si512(out + 32 * i, _mm512_loadu_si512(b + 32 * i));
    } else {
      _mm512_storeu_si512(out + 32 * i, _mm512_setzero_si512());
    }
  }
}

/* s (+)= the products of the rows at a, in tiles [K / 32][16][32], those past the 16th a_stride further, and of k values of two panels. */
static inline void dt_tile_dots(float* s, int64_t lds, int64_t begun, int64_t rows, int64_t k, const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t panel_stride, const uint16_t* ahead, int64_t lines) {
  float* lower = s + 16 * lds;
  const int64_t row_bytes = 4 * lds;
  const int64_t whole = k / 32;
  __atomic_signal_fence(5);
  if (begun > 0) {
    _tile_loadd(0, s, row_bytes);
    _tile_loadd(1, s + 16, row_bytes);
    if (rows > 16) {
      _tile_loadd(2, lower, row_bytes);
      _tile_loadd(3, lower + 16, row_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < whole; ++i) {
    for (int64_t line = i * lines; line < (i + 1) * lines; ++line) {
      _mm_prefetch((const char*)(ahead + 32 * line), 2);
      _mm_prefetch((const char*)(ahead + panel_stride + 32 * line), 2);
    }
    dt_tile_step(rows, a + 512 * i, a_stride, b + 512 * i, panel_stride);
  }
  if (k % 32 > 0) {
    uint16_t tail[1024];
    dt_tile_tail(tail, b + 512 * whole, k % 32);
    dt_tile_tail(tail + 512, b + panel_stride + 512 * whole, k % 32);
    __atomic_signal_fence(5);
    dt_tile_step(rows, a + 512 * whole, a_stride, tail, 512);
  }
  _tile_stored(0, s, row_bytes);
  _tile_stored(1, s + 16, row_bytes);
  if (rows > 16) {
    _tile_stored(2, lower, row_bytes);
    _tile_stored(3, lower + 16, row_bytes);
  }
}
