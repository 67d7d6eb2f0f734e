/* The ABI between tapes, kernels and the thread team. The runtime mirrors these structs with ctypes
 * (runtime/machine/abi.py); change them together and raise `abi` in kernels/<target>/index.json. */
#ifndef DOVETAIL_ABI_H
#define DOVETAIL_ABI_H
#include <stdint.h>

#define DT_ABI 11
#define DT_SCHEDULE_VALUES 9
#define DT_TIMES 5
#define DT_ORDERS 8
#define DT_MOST_SLOTS 32

/* One operand: an address, an integer or a double. */
typedef union dt_slot {
  void *p;
  int64_t i;
  double f;
} dt_slot;

/* A kernel as tapes call it: slots in the order of its parameters, schedule values, this thread, thread count. */
typedef void (*dt_kernel)(const dt_slot *slots, const int64_t *schedule, int64_t tid, int64_t nth);

/* One row of a schedule table: from m_lo on. `reduce` (or NULL) runs after a barrier with the same operands. */
typedef struct dt_row {
  int64_t m_lo;
  dt_kernel kernel;
  dt_kernel reduce;
  int64_t schedule[DT_SCHEDULE_VALUES];
} dt_row;

/* A product of `count` weights, `bytes` apart, and biases, `bias_bytes` apart: rows starts[g] .. starts[g + 1] of A and C
 * are of the g-th. The others say which slots hold what; all n_slots of them are few enough for DT_MOST_SLOTS. */
typedef struct dt_groups {
  int64_t count, bytes, bias_bytes;
  const int32_t *starts;
  int32_t n_slots, m, a, lda, b, bias, c, ldc;
} dt_groups;

/* One kernel call of a tape. rows are sorted by m_lo and the first has m_lo <= 1. */
typedef struct dt_entry {
  const dt_row *rows;
  int64_t n_rows;
  int32_t first_slot;
  int32_t m_arg;    /* index into args: M */
  int32_t skip_arg; /* index into args, skipped when that integer is 0; -1 = never */
  int32_t barrier;  /* wait for all earlier entries first */
  const dt_groups *groups; /* NULL = one weight. Its rows' `reduce` does not run */
} dt_entry;

/* slots[slot] = args[arg] (+ offset bytes, when it is an address), set at the start of every run. */
typedef struct dt_patch {
  int32_t slot;
  int32_t arg;
  int64_t offset;
} dt_patch;

/* A bound tape. One run at a time: `slots` is written by dt_run. */
typedef struct dt_tape {
  const dt_entry *entries;
  int64_t n_entries;
  dt_slot *slots;
  const dt_patch *patches;
  int64_t n_patches;
  const int32_t *stop; /* kernels are passed over once this is not 0; NULL = never */
} dt_tape;

typedef struct dt_team dt_team;

/* A team of n_threads, the caller included as thread 0. cpus[i] pins thread i (-1 or cpus == NULL: not pinned).
 * spin: iterations to spin at a barrier before sleeping. NULL when threads cannot be made. */
dt_team *dt_team_create(int64_t n_threads, const int32_t *cpus, int64_t spin);
/* Use the first `active` threads from now on, pinned to cpus; the others sleep and cost nothing. 0 on success;
 * -1 when one of cpus is not there (any more): its thread runs where the system likes. */
int dt_team_set_active(dt_team *team, int64_t active, const int32_t *cpus);
int64_t dt_team_size(const dt_team *team);
void dt_team_destroy(dt_team *team);
/* Run entries [first, last) of a tape on the first `most` of the active threads. 0 on success, -1 for a malformed call,
 * -2 when `stop` ended it early. times: NULL, or where to note when each thread came to an entry, began its kernel
 * after the barrier, ended it, and began and ended its reduction: [entry - first][thread][DT_TIMES], nanoseconds of
 * CLOCK_MONOTONIC. What did not take place stays as it was. */
int dt_run(dt_team *team, const dt_tape *tape, const dt_slot *args, int64_t first, int64_t last, int64_t most,
           int64_t *times);

/* Entries [first, last) of a tape for a thread of its own. Before, blocks begun[1] .. begun[begun[0]] of both pools,
 * block_bytes each, are set to zero. Written when it has run: what dt_run returned, or -3 where it was dropped, and when
 * it began and ended, nanoseconds of CLOCK_MONOTONIC. */
typedef struct dt_order {
  const dt_tape *tape;
  const dt_slot *args;
  int64_t first, last;
  char *pools[2];
  const int64_t *begun;
  int64_t block_bytes;
  int64_t status, times[2];
} dt_order;

/* A thread that runs orders on a team, in the order in which they are given, each once it has been released. */
typedef struct dt_runner dt_runner;

/* The thread keeps to cpus (none: wherever the system likes). NULL when it cannot be made. The team outlives it. */
dt_runner *dt_runner_create(dt_team *team, const int32_t *cpus, int64_t n_cpus);
void dt_runner_destroy(dt_runner *runner);
/* Take an order, which stays where it is until it has run; at most DT_ORDERS at once. Returns its number. */
uint32_t dt_runner_give(dt_runner *runner, dt_order *order);
/* The next order may run; for any thread, also as a function that a device's stream calls. */
void dt_runner_release(void *runner);
/* Return when the order of that number has run. */
void dt_runner_wait(dt_runner *runner, uint32_t number);
/* Return when nothing runs: orders that have not begun are dropped, and nobody may release them any more. */
void dt_runner_drop(dt_runner *runner);

/* A group of processes that add up their float32 values through shared memory (collective.c). */
typedef struct dt_comm dt_comm;

/* Bytes of zeroed memory that `ranks` processes share to reduce with up to `lanes` threads each; -1: not possible. */
int64_t dt_comm_bytes(int64_t ranks, int64_t lanes);
/* This process as `rank` of the group in `shared`. `peers` are sockets: when one hangs up, a rank has died.
 * spin: looks at another rank's mark before sleeping. NULL without memory or for impossible numbers. */
dt_comm *dt_comm_create(void *shared, int64_t rank, int64_t ranks, int64_t lanes, int64_t spin, const int32_t *peers,
                        int64_t n_peers);
void dt_comm_destroy(dt_comm *comm);
/* Make every all-reduce of the group, also those under way, return -1. */
void dt_comm_fail(dt_comm *comm);
/* The word that is not 0 once the group has failed. */
const int32_t *dt_comm_failed(const dt_comm *comm);
/* Replace x [rows][columns], rows `stride` apart, by its sum over the ranks; no values: wait for all ranks. Called by
 * threads tid of nth; all ranks call with equal rows and columns. 0, or -1 when the group has failed. */
int dt_all_reduce(dt_comm *comm, float *x, int64_t rows, int64_t columns, int64_t stride, int64_t tid, int64_t nth);
/* The same as tapes call it: slots comm, rows, columns, x, stride. */
void dt_entry_all_reduce(const dt_slot *slots, const int64_t *schedule, int64_t tid, int64_t nth);
/* Give every rank all columns of x, of which it has the r-th of `ranks` equal stretches of `units` units, `size`
 * columns each. */
int dt_all_gather(dt_comm *comm, float *x, int64_t rows, int64_t columns, int64_t stride, int64_t units, int64_t size,
                  int64_t tid, int64_t nth);
/* The same as tapes call it: slots comm, rows, columns, x, stride, units, size. */
void dt_entry_all_gather(const dt_slot *slots, const int64_t *schedule, int64_t tid, int64_t nth);

#endif
