/* The standard headers of programs that hold kernels. */
#include <ctype.h>
#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
typedef struct { size_t num_tokens; int *inputs; int *targets; size_t num_batches; } DataLoader;
