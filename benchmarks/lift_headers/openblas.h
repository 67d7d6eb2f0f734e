/* What the headers of OpenBLAS say, as far as its kernels need it. */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
typedef long BLASLONG;
typedef uint16_t bfloat16;
#define IFLOAT bfloat16
#define ZERO 0.0f
#define ONE 1.0f
