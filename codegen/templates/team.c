/* A team of pinned threads that runs tapes (abi.h).
 *
 * The caller of dt_run is thread 0; the others wait at a gate of their own. Entries are separated by barriers only
 * where the tape says so. All waiting is: spin `spin` times, then sleep on a futex; threads outside the active set are
 * never woken. The caller is pinned to cpus[0] during a run only and gets its affinity back afterwards.
 * After a fork the child has no workers: there a run uses the calling thread alone, and destroy only frees memory. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "abi.h"
#include "wait.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define DT_STACK_BYTES (8u << 20) /* kernels keep tiles on the stack; musl's default of 128 KiB is too small */

/* A counter that others wait on: the word only grows, so a waiter that knows its old value cannot miss a change. */
typedef struct dt_gate {
  _Alignas(DT_LINE) _Atomic uint32_t word;
  _Atomic uint32_t sleepers;
} dt_gate;

/* What the active threads run now; written by thread 0 before it opens their gates. */
typedef struct dt_job {
  const dt_tape *tape;
  const dt_slot *args;
  int64_t first, last, threads;
  int64_t *times; /* dt_run's */
} dt_job;

typedef struct dt_worker {
  dt_gate gate;
  dt_team *team;
  int64_t tid;
  int32_t cpu; /* where it is pinned, -1 = nowhere */
  pthread_t thread;
} dt_worker;

struct dt_team {
  dt_gate barrier; /* the word is the barrier's sense, one step per completed barrier */
  _Alignas(DT_LINE) _Atomic int64_t arrived;
  _Alignas(DT_LINE) dt_job job;
  int64_t size, active, spin_asked;
  _Atomic int64_t spin; /* read by workers that have just finished a run */
  int32_t caller_cpu;
  int32_t quit;
  pid_t owner;
  _Atomic int busy;
  dt_worker *workers; /* [size]; workers[0] is the caller and unused */
};

static void dt_futex(_Atomic uint32_t *word, int operation, uint32_t value) {
  syscall(SYS_futex, word, operation, value, NULL, NULL, 0);
}

static void dt_gate_open(dt_gate *gate) {
  atomic_fetch_add(&gate->word, 1);
  if (atomic_load(&gate->sleepers)) dt_futex(&gate->word, FUTEX_WAKE_PRIVATE, INT32_MAX);
}

static void dt_gate_wait(dt_gate *gate, uint32_t seen, int64_t spin) {
  for (int64_t i = 0; i < spin; i++) {
    if (atomic_load_explicit(&gate->word, memory_order_acquire) != seen) return;
    dt_pause();
  }
  atomic_fetch_add(&gate->sleepers, 1);
  while (atomic_load(&gate->word) == seen) dt_futex(&gate->word, FUTEX_WAIT_PRIVATE, seen);
  atomic_fetch_sub(&gate->sleepers, 1);
}

/* Sense-reversing barrier over the job's threads. With wait = 0 the thread only reports that it is done. */
static void dt_barrier(dt_team *team, int64_t threads, int wait) {
  if (threads == 1) return;
  uint32_t sense = atomic_load_explicit(&team->barrier.word, memory_order_acquire);
  if (atomic_fetch_add(&team->arrived, 1) + 1 == threads) {
    atomic_store(&team->arrived, 0);
    dt_gate_open(&team->barrier);
  } else if (wait) {
    dt_gate_wait(&team->barrier, sense, team->spin);
  }
}

/* The last row whose m_lo is <= m. */
static const dt_row *dt_find_row(const dt_entry *entry, int64_t m) {
  int64_t low = 0, high = entry->n_rows;
  while (high - low > 1) {
    int64_t middle = low + (high - low) / 2;
    if (entry->rows[middle].m_lo <= m) low = middle;
    else high = middle;
  }
  return &entry->rows[low];
}

/* Threads may see the stop at different entries: each still comes to every barrier. */
static int dt_stopped(const dt_tape *tape) { return tape->stop && __atomic_load_n(tape->stop, __ATOMIC_RELAXED); }

static inline int64_t dt_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Note the time as `which` of an entry's DT_TIMES, where anybody wants to know. */
static inline void dt_note(int64_t *times, int which) {
  if (times) times[which] = dt_now();
}

/* Run an entry for each weight that has rows: all threads share each product, and none waits for another. */
static void dt_run_groups(const dt_entry *entry, const dt_slot *slots, int64_t tid, int64_t threads) {
  const dt_groups *groups = entry->groups;
  dt_slot own[DT_MOST_SLOTS];
  memcpy(own, slots, (size_t)groups->n_slots * sizeof *own);
  for (int64_t g = 0; g < groups->count; g++) {
    const int64_t first = groups->starts[g], m = groups->starts[g + 1] - first;
    if (m <= 0) continue;
    own[groups->m].i = m;
    own[groups->a].i = slots[groups->a].i + first * slots[groups->lda].i * (int64_t)sizeof(float);
    own[groups->b].i = slots[groups->b].i + g * groups->bytes;
    if (slots[groups->bias].p) own[groups->bias].i = slots[groups->bias].i + g * groups->bias_bytes;
    own[groups->c].i = slots[groups->c].i + first * slots[groups->ldc].i * (int64_t)sizeof(float);
    const dt_row *row = dt_find_row(entry, m);
    row->kernel(own, row->schedule, tid, threads);
  }
}

static void dt_execute(dt_team *team, const dt_job *job, int64_t tid) {
  const int64_t threads = job->threads;
  int owed = 0; /* a skipped entry's barrier is owed by the next one that runs */
  for (int64_t e = job->first; e < job->last; e++) {
    const dt_entry *entry = &job->tape->entries[e];
    const int64_t m = job->args[entry->m_arg].i;
    owed |= entry->barrier && e > job->first;
    if (m <= 0 || (entry->skip_arg >= 0 && job->args[entry->skip_arg].i == 0)) continue;
    int64_t *times = job->times ? job->times + ((e - job->first) * threads + tid) * DT_TIMES : NULL;
    dt_note(times, 0);
    if (owed) dt_barrier(team, threads, 1);
    owed = 0;
    dt_note(times, 1);
    const dt_slot *slots = job->tape->slots + entry->first_slot;
    const dt_row *row = dt_find_row(entry, m);
    if (!dt_stopped(job->tape)) {
      if (entry->groups) dt_run_groups(entry, slots, tid, threads);
      else row->kernel(slots, row->schedule, tid, threads);
    }
    dt_note(times, 2);
    if (row->reduce && !entry->groups) {
      dt_barrier(team, threads, 1);
      dt_note(times, 3);
      if (!dt_stopped(job->tape)) row->reduce(slots, row->schedule, tid, threads);
      dt_note(times, 4);
    }
  }
  dt_barrier(team, threads, tid == 0);
}

static void *dt_work(void *argument) {
  dt_worker *self = argument;
  dt_team *team = self->team;
  for (uint32_t seen = 0;; seen++) { /* the gate opens once per run, and never before the last run is over */
    dt_gate_wait(&self->gate, seen, team->spin);
    if (team->quit) return NULL;
    dt_execute(team, &team->job, self->tid);
  }
}

static int dt_pin(pthread_t thread, int32_t cpu) {
  if (cpu < 0) return 0;
  if (cpu >= CPU_SETSIZE) return -1;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return pthread_setaffinity_np(thread, sizeof set, &set) ? -1 : 0;
}

/* Phases change many times a second, mostly between the same CPUs: those cost no system call. */
static int dt_pin_worker(dt_worker *worker, int32_t cpu) {
  if (cpu < 0 || cpu == worker->cpu) return 0;
  const int status = dt_pin(worker->thread, cpu);
  worker->cpu = status ? -1 : cpu;
  return status;
}

/* Pin the caller, which gets its affinity back: a run could not say that its CPU has gone. */
static int dt_pin_probe(int32_t cpu) {
  cpu_set_t before;
  if (pthread_getaffinity_np(pthread_self(), sizeof before, &before)) return -1;
  if (dt_pin(pthread_self(), cpu)) return -1;
  return pthread_setaffinity_np(pthread_self(), sizeof before, &before) ? -1 : 0;
}

/* With more threads than CPUs a spinning thread only delays the one it waits for. */
static int64_t dt_useful_spin(int64_t active, int64_t spin) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set)) return spin;
  return active > CPU_COUNT(&set) ? 0 : spin;
}

int dt_team_set_active(dt_team *team, int64_t active, const int32_t *cpus) {
  if (!team || active < 1 || active > team->size) return -1;
  if (atomic_exchange(&team->busy, 1)) return -1;
  int status = 0;
  const int32_t caller_cpu = cpus ? cpus[0] : -1;
  if (caller_cpu >= 0 && caller_cpu != team->caller_cpu) status = dt_pin_probe(caller_cpu);
  team->active = active;
  team->caller_cpu = status ? -1 : caller_cpu;
  team->spin = dt_useful_spin(active, team->spin_asked);
  if (getpid() == team->owner) {
    for (int64_t i = 1; cpus && i < active; i++) status |= dt_pin_worker(&team->workers[i], cpus[i]);
  }
  atomic_store(&team->busy, 0);
  return status;
}

int64_t dt_team_size(const dt_team *team) { return team->size; }

static void dt_team_free(dt_team *team) {
  free(team->workers);
  free(team);
}

static void dt_dismiss(dt_team *team, int64_t made) {
  team->quit = 1;
  for (int64_t i = 1; i < made; i++) dt_gate_open(&team->workers[i].gate);
  for (int64_t i = 1; i < made; i++) pthread_join(team->workers[i].thread, NULL);
}

void dt_team_destroy(dt_team *team) {
  if (!team) return;
  if (getpid() == team->owner) dt_dismiss(team, team->size);
  dt_team_free(team);
}

/* Start a thread with every signal blocked, so that Ctrl-C always reaches the program's own threads. */
static int dt_start_thread(pthread_t *thread, void *(*work)(void *), void *argument) {
  sigset_t all, before;
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes)) return -1;
  pthread_attr_setstacksize(&attributes, DT_STACK_BYTES);
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int status = pthread_create(thread, &attributes, work, argument);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return status ? -1 : 0;
}

static int64_t dt_start_workers(dt_team *team) {
  int64_t made = 1;
  for (; made < team->size; made++) {
    dt_worker *worker = &team->workers[made];
    worker->team = team;
    worker->tid = made;
    worker->cpu = -1;
    if (dt_start_thread(&worker->thread, dt_work, worker)) break;
  }
  return made;
}

dt_team *dt_team_create(int64_t n_threads, const int32_t *cpus, int64_t spin) {
  if (n_threads < 1 || n_threads > 4096 || spin < 0) return NULL;
  dt_team *team = aligned_alloc(DT_LINE, sizeof *team);
  if (!team) return NULL;
  memset(team, 0, sizeof *team);
  team->workers = aligned_alloc(DT_LINE, sizeof(dt_worker) * (size_t)n_threads);
  if (!team->workers) {
    free(team);
    return NULL;
  }
  memset(team->workers, 0, sizeof(dt_worker) * (size_t)n_threads);
  team->size = n_threads;
  team->spin_asked = spin;
  team->owner = getpid();
  team->caller_cpu = -1;
  team->spin = dt_useful_spin(n_threads, spin); /* workers read it as soon as they start */
  int64_t made = dt_start_workers(team);
  if (made < n_threads) {
    dt_dismiss(team, made);
    dt_team_free(team);
    return NULL;
  }
  dt_team_set_active(team, n_threads, cpus);
  return team;
}

static int dt_well_formed(const dt_tape *tape, const dt_slot *args, int64_t first, int64_t last) {
  return tape && args && first >= 0 && first <= last && last <= tape->n_entries;
}

/* Pin the caller for the time of a run; returns whether `before` must be given back. */
static int dt_pin_caller(const dt_team *team, cpu_set_t *before) {
  if (team->caller_cpu < 0) return 0;
  if (pthread_getaffinity_np(pthread_self(), sizeof *before, before)) return 0;
  return dt_pin(pthread_self(), team->caller_cpu) == 0;
}

int dt_run(dt_team *team, const dt_tape *tape, const dt_slot *args, int64_t first, int64_t last, int64_t most,
           int64_t *times) {
  if (!team || most < 1 || !dt_well_formed(tape, args, first, last)) return -1;
  if (atomic_exchange(&team->busy, 1)) return -1;
  for (int64_t i = 0; i < tape->n_patches; i++) {
    const dt_patch *patch = &tape->patches[i];
    tape->slots[patch->slot].i = args[patch->arg].i + patch->offset;
  }
  const int64_t active = getpid() == team->owner ? team->active : 1;
  const int64_t threads = active < most ? active : most;
  team->job = (dt_job){tape, args, first, last, threads, times};
  cpu_set_t before;
  /* one of several would only be pinned to where the last run has left it */
  const int pinned = threads == active && dt_pin_caller(team, &before);
  for (int64_t i = 1; i < threads; i++) dt_gate_open(&team->workers[i].gate);
  dt_execute(team, &team->job, 0);
  if (pinned) pthread_setaffinity_np(pthread_self(), sizeof before, &before);
  atomic_store(&team->busy, 0);
  return dt_stopped(tape) ? -2 : 0;
}

/* ---- a thread of its own that runs orders ---- */

struct dt_runner {
  dt_gate released, done; /* the words count orders: those that may run, those that have */
  dt_order *orders[DT_ORDERS];
  _Atomic uint32_t given;
  _Atomic int dropping, quit;
  dt_team *team;
  pid_t owner;
  pthread_t thread;
};

static void dt_run_order(dt_team *team, dt_order *order) {
  order->times[0] = dt_now();
  for (int64_t i = 1; i <= order->begun[0]; i++) {
    for (int pool = 0; pool < 2; pool++) {
      memset(order->pools[pool] + order->begun[i] * order->block_bytes, 0, (size_t)order->block_bytes);
    }
  }
  order->status = dt_run(team, order->tape, order->args, order->first, order->last, team->active, NULL);
  order->times[1] = dt_now();
}

static void *dt_follow(void *argument) {
  dt_runner *self = argument;
  for (uint32_t number = 0;; number++) {
    dt_gate_wait(&self->released, number, self->team->spin);
    if (atomic_load(&self->quit)) return NULL;
    dt_order *order = self->orders[number % DT_ORDERS];
    order->status = -3;
    if (!atomic_load(&self->dropping)) dt_run_order(self->team, order);
    dt_gate_open(&self->done);
  }
}

dt_runner *dt_runner_create(dt_team *team, const int32_t *cpus, int64_t n_cpus) {
  dt_runner *runner = aligned_alloc(DT_LINE, sizeof *runner);
  if (!runner) return NULL;
  memset(runner, 0, sizeof *runner);
  runner->team = team;
  runner->owner = getpid();
  if (dt_start_thread(&runner->thread, dt_follow, runner)) {
    free(runner);
    return NULL;
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int64_t i = 0; cpus && i < n_cpus; i++) {
    if (cpus[i] >= 0 && cpus[i] < CPU_SETSIZE) CPU_SET(cpus[i], &set);
  }
  if (CPU_COUNT(&set)) pthread_setaffinity_np(runner->thread, sizeof set, &set);
  return runner;
}

uint32_t dt_runner_give(dt_runner *runner, dt_order *order) {
  const uint32_t number = atomic_load(&runner->given);
  runner->orders[number % DT_ORDERS] = order;
  atomic_store(&runner->given, number + 1);
  return number;
}

void dt_runner_release(void *runner) { dt_gate_open(&((dt_runner *)runner)->released); }

void dt_runner_wait(dt_runner *runner, uint32_t number) {
  for (;;) {
    const uint32_t seen = atomic_load(&runner->done.word);
    if ((int32_t)(seen - number) > 0) return;
    dt_gate_wait(&runner->done, seen, runner->team->spin);
  }
}

void dt_runner_drop(dt_runner *runner) {
  const uint32_t given = atomic_load(&runner->given);
  atomic_store(&runner->dropping, 1);
  while ((int32_t)(given - atomic_load(&runner->released.word)) > 0) dt_gate_open(&runner->released);
  if (given) dt_runner_wait(runner, given - 1);
  atomic_store(&runner->dropping, 0);
}

void dt_runner_destroy(dt_runner *runner) {
  if (!runner) return;
  if (getpid() == runner->owner) {
    dt_runner_drop(runner);
    atomic_store(&runner->quit, 1);
    dt_gate_open(&runner->released);
    pthread_join(runner->thread, NULL);
  }
  free(runner);
}
