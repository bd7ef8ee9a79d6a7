/* memory.c - calls, failures, short-lived threads and reloads leave nothing behind.     memory model.gguf
   Prints the growth of resident memory in KiB: of 100,000 cheap calls, 1,000 answers, 1,000 threads, 60 reloads. */
#include <limits.h>
#include <pthread.h>
#include <unistd.h>

#include "check.h"

static const char* path;
static vllm_engine* engine;

static long resident_kib(void) {
  long pages = 0, resident = 0;
  FILE* file = fopen("/proc/self/statm", "r");
  CHECK(file && fscanf(file, "%ld %ld", &pages, &resident) == 2);
  fclose(file);
  return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

static void cheap_calls(int n) {
  vllm_sampling_params zeros;
  memset(&zeros, 0, sizeof zeros);
  vllm_completion answer;
  for (int i = 0; i < n / 4; i++) {
    CHECK(vllm_complete(engine, "x", &zeros, &answer) == VLLM_ERR_INVALID_ARGUMENT);
    CHECK(vllm_complete((vllm_engine*)0x50, "x", &zeros, &answer) == VLLM_ERR_INVALID_ARGUMENT);
    CHECK(!vllm_request_done((vllm_request*)0x50));
    vllm_embedding_result embedding;
    const char* texts[] = {"x"};
    CHECK(vllm_embed(engine, texts, 1, &embedding) == VLLM_ERR_INVALID_ARGUMENT);
  }
}

static void answers(int n) {
  vllm_sampling_params sampling = greedy(2);
  for (int i = 0; i < n / 2; i++) {
    vllm_completion answer;
    CHECK(vllm_complete(engine, "hello", &sampling, &answer) == VLLM_OK);
    vllm_completion_free(&answer);
    collected to = {0};
    vllm_request* request;
    CHECK(vllm_request_submit(engine, "hello", &sampling, collect, &to, &request) == VLLM_OK);
    vllm_request_free(request);
  }
}

static void* one_call(void* unused) {
  cheap_calls(4);
  return unused;
}

static void threads(int n) {
  for (int i = 0; i < n; i++) {
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, one_call, NULL) && !pthread_join(thread, NULL));
  }
}

static void reloads(int n) {
  for (int i = 0; i < n; i++) {
    vllm_engine_free(engine);
    engine = load(path);
    vllm_sampling_params sampling = greedy(1);
    vllm_completion answer;
    CHECK(vllm_complete(engine, "x", &sampling, &answer) == VLLM_OK);
    vllm_completion_free(&answer);
  }
}

/* Garbage is collected now and then, so the floor counts: the least that was resident in the first half against that in the second.
   A fifth goes before, so that caches and arenas have their size. */
static void measure(const char* what, void (*work)(int), int n) {
  enum { STEPS = 20 };
  long least[2] = {LONG_MAX, LONG_MAX};
  work(n / 5);
  for (int step = 0; step < STEPS; step++) {
    work(n / STEPS);
    long now = resident_kib(), *half = &least[step / (STEPS / 2)];
    if (now < *half) *half = now;
  }
  printf("%s %ld\n", what, least[1] - least[0]);
}

int main(int argc, char** argv) {
  (void)argc;
  path = argv[1];
  engine = load(path);
  measure("calls", cheap_calls, 100000);
  measure("answers", answers, 1000);
  measure("threads", threads, 1000);
  measure("reloads", reloads, 60);
  vllm_engine_free(engine);
  return 0;
}
