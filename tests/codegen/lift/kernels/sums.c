// Sums kept in vectors, joined by hand in the ways people write.
#include <immintrin.h>

static inline float sum_of(__m256 v) {
    __m128 low = _mm256_castps256_ps128(v);
    __m128 high = _mm256_extractf128_ps(v, 1);
    low = _mm_add_ps(low, high);
    low = _mm_add_ps(low, _mm_movehl_ps(low, low));
    low = _mm_add_ss(low, _mm_shuffle_ps(low, low, 0x55));
    return _mm_cvtss_f32(low);
}

void dot(const float* x, const float* y, float* out, long n) {
    __m256 acc0 = _mm256_setzero_ps();
    __m256 acc1 = _mm256_setzero_ps();
    long i = 0;
    for (; i + 16 <= n; i += 16) {
        acc0 = _mm256_fmadd_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i), acc0);
        acc1 = _mm256_fmadd_ps(_mm256_loadu_ps(x + i + 8), _mm256_loadu_ps(y + i + 8), acc1);
    }
    acc0 = _mm256_add_ps(acc0, acc1);
    float sum = sum_of(acc0);
    for (; i < n; i++) sum += x[i] * y[i];
    *out = sum;
}

void norm_avx(const float* x, const float* scale, float* out, long n) {
    __m256 acc = _mm256_setzero_ps();
    for (long i = 0; i < n; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        acc = _mm256_add_ps(acc, _mm256_mul_ps(v, v));
    }
    float parts[8];
    _mm256_storeu_ps(parts, acc);
    float sum = 0.0f;
    for (int k = 0; k < 8; k++) sum += parts[k];
    const float factor = 1.0f / sqrtf(sum / (float) n + 1e-5f);
    const __m256 all = _mm256_set1_ps(factor);
    for (long i = 0; i <= n - 8; i += 8) {
        __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), all);
        _mm256_storeu_ps(out + i, _mm256_mul_ps(v, _mm256_loadu_ps(scale + i)));
    }
}

void wrong_sum(const float* x, float* out, long n) {
    __m256 acc = _mm256_setzero_ps();
    for (long i = 0; i + 8 <= n; i += 8) {
        acc = _mm256_sub_ps(_mm256_loadu_ps(x + i), acc);
    }
    out[0] = sum_of(acc);
}
