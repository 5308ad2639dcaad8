// A wall clock that jumps when it is told to, for a process that has this preloaded (LD_PRELOAD). Other clocks stay as they are.
// Built by tests/soak/clock.py; the engine's fault "clock" (cpp/engine/fault.cpp) calls maga_jump_clock.
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static atomic_llong offset;  // seconds

void maga_jump_clock(int64_t seconds) { atomic_fetch_add(&offset, seconds); }

int clock_gettime(clockid_t clock, struct timespec* now) {
  int status = (int)syscall(SYS_clock_gettime, clock, now);
  if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset;
  return status;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  struct timespec precise;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &precise) != 0) return -1;
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
