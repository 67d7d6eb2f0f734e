/* All-reduce of float32 rows between the processes of a group, through memory they share (Sandwich §7.2).
 *
 * Data are parted into lanes, each served by one thread of every rank, and lanes into rounds that fit a slot. In a
 * round each rank puts what others need into its slot and raises its mark. Few values are summed by everybody; of
 * many, each rank sums the chunk of its number, and takes the others' sums. Ranks walk the chunks in a circle from
 * their own on, so that they touch different lines at the same time. Chunks are whole cache lines.
 * Sums are in the order of the ranks, so all ranks have the same bits, in every run.
 *
 * There is no lock. A mark has one writer and only grows; slots alternate, since a rank that raised its mark for
 * round k + 1 has read all of round k. Waiting is: spin, unless the one awaited was last seen on this very CPU, then
 * sleep on the mark with a timeout, to look now and then whether a rank has died: then the group is marked as failed
 * for all. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "abi.h"
#include "wait.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define DT_LINE_FLOATS (DT_LINE / 4)
#define DT_PAGE 4096
#define DT_SLOTS_FLOATS (128 << 10) /* of all lanes: they stay in a third-level cache, and waits are few */
#define DT_SLOT_LEAST (8 << 10)
#define DT_LANE_FLOATS 8192         /* fewer values are not worth one more thread */
#define DT_DIRECT_FLOATS (32 << 10) /* others' values that one rank sums up sooner than it waits twice */
#define DT_BLOCK_FLOATS 1024
#define DT_LOOK 64 /* spins between two looks at where one runs */
#define DT_SLEEP_NS 20000000 /* between two looks at whether all ranks live */
#define DT_MAX_RANKS 256

/* How many steps a rank has published in a lane. */
typedef struct dt_mark {
  _Alignas(DT_LINE) _Atomic uint32_t word;
  _Atomic uint32_t sleepers;
  _Atomic int32_t cpu; /* where the rank was then */
} dt_mark;

/* The start of the shared memory; marks are [lanes][ranks]. Slots follow on the next page. */
typedef struct dt_board {
  _Alignas(DT_LINE) _Atomic int32_t failed;
  dt_mark marks[];
} dt_board;

/* Where this rank stands in a lane. */
typedef struct dt_lane {
  _Alignas(DT_LINE) uint32_t step;
  uint32_t round;
} dt_lane;

struct dt_comm {
  dt_board *board;
  float *slots; /* per lane: inputs [2][ranks][slot], sums [slot] */
  int64_t rank, ranks, n_lanes, slot, spin, n_peers;
  struct pollfd *peers;
  dt_lane *lanes;
};

/* Rows of `columns` values, `stride` apart, counted through as one sequence. */
typedef struct dt_matrix {
  float *x;
  int64_t columns, stride;
} dt_matrix;

static inline int64_t dt_min(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t dt_board_bytes(int64_t ranks, int64_t lanes) {
  const int64_t bytes = (int64_t)sizeof(dt_board) + lanes * ranks * (int64_t)sizeof(dt_mark);
  return (bytes + DT_PAGE - 1) / DT_PAGE * DT_PAGE;
}

/* The more lanes, the smaller the part of the data that each gets; whole pages. */
static int64_t dt_slot_floats(int64_t lanes) {
  const int64_t share = DT_SLOTS_FLOATS / lanes / (DT_PAGE / 4) * (DT_PAGE / 4);
  return share > DT_SLOT_LEAST ? share : DT_SLOT_LEAST;
}

static int64_t dt_lane_floats(int64_t ranks, int64_t slot) { return (2 * ranks + 1) * slot; }

static int dt_possible(int64_t rank, int64_t ranks, int64_t lanes) {
  return ranks >= 1 && ranks <= DT_MAX_RANKS && rank >= 0 && rank < ranks && lanes >= 1 && lanes <= 4096;
}

int64_t dt_comm_bytes(int64_t ranks, int64_t lanes) {
  if (!dt_possible(0, ranks, lanes)) return -1;
  return dt_board_bytes(ranks, lanes) + lanes * dt_lane_floats(ranks, dt_slot_floats(lanes)) * 4;
}

dt_comm *dt_comm_create(void *shared, int64_t rank, int64_t ranks, int64_t lanes, int64_t spin, const int32_t *peers,
                        int64_t n_peers) {
  if (!shared || !dt_possible(rank, ranks, lanes) || n_peers < 0) return NULL;
  dt_comm *comm = calloc(1, sizeof *comm);
  if (!comm) return NULL;
  comm->lanes = aligned_alloc(DT_LINE, sizeof(dt_lane) * (size_t)lanes);
  comm->peers = calloc((size_t)n_peers + 1, sizeof *comm->peers);
  if (!comm->lanes || !comm->peers) {
    dt_comm_destroy(comm);
    return NULL;
  }
  memset(comm->lanes, 0, sizeof(dt_lane) * (size_t)lanes);
  comm->board = shared;
  comm->slots = (float *)((char *)shared + dt_board_bytes(ranks, lanes));
  comm->rank = rank, comm->ranks = ranks, comm->n_lanes = lanes, comm->slot = dt_slot_floats(lanes);
  comm->spin = spin, comm->n_peers = n_peers;
  for (int64_t i = 0; i < n_peers; i++) comm->peers[i] = (struct pollfd){.fd = peers[i], .events = POLLRDHUP};
  return comm;
}

void dt_comm_destroy(dt_comm *comm) {
  if (!comm) return;
  free(comm->lanes);
  free(comm->peers);
  free(comm);
}

void dt_comm_fail(dt_comm *comm) { atomic_store(&comm->board->failed, 1); }

const int32_t *dt_comm_failed(const dt_comm *comm) { return (const int32_t *)&comm->board->failed; }

/* ---- marks ---- */

static dt_mark *dt_mark_of(dt_comm *comm, int64_t lane, int64_t rank) {
  return &comm->board->marks[lane * comm->ranks + rank];
}

static void dt_publish(dt_comm *comm, int64_t lane, uint32_t step) {
  dt_mark *mark = dt_mark_of(comm, lane, comm->rank);
  atomic_store_explicit(&mark->cpu, sched_getcpu(), memory_order_relaxed);
  atomic_store(&mark->word, step);
  if (atomic_load(&mark->sleepers)) syscall(SYS_futex, &mark->word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static int dt_is_failed(dt_comm *comm) { return atomic_load_explicit(&comm->board->failed, memory_order_relaxed); }

/* Look whether a rank has hung up. */
static int dt_look_around(dt_comm *comm) {
  if (dt_is_failed(comm)) return -1;
  if (poll(comm->peers, (nfds_t)comm->n_peers, 0) <= 0) return 0;
  dt_comm_fail(comm);
  return -1;
}

static int dt_sleep(dt_comm *comm, dt_mark *mark, uint32_t step) {
  const struct timespec slice = {0, DT_SLEEP_NS};
  int status = 0;
  atomic_fetch_add(&mark->sleepers, 1);
  for (;;) {
    const uint32_t seen = atomic_load(&mark->word);
    if ((int32_t)(seen - step) >= 0) break;
    syscall(SYS_futex, &mark->word, FUTEX_WAIT, seen, &slice, NULL, 0);
    if ((int32_t)(atomic_load(&mark->word) - step) < 0 && (status = dt_look_around(comm))) break;
  }
  atomic_fetch_sub(&mark->sleepers, 1);
  return status;
}

/* Return when `rank` has published `step` in a lane, or -1 when the group has failed. Who spins where the other
 * would run only keeps it from running. */
static int dt_await(dt_comm *comm, int64_t lane, int64_t rank, uint32_t step) {
  dt_mark *mark = dt_mark_of(comm, lane, rank);
  for (int64_t i = 0; i <= comm->spin; i++) {
    if ((int32_t)(atomic_load_explicit(&mark->word, memory_order_acquire) - step) >= 0) return 0;
    if (i % DT_LOOK == 0 && atomic_load_explicit(&mark->cpu, memory_order_relaxed) == sched_getcpu()) break;
    dt_pause();
  }
  return dt_sleep(comm, mark, step);
}

/* ---- values ---- */

static float *dt_at(const dt_matrix *m, int64_t index, int64_t count, int64_t *run) {
  const int64_t column = index % m->columns;
  *run = dt_min(count, m->columns - column);
  return m->x + index / m->columns * m->stride + column;
}

static void dt_copy_in(float *to, const dt_matrix *m, int64_t first, int64_t count) {
  for (int64_t done = 0, run; done < count; done += run) {
    const float *from = dt_at(m, first + done, count - done, &run);
    memcpy(to + done, from, (size_t)run * 4);
  }
}

static void dt_copy_out(const dt_matrix *m, int64_t first, const float *from, int64_t count) {
  for (int64_t done = 0, run; done < count; done += run) {
    float *to = dt_at(m, first + done, count - done, &run);
    memcpy(to, from + done, (size_t)run * 4);
  }
}

static void dt_add(float *restrict sum, const float *restrict x, int64_t count) {
  for (int64_t i = 0; i < count; i++) sum[i] += x[i];
}

/* One round of a lane: `count` values from `first` on; `inputs` are the slots of all ranks. */
typedef struct dt_round {
  const dt_matrix *m;
  int64_t lane, first, count;
  float *inputs, *sums;
} dt_round;

/* Replace values [begin, end) of a round by their sums over the ranks; `sums` (or NULL) also gets them. */
static void dt_sum(const dt_comm *comm, const dt_round *round, int64_t begin, int64_t end, float *sums) {
  float block[DT_BLOCK_FLOATS];
  for (int64_t at = begin, run; at < end; at += run) {
    float *own = dt_at(round->m, round->first + at, dt_min(end - at, DT_BLOCK_FLOATS), &run);
    for (int64_t r = 0; r < comm->ranks; r++) {
      const float *x = r == comm->rank ? own : round->inputs + r * comm->slot + at;
      if (r == 0) memcpy(block, x, (size_t)run * 4);
      else dt_add(block, x, run);
    }
    memcpy(own, block, (size_t)run * 4);
    if (sums) memcpy(sums + at, block, (size_t)run * 4);
  }
}

static int64_t dt_chunk(const dt_comm *comm, int64_t count) {
  const int64_t share = (count + comm->ranks - 1) / comm->ranks;
  return (share + DT_LINE_FLOATS - 1) / DT_LINE_FLOATS * DT_LINE_FLOATS;
}

static int dt_await_inputs(dt_comm *comm, const dt_round *round, uint32_t step) {
  for (int64_t i = 1; i < comm->ranks; i++) {
    if (dt_await(comm, round->lane, (comm->rank + i) % comm->ranks, step)) return -1;
  }
  return 0;
}

/* Everybody sums everything: one wait. */
static int dt_round_direct(dt_comm *comm, const dt_round *round) {
  uint32_t *step = &comm->lanes[round->lane].step;
  const int64_t chunk = dt_chunk(comm, round->count);
  dt_copy_in(round->inputs + comm->rank * comm->slot, round->m, round->first, round->count);
  dt_publish(comm, round->lane, ++*step);
  if (dt_await_inputs(comm, round, *step)) return -1;
  for (int64_t i = 0; i < comm->ranks; i++) {
    const int64_t begin = (comm->rank + i) % comm->ranks * chunk;
    dt_sum(comm, round, begin, dt_min(begin + chunk, round->count), NULL);
  }
  return 0;
}

/* Each rank sums its chunk for all: two waits, but no value is summed twice. */
static int dt_round_shared(dt_comm *comm, const dt_round *round) {
  uint32_t *step = &comm->lanes[round->lane].step;
  const int64_t chunk = dt_chunk(comm, round->count);
  float *mine = round->inputs + comm->rank * comm->slot;
  for (int64_t i = 1; i < comm->ranks; i++) {
    const int64_t begin = (comm->rank + i) % comm->ranks * chunk;
    dt_copy_in(mine + begin, round->m, round->first + begin, dt_min(chunk, round->count - begin));
  }
  dt_publish(comm, round->lane, ++*step);
  if (dt_await_inputs(comm, round, *step)) return -1;
  const int64_t own = comm->rank * chunk;
  dt_sum(comm, round, own, dt_min(own + chunk, round->count), round->sums);
  dt_publish(comm, round->lane, ++*step);
  for (int64_t i = 1; i < comm->ranks; i++) {
    const int64_t owner = (comm->rank + i) % comm->ranks, begin = owner * chunk;
    if (dt_await(comm, round->lane, owner, *step)) return -1;
    dt_copy_out(round->m, round->first + begin, round->sums + begin, dt_min(chunk, round->count - begin));
  }
  return 0;
}

/* All rounds of a lane; one without values still makes the ranks meet. */
static int dt_reduce_lane(dt_comm *comm, const dt_matrix *m, int64_t lane, int64_t first, int64_t last) {
  float *slots = comm->slots + lane * dt_lane_floats(comm->ranks, comm->slot);
  do {
    const int64_t count = dt_min(last - first, comm->slot);
    const uint32_t turn = comm->lanes[lane].round++ % 2;
    const dt_round round = {m, lane, first, count, slots + turn * comm->ranks * comm->slot,
                            slots + 2 * comm->ranks * comm->slot};
    const int direct = (comm->ranks - 1) * count <= DT_DIRECT_FLOATS;
    if (direct ? dt_round_direct(comm, &round) : dt_round_shared(comm, &round)) return -1;
    first += count;
  } while (first < last);
  return 0;
}

/* Columns [begin, end) of a matrix are this rank's own, which count in its sums; the others count as zeros. */
typedef struct dt_columns {
  int64_t begin, end;
} dt_columns;

static void dt_clear_others(const dt_matrix *m, int64_t columns, dt_columns own, int64_t first, int64_t last) {
  for (int64_t at = first, run; at < last; at += run) {
    const int64_t column = at % columns;
    float *x = dt_at(m, at, dt_min(last - at, columns - column), &run);
    for (int64_t i = 0; i < run; i++) {
      if (column + i < own.begin || column + i >= own.end) x[i] = 0.0f;
    }
  }
}

static int dt_reduce(dt_comm *comm, float *x, int64_t rows, int64_t columns, int64_t stride, dt_columns own,
                     int64_t tid, int64_t nth) {
  if (dt_is_failed(comm)) return -1;
  if (comm->ranks == 1) return 0;
  const int64_t total = rows * columns;
  const dt_matrix m = {x, stride == columns ? total : columns, stride};
  int64_t lanes = dt_min(comm->n_lanes, (total + DT_LANE_FLOATS - 1) / DT_LANE_FLOATS);
  if (lanes < 1) lanes = 1;
  const int64_t lines = (total + DT_LINE_FLOATS - 1) / DT_LINE_FLOATS;
  for (int64_t lane = tid; lane < lanes; lane += nth) {
    const int64_t first = lines * lane / lanes * DT_LINE_FLOATS;
    const int64_t last = dt_min(lines * (lane + 1) / lanes * DT_LINE_FLOATS, total);
    if (own.end - own.begin < columns) dt_clear_others(&m, columns, own, first, last);
    if (dt_reduce_lane(comm, &m, lane, first, last)) return -1;
  }
  return 0;
}

int dt_all_reduce(dt_comm *comm, float *x, int64_t rows, int64_t columns, int64_t stride, int64_t tid, int64_t nth) {
  return dt_reduce(comm, x, rows, columns, stride, (dt_columns){0, columns}, tid, nth);
}

/* Give every rank the columns of all: those of `units` units of `size` columns are dealt in equal stretches. One value
 * and zeros have an exact sum. */
int dt_all_gather(dt_comm *comm, float *x, int64_t rows, int64_t columns, int64_t stride, int64_t units, int64_t size,
                  int64_t tid, int64_t nth) {
  const dt_columns own = {units * comm->rank / comm->ranks * size, units * (comm->rank + 1) / comm->ranks * size};
  return dt_reduce(comm, x, rows, columns, stride, own, tid, nth);
}

void dt_entry_all_reduce(const dt_slot *slots, const int64_t *schedule, int64_t tid, int64_t nth) {
  (void)schedule;
  dt_all_reduce(slots[0].p, slots[3].p, slots[1].i, slots[2].i, slots[4].i, tid, nth);
}

void dt_entry_all_gather(const dt_slot *slots, const int64_t *schedule, int64_t tid, int64_t nth) {
  (void)schedule;
  dt_all_gather(slots[0].p, slots[3].p, slots[1].i, slots[2].i, slots[4].i, slots[5].i, slots[6].i, tid, nth);
}
