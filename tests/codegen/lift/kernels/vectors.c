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

// Loops after which something still reads what they leave changed.

void rows_in_a_row(long n, const float* x, float* y) {
    for (int row = 0; row < 2; row++) {
        long left = n / 2;
        for (; left >= 8; left -= 8) {
            _mm256_storeu_ps(y, _mm256_sqrt_ps(_mm256_loadu_ps(x)));
            x += 8;
            y += 8;
        }
    }
}

void in_a_block(long n, const float* x, float* y) {
    float* first = y;
    {
        for (; n >= 8; n -= 8) {
            _mm256_storeu_ps(y, _mm256_sqrt_ps(_mm256_loadu_ps(x)));
            x += 8;
            y += 8;
        }
    }
    *first = (float) n;
}

void beginning_of_another(long n, const float* x, float* y) {
    float* first = y;
    for (int other = 0; n >= 8; n -= 8) {
        _mm256_storeu_ps(y, _mm256_sqrt_ps(_mm256_loadu_ps(x)));
        x += 8;
        y += 8;
    }
    *first = (float) n;
}

void twice_as_far(long n, const float* x, float* y) {
    const long half = n / 2;
    __m256 acc = _mm256_setzero_ps();
    for (long i = 0; i + 8 <= half; i += 8) {
        acc = _mm256_add_ps(acc, _mm256_loadu_ps(x + i));
        x += 8;
    }
    float parts[8], sum = 0.0f;
    _mm256_storeu_ps(parts, acc);
    for (int k = 0; k < 8; k++) sum += parts[k];
    *y = sum;
}
