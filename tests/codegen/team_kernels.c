/* Kernels that make a missing barrier, a wrong row or a wrong order visible. */
#include "abi.h"
#include <stdatomic.h>

int64_t dt_abi(void) { return DT_ABI; }

/* slots: cells, step. Every thread writes the step into its own cell. */
void write_cell(const dt_slot *s, const int64_t *schedule, int64_t tid, int64_t nth) {
  (void)schedule, (void)nth;
  ((int64_t *)s[0].p)[tid * 8] = s[1].i;
}

/* slots: cells, step, faults. Every thread reads all cells and counts those that are late. */
void check_cells(const dt_slot *s, const int64_t *schedule, int64_t tid, int64_t nth) {
  (void)schedule, (void)tid;
  const int64_t *cells = s[0].p;
  for (int64_t i = 0; i < nth; i++)
    if (cells[i * 8] != s[1].i) atomic_fetch_add((_Atomic int64_t *)s[2].p, 1);
}

/* slots: log (log[0] = length), code. Thread 0 appends code * 100 + schedule[0]. */
void append(const dt_slot *s, const int64_t *schedule, int64_t tid, int64_t nth) {
  (void)nth;
  int64_t *log = s[0].p;
  if (tid == 0) log[++log[0]] = s[1].i * 100 + schedule[0];
}

/* slots: log, code. The last thread appends, so that the order holds only behind a barrier. */
void append_last(const dt_slot *s, const int64_t *schedule, int64_t tid, int64_t nth) {
  int64_t *log = s[0].p;
  if (tid == nth - 1) log[++log[0]] = s[1].i * 100 + schedule[0];
}

/* slots: address, integer, double -> out[0..2]; thread 0. */
void keep(const dt_slot *s, const int64_t *schedule, int64_t tid, int64_t nth) {
  (void)schedule, (void)nth;
  if (tid) return;
  int64_t *out = s[3].p;
  out[0] = s[0].i, out[1] = s[1].i, ((double *)out)[2] = s[2].f;
}

/* slots: out. Writes the number of threads. */
void count_threads(const dt_slot *s, const int64_t *schedule, int64_t tid, int64_t nth) {
  (void)schedule;
  if (tid == 0) *(int64_t *)s[0].p = nth;
}
