/* exits.c - the process may end at any moment, from anywhere, with requests in flight, and ends with its own status.
   exits MODE model.gguf [milliseconds]; every mode ends with status 7 */
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

static vllm_engine* engine;

static void pause_ms(long ms) { nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL); }

static bool leave(const char* delta, bool finished, void* user_data) {
  (void)delta, (void)finished, (void)user_data;
  exit(7);
}

static bool ignore(const char* delta, bool finished, void* user_data) {
  (void)delta, (void)finished, (void)user_data;
  return true;
}

static void* busy(void* unused) {
  (void)unused;
  vllm_sampling_params endless = greedy(0);
  vllm_completion answer;
  while (vllm_complete(engine, "x", &endless, &answer) == VLLM_OK) vllm_completion_free(&answer);
  return NULL;
}

/* It may fail, and that is nobody's concern: what it needs is being taken down. */
static void* first_call(void* path) {
  vllm_model_params params = vllm_model_params_default();
  params.model_path = path;
  vllm_engine_load(&params, &engine);
  return NULL;
}

static void* leaver(void* unused) {
  (void)unused;
  exit(7);
}

static void start_busy(int threads) {
  for (int i = 0; i < threads; i++) {
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, busy, NULL));
  }
  pause_ms(50);
}

static void start_request(vllm_token_callback callback) {
  static vllm_request* request;
  vllm_sampling_params endless = greedy(0);
  CHECK(vllm_request_submit(engine, "x", &endless, callback, NULL, &request) == VLLM_OK);
}

static void last_words(void) {
  vllm_sampling_params sampling = greedy(2);
  vllm_completion answer;
  CHECK(vllm_complete(engine, "x", &sampling, &answer) == VLLM_OK); /* the library still works in the host's own exit handlers */
  vllm_completion_free(&answer);
  vllm_engine_free(engine);
}

int main(int argc, char** argv) {
  (void)argc;
  const char* mode = argv[1];
  if (!strcmp(mode, "while-starting")) {
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, first_call, argv[2]));
    pause_ms(atol(argv[3]));
    exit(7);
  }
  engine = load(argv[2]);
  vllm_sampling_params endless = greedy(0);
  if (!strcmp(mode, "return")) return 7;
  if (!strcmp(mode, "in-flight")) start_request(ignore);
  if (!strcmp(mode, "busy")) start_busy(3);
  if (!strcmp(mode, "stream-callback")) vllm_complete_stream(engine, "x", &endless, leave, NULL);
  if (!strcmp(mode, "request-callback")) {
    start_request(leave);
    for (;;) pause_ms(1000);
  }
  if (!strcmp(mode, "other-thread")) {
    start_busy(2);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, leaver, NULL));
    for (;;) pause_ms(1000);
  }
  if (!strcmp(mode, "atexit")) CHECK(!atexit(last_words));
  if (!strcmp(mode, "_exit")) {
    start_busy(1);
    _exit(7);
  }
  exit(7);
}
