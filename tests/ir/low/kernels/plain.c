/* Plain C in the style of small inference programs. */
#include <math.h>
#include <stdint.h>

#define SQUARE(v) ((v) * (v))

void norm(float* out, float* in, float* scale, int n) {
    // mean of squares
    float sum = 0.0f;
    for (int i = 0; i < n; i++) {
        sum += SQUARE(in[i]);
    }
    sum /= n;
    sum += 1e-6f;
    sum = 1.0f / sqrtf(sum);
    for (int i = 0; i < n; i++) out[i] = scale[i] * (sum * in[i]);
}

void probabilities(float* v, int n) {
    float top = v[0];
    for (int i = 1; i < n; i++) {
        if (v[i] > top) {
            top = v[i];
        }
    }
    float total = 0.0f;
    for (int i = 0; i < n; i++) {
        v[i] = expf(v[i] - top);
        total += v[i];
    }
    for (int i = 0; i < n; i++) {
        v[i] /= total;
    }
}

void product(float* out, float* x, float* w, int n, int d) {
    int i;
    #pragma omp parallel for private(i)
    for (i = 0; i < d; i++) {
        float sum = 0.0f;
        for (int j = 0; j < n; j++) {
            sum += w[i * n + j] * x[j];
        }
        out[i] = sum;
    }
}

static inline uint32_t mix(uint32_t state) {
    do {
        state ^= state >> 13, state *= 0x5bd1e995u;
    } while (!(state & 1u) && state != 0);
    return state ? state : ~0u;
}
