/* threads.c - many threads with small stacks race for the first call and share an engine; each has its own last error.
   threads model.gguf */
#include <pthread.h>

#include "check.h"

enum { THREADS = 8, STACK_BYTES = 64 << 10 };

static const char* path;
static pthread_barrier_t together;
static vllm_engine* shared;
static char texts[THREADS][4096];

static void* work(void* argument) {
  int me = (int)(size_t)argument;
  pthread_barrier_wait(&together);
  if (me % 2) { /* the first call of this thread, and perhaps of the process */
    vllm_model_params params = vllm_model_params_default();
    params.model_path = "/nonexistent/one.gguf";
    vllm_engine* none;
    CHECK_REFUSED(VLLM_ERR_MODEL_LOAD, "vllm_engine_load", vllm_engine_load(&params, &none), "one.gguf");
  } else {
    vllm_engine* own = load(path);
    CHECK(!*vllm_last_error());
    vllm_engine_free(own);
  }
  pthread_barrier_wait(&together);
  CHECK(!!*vllm_last_error() == me % 2); /* nobody else's */
  if (!me) shared = load(path);
  pthread_barrier_wait(&together);

  for (int round = 0; round < 4; round++) {
    vllm_sampling_params sampling = greedy(12);
    vllm_completion answer;
    CHECK(vllm_complete(shared, "hello", &sampling, &answer) == VLLM_OK);
    CHECK(strlen(answer.text) < sizeof texts[me]);
    if (!round) strcpy(texts[me], answer.text);
    CHECK(!strcmp(texts[me], answer.text));
    vllm_completion_free(&answer);
    collected to = {0};
    sampling.max_tokens = 5;
    CHECK(vllm_complete_stream(shared, "hello", &sampling, collect, &to) == VLLM_OK);
    CHECK(to.finished);
    char* json;
    CHECK(vllm_chat(shared, "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}], \"max_tokens\": 2}", &json) == VLLM_OK);
    vllm_string_free(json);
  }
  return NULL;
}

int main(int argc, char** argv) {
  (void)argc;
  path = argv[1];
  CHECK(!pthread_barrier_init(&together, NULL, THREADS));
  pthread_t threads[THREADS];
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  CHECK(!pthread_attr_setstacksize(&attributes, STACK_BYTES));
  for (size_t i = 0; i < THREADS; i++) CHECK(!pthread_create(&threads[i], &attributes, work, (void*)i));
  for (size_t i = 0; i < THREADS; i++) CHECK(!pthread_join(threads[i], NULL));
  for (size_t i = 1; i < THREADS; i++) CHECK(!strcmp(texts[i], texts[0]));
  vllm_engine_free(shared);
  return 0;
}
