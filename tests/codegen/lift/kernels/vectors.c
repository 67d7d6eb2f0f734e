// Vector loops that must not be mistaken for elementwise ones.
#include <immintrin.h>

void neighbours(long n, const float* x, float* y) {
    for (; n >= 8; n -= 8) {
        _mm256_storeu_ps(y, _mm256_add_ps(_mm256_loadu_ps(x), _mm256_loadu_ps(x + 1)));
        x += 8;
        y += 8;
    }
}

void reversed(long n, const float* x, float* y) {
    for (; n >= 8; n -= 8) {
        const __m256 v = _mm256_permute_ps(_mm256_loadu_ps(x), 0x1b);
        _mm256_storeu_ps(y, v);
        x += 8;
        y += 8;
    }
}

void different_tail(long n, const float* x, float* y) {
    for (; n >= 8; n -= 8) {
        const __m256 v = _mm256_loadu_ps(x);
        _mm256_storeu_ps(y, _mm256_add_ps(v, v));
        x += 8;
        y += 8;
    }
    for (; n >= 1; n -= 1) {
        *y = *x * 3.0f;
        x += 1;
        y += 1;
    }
}

void long_tail(long n, const float* x, float* y) {
    for (; n >= 8; n -= 8) {
        _mm256_storeu_ps(y, _mm256_sqrt_ps(_mm256_loadu_ps(x)));
        x += 8;
        y += 8;
    }
    if (n != 0) {
        _mm256_storeu_ps(y, _mm256_sqrt_ps(_mm256_loadu_ps(x)));
    }
}

void fixed_place(long n, const float* x, float* y) {
    for (long i = 0; i + 8 <= n; i += 8) {
        const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(x));
        _mm256_storeu_ps(y + i, v);
    }
}
