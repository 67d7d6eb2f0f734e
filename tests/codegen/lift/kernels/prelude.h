#include <stddef.h>
#include <stdint.h>

// What the headers of a third-party kernel library would say.
#define KN_LIKELY(condition) (__builtin_expect(!!(condition), 1))
#define KN_UNLIKELY(condition) (__builtin_expect(!!(condition), 0))
#define KN_UNPREDICTABLE(condition) (condition)
#define KN_MIN_ELEMENTS(count) static count
#define KN_OOB_READS
#define KN_RESTRICT restrict
#define KN_FORCE_REALIZATION(x)
#define KN_LOG2_SIZEOF_FLOAT 2

struct kn_default_params { char unused; };
struct kn_minmax_params { struct { float min; float max; } scalar; };
