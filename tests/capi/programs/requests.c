/* requests.c - vllm_request_*: side by side, cancelled, waited for from the wrong place, freed early.     requests model.gguf */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "check.h"

enum { MANY = 12 };

static void together(vllm_engine* engine) {
  vllm_sampling_params sampling = greedy(16);
  static collected expected, got[MANY];
  CHECK(vllm_complete_stream(engine, "hello", &sampling, collect, &expected) == VLLM_OK);
  vllm_request* requests[MANY];
  for (int i = 0; i < MANY; i++) CHECK(vllm_request_submit(engine, "hello", &sampling, collect, &got[i], &requests[i]) == VLLM_OK);
  for (int i = 0; i < MANY; i++) {
    CHECK(vllm_request_wait(requests[i]) == VLLM_OK);
    CHECK(vllm_request_wait(requests[i]) == VLLM_OK);
    CHECK(vllm_request_done(requests[i]));
    CHECK(!*vllm_request_error(requests[i]));
    CHECK(vllm_request_cancel(requests[i]) == VLLM_OK); /* of a finished one */
    CHECK(got[i].finished && !strcmp(got[i].text, expected.text));
    CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_request_cancel", vllm_request_cancel(NULL), "request is NULL");
    vllm_request_free(requests[i]);
    vllm_request_free(requests[i]);
    CHECK(!vllm_request_done(requests[i]) && !*vllm_request_error(requests[i]));
    CHECK(strstr(vllm_last_error(), "vllm_request_cancel: ") == vllm_last_error()); /* as it was before them */
    CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_request_wait", vllm_request_wait(requests[i]), "not a live request");
  }
}

static void cancelled(vllm_engine* engine) {
  vllm_sampling_params endless = greedy(0);
  static collected to;
  vllm_request* request;
  CHECK(vllm_request_submit(engine, "hello", &endless, collect, &to, &request) == VLLM_OK);
  CHECK(!*vllm_request_error(request));
  CHECK(vllm_request_cancel(request) == VLLM_OK);
  CHECK(vllm_request_cancel(request) == VLLM_OK);
  CHECK(vllm_request_wait(request) == VLLM_OK);
  CHECK(vllm_request_done(request) && to.finished && !*vllm_request_error(request));
  vllm_request_free(request);

  static collected stopped; /* by its callback */
  stopped.stop_at = 3;
  CHECK(vllm_request_submit(engine, "hello", &endless, collect, &stopped, &request) == VLLM_OK);
  CHECK(vllm_request_wait(request) == VLLM_OK);
  CHECK(stopped.calls == 3);
  vllm_request_free(request);

  static collected freed; /* while it runs: free cancels, and waits for the last call */
  CHECK(vllm_request_submit(engine, "hello", &endless, collect, &freed, &request) == VLLM_OK);
  vllm_request_free(request);
  int calls = freed.calls;
  nanosleep(&(struct timespec){0, 20000000}, NULL);
  CHECK(freed.calls == calls);
}

/* What the callback of a request does to that request. */
typedef struct inside {
  pthread_t caller;
  _Atomic(vllm_request*) request;
  vllm_engine* engine;
  vllm_status waited;
  vllm_status nested;
  atomic_bool freed;
  atomic_int calls_after;
} inside;

static bool wait_inside(const char* delta, bool finished, void* user_data) {
  (void)delta, (void)finished;
  inside* to = user_data;
  CHECK(!pthread_equal(to->caller, pthread_self())); /* a thread of the library */
  while (!atomic_load(&to->request)) nanosleep(&(struct timespec){0, 1000000}, NULL);
  to->waited = vllm_request_wait(to->request);
  CHECK(strstr(vllm_last_error(), "vllm_request_wait: ") && strstr(vllm_last_error(), "own callback"));
  vllm_sampling_params sampling = greedy(2);
  vllm_completion answer;
  to->nested = vllm_complete(to->engine, "nested", &sampling, &answer); /* any other call is fine in here */
  vllm_completion_free(&answer);
  return true;
}

static bool free_inside(const char* delta, bool finished, void* user_data) {
  (void)delta, (void)finished;
  inside* to = user_data;
  while (!atomic_load(&to->request)) nanosleep(&(struct timespec){0, 1000000}, NULL);
  if (atomic_load(&to->freed)) atomic_fetch_add(&to->calls_after, 1);
  vllm_request_free(to->request);
  atomic_store(&to->freed, true);
  return true;
}

static void from_its_callback(vllm_engine* engine) {
  vllm_sampling_params sampling = greedy(3), endless = greedy(0);
  inside to = {.caller = pthread_self(), .engine = engine, .waited = VLLM_OK, .nested = VLLM_ERR_UNKNOWN};
  vllm_request* request;
  CHECK(vllm_request_submit(engine, "hello", &sampling, wait_inside, &to, &request) == VLLM_OK);
  atomic_store(&to.request, request);
  CHECK(vllm_request_wait(request) == VLLM_OK);
  CHECK(to.waited == VLLM_ERR_INVALID_ARGUMENT && to.nested == VLLM_OK);
  vllm_request_free(request);

  inside gone = {.caller = pthread_self()};
  CHECK(vllm_request_submit(engine, "hello", &endless, free_inside, &gone, &request) == VLLM_OK);
  atomic_store(&gone.request, request);
  while (!atomic_load(&gone.freed)) nanosleep(&(struct timespec){0, 1000000}, NULL);
  nanosleep(&(struct timespec){0, 50000000}, NULL);
  CHECK(atomic_load(&gone.calls_after) == 0);
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_request_cancel", vllm_request_cancel(request), "not a live request");
}

static void outlives_its_engine(const char* path) {
  vllm_engine* engine = load(path);
  vllm_sampling_params endless = greedy(0);
  static collected to;
  vllm_request* request;
  CHECK(vllm_request_submit(engine, "hello", &endless, collect, &to, &request) == VLLM_OK);
  vllm_engine_free(engine);
  vllm_request_wait(request);
  CHECK(vllm_request_done(request));
  vllm_request_free(request);
}

static void refused(vllm_engine* engine) {
  vllm_sampling_params zeros;
  memset(&zeros, 0, sizeof zeros);
  collected to = {0};
  vllm_request* request = (vllm_request*)1;
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_request_submit", vllm_request_submit(engine, "x", &zeros, collect, &to, &request),
                "must be above 0");
  CHECK(!request && !to.calls);
}

int main(int argc, char** argv) {
  (void)argc;
  vllm_engine* engine = load(argv[1]);
  together(engine);
  cancelled(engine);
  from_its_callback(engine);
  refused(engine);
  outlives_its_engine(argv[1]);
  vllm_engine_free(engine);
  return 0;
}
