/* Plain C in the style of small inference programs. */
#include <math.h>

void norm(float* out, float* in, float* scale, int n) {
    float sum = 0.0f;
    for (int i = 0; i < n; i++) {
        sum += in[i] * in[i];
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

static inline float gate(float v) {
    return v / (1.0f + expf(-v));
}

void gated(float* out, const float* a, const float* b, long n) {
    for (long i = 0; i < n; ++i) {
        float left = a[i];
        left *= 1.0f / (1.0f + expf(-left));
        out[i] = left * b[i];
    }
}

void gated_by_call(float* out, const float* a, const float* b, long n) {
    for (long i = 0; i < n; ++i) out[i] = gate(a[i]) * b[i];
}

void clipped_range(float* out, const float* a, float low, float high, long n) {
    float least = a[0], most = a[0];
    for (long i = 0; i <= n - 1; i += 1) {
        float v = a[i] < low ? low : a[i];
        v = fminf(v, high);
        out[i + 2] = v;
        least = fminf(least, v);
        most = v > most ? v : most;
    }
    out[0] = least;
    out[1] = most;
}

void running_sum(float* out, const float* a, long n) {
    out[0] = a[0];
    for (long i = 1; i < n; i++) {
        out[i] = out[i - 1] + a[i];
    }
}

void copy_until_negative(float* out, const float* a, long n) {
    long i = 0;
    while (i < n && a[i] >= 0) {
        *out++ = a[i++];
    }
}

void scaled_rows(float* out, const float* a, const double* scale, long rows, long n) {
    for (long r = rows - 1; r >= 0; r--) {
        const float* row = a + r * n;
        float* to = &out[r * n];
        double s = scale[r] * 0.5;
        for (long c = 0; c < n; c++) {
            if (c == 3) continue;
            to[c] = (float) (row[c] * s);
        }
    }
}

void positive_then_all(float* out, const float* a, long n) {
    long kept;
    for (long i = 0; i < n; i++) out[i] = a[i] * 2.0f;
    for (long i = 0; i < n && a[i] > 0.0f; i++) out[i] = -out[i];
    for (kept = 0; kept < n; kept++) {
        if (a[kept] < 0.5f) break;
    }
    out[n] = (float) kept;
}

void extremes(float *out, const float *x, int n) {
  float most = x[0], least = x[0], above = x[0], below = x[0];
  for (int i = 1; i < n; i++) {
    most = most > x[i] ? most : x[i];
    least = least < x[i] ? least : x[i];
    above = x[i] > above ? x[i] : above;
    below = below > x[i] ? x[i] : below;
  }
  out[0] = most;
  out[1] = least;
  out[2] = above;
  out[3] = below;
}

void curves(float* out, const float* a, const float* b, long n) {
    for (long i = 0; i < n; i++) {
        out[i] = tanhf(a[i]) + erff(b[i]) * hypotf(a[i], b[i]) + log1pf(fabsf(b[i]))
                 + erfcf(a[i]) + atan2f(a[i], b[i]) + fmodf(b[i], 0.75f) + powf(fabsf(a[i]), b[i]);
    }
}

void whole_numbers(float* out, const float* a, long n) {
    for (long i = 0; i < n; i++) {
        float v = a[i] * 8.0f;
        out[i] = roundf(v) + 100.0f * floorf(v) + 1e4f * ceilf(v) + 3.0f * truncf(v) + rintf(v + 0.25f);
    }
}
