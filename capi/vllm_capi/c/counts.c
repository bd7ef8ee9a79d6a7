/*
 * counts.c - the last statistics line of expert streaming, for a host in which Python never ends.
 *
 * Python keeps the counters (vllm_cpp/residency/statistics.py names them) in memory that is never freed, and prints them itself when it
 * ends. Here it never does: this library's destructor runs after the host's main and its exit handlers, and prints what was not printed.
 */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "door.h"

static const char* const names[] = {"steps", "hits", "misses", "evictions", "fills", "bytes", "exhausted", "advised"};
enum { COUNTERS = sizeof names / sizeof *names };

/* int64[COUNTERS], then one that is not 0 once the line was printed. */
static _Atomic(int64_t*) watched;
static pid_t owner; /* a forked child has nothing to say about its parent's counters */

void door_watch_counters(int64_t* counters) {
  owner = getpid();
  atomic_store(&watched, counters);
}

__attribute__((destructor)) static void print_last_line(void) {
  int64_t* counters = atomic_load(&watched);
  if (!counters || getpid() != owner || __atomic_exchange_n(&counters[COUNTERS], 1, __ATOMIC_ACQ_REL)) return;
  char line[512];
  int n = snprintf(line, sizeof line, "[expert-stream]");
  for (int i = 0; i < COUNTERS; i++)
    n += snprintf(line + n, sizeof line - (size_t)n, " %s=%" PRId64, names[i], __atomic_load_n(&counters[i], __ATOMIC_RELAXED));
  line[n++] = '\n';
  if (write(STDERR_FILENO, line, (size_t)n) < 0) { /* nobody listens */
  }
}
