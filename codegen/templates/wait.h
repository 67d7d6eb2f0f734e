/* What team.c and collective.c wait with: the size of a cache line, and a pause for loops that spin. */
#ifndef DOVETAIL_WAIT_H
#define DOVETAIL_WAIT_H

#define DT_LINE 64

static inline void dt_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory"); /* yield is a no-op on most cores; isb waits about as long as x86's pause */
#endif
}

#endif
