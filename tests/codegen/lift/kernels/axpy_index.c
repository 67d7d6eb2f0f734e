// Counted by an index: vectors of eight, then the rest one by one.
#include <immintrin.h>

void axpy(long n, float alpha, const float* x, float* y) {
    __m256 va = _mm256_set1_ps(alpha);
    long i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 vy = _mm256_loadu_ps(y + i);
        vy = _mm256_fmadd_ps(va, _mm256_loadu_ps(&x[i]), vy);
        _mm256_storeu_ps(y + i, vy);
    }
    for (; i < n; i++) {
        y[i] = alpha * x[i] + y[i];
    }
}

void whole_vectors(long n, const float* x, float* y) {
    for (long i = 0; i <= n - 8; i += 8) {
        _mm256_storeu_ps(y + i, _mm256_sub_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
    }
}
