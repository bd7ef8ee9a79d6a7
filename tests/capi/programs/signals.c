/* signals.c - the host's dispositions, mask and locale are as before, the library's threads take no signal, and Ctrl-C still kills.
   signals model.gguf */
#include <dirent.h>
#include <locale.h>
#include <signal.h>
#include <unistd.h>

#include "check.h"

enum { SIGNALS = 64, RESTORER = 0x04000000 }; /* the C library's own flag, on whatever was set through it */

static struct sigaction before[SIGNALS], after[SIGNALS];

static void dispositions(struct sigaction* to) {
  for (int i = 1; i < SIGNALS; i++) sigaction(i, NULL, &to[i]);
}

/* Every thread but this one blocks whatever can be blocked and has a number a host uses. */
static void check_threads(void) {
  DIR* tasks = opendir("/proc/self/task");
  CHECK(tasks);
  int others = 0;
  char self[32];
  snprintf(self, sizeof self, "%ld", (long)getpid());
  for (struct dirent* entry; (entry = readdir(tasks));) {
    if (entry->d_name[0] == '.' || !strcmp(entry->d_name, self)) continue;
    char path[300], line[256];
    snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
    FILE* status = fopen(path, "r");
    if (!status) continue; /* it has just ended */
    char name[64] = "?";
    unsigned long long blocked = 0;
    while (fgets(line, sizeof line, status)) {
      sscanf(line, "Name: %63[^\n]", name);
      sscanf(line, "SigBlk: %llx", &blocked);
    }
    fclose(status);
    static const int wanted[] = {SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGTERM, SIGCHLD, SIGWINCH};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
      if (!(blocked >> (wanted[i] - 1) & 1)) {
        fprintf(stderr, "thread %s (%s) takes signal %d\n", entry->d_name, name, wanted[i]);
        exit(1);
      }
    others++;
  }
  closedir(tasks);
  CHECK(others >= 2);
}

int main(int argc, char** argv) {
  (void)argc;
  sigset_t mask_before, mask_after;
  dispositions(before);
  sigprocmask(SIG_SETMASK, NULL, &mask_before);
  char* locale = strdup(setlocale(LC_ALL, NULL));

  vllm_engine* engine = load(argv[1]);
  static collected to;
  vllm_sampling_params sampling = greedy(4), endless = greedy(0);
  CHECK(vllm_complete_stream(engine, "x", &sampling, collect, &to) == VLLM_OK);
  static collected running;
  vllm_request* request;
  CHECK(vllm_request_submit(engine, "x", &endless, collect, &running, &request) == VLLM_OK);
  check_threads();
  vllm_request_free(request);

  dispositions(after);
  sigprocmask(SIG_SETMASK, NULL, &mask_after);
  for (int i = 1; i < SIGNALS; i++) {
    if (before[i].sa_handler != after[i].sa_handler) fprintf(stderr, "signal %d changed\n", i);
    CHECK(before[i].sa_handler == after[i].sa_handler);
    CHECK(((before[i].sa_flags ^ after[i].sa_flags) & ~RESTORER) == 0);
    CHECK(sigismember(&mask_before, i) == sigismember(&mask_after, i));
  }
  CHECK(!strcmp(setlocale(LC_ALL, NULL), locale));
  raise(SIGINT); /* the test expects to see us killed by it */
  return 1;
}
