/* What the headers of OpenBLAS say, as far as its kernels need it. */
#include <stddef.h>
#include <stdint.h>
typedef long BLASLONG;
