/* residency.c - two engines in one process: a later document changes, keeps, or may no longer change what an earlier one said.
   residency MODE model.gguf */
#include <pthread.h>

#include "check.h"

enum { THREADS = 8 };

static const char* path;

static vllm_status try_load(const char* document, vllm_engine** engine) {
  vllm_model_params params = vllm_model_params_default();
  params.model_path = path;
  params.num_blocks = 32;
  params.offload_config = document;
  return vllm_engine_load(&params, engine);
}

static vllm_engine* loaded(const char* document) {
  vllm_engine* engine;
  vllm_status status = try_load(document, &engine);
  CHECK(status == VLLM_OK);
  return engine;
}

static void refused(const char* document, vllm_status expected, const char* text) {
  vllm_engine* engine = (vllm_engine*)1;
  CHECK_REFUSED(expected, "vllm_engine_load", try_load(document, &engine), text);
  CHECK(!engine);
}

static void same_answer(vllm_engine* one, vllm_engine* other) {
  vllm_sampling_params sampling = greedy(6);
  vllm_completion first, second;
  CHECK(vllm_complete(one, "hello", &sampling, &first) == VLLM_OK);
  CHECK(vllm_complete(other, "hello", &sampling, &second) == VLLM_OK);
  CHECK(!strcmp(first.text, second.text));
  vllm_completion_free(&first);
  vllm_completion_free(&second);
}

#define MAPPED "{\"vllm_cpp\":{\"mmap\":{\"enabled\":true}}}"
#define COPIED "{\"vllm_cpp\":{\"mmap\":{\"enabled\":false}}}"
#define STREAMED "{\"vllm_cpp\":{\"expert_stream\":{\"enabled\":true}}}"
#define NOT_STREAMED "{\"vllm_cpp\":{\"expert_stream\":{\"enabled\":false}}}"
#define FIT "{\"vllm_cpp\":{\"placement\":{\"fit\":true}}}"
#define BY_HAND "{\"vllm_cpp\":{\"placement\":{\"cpu_moe\":true}}}"
#define FROZEN "expert_stream cannot be changed once a model of this process used it (in force: expert_stream=off)"

/* Partial, equal and conflicting documents, one after the other, in both orders. */
static void in_turn(const char* before, const char* after) {
  vllm_engine* one = loaded(before);
  vllm_engine* other = loaded(after);
  same_answer(one, other);
  refused("{\"vllm_cpp\":{\"mmap\":{\"enable\":true}}}", VLLM_ERR_INVALID_ARGUMENT, "unknown key \"vllm_cpp.mmap.enable\"");
  vllm_engine* third = loaded(NULL);
  same_answer(one, third);
  vllm_engine_free(one);
  same_answer(other, third);
  vllm_engine_free(other);
  vllm_engine_free(third);
}

static void decided(void) {
  refused(STREAMED, VLLM_ERR_MODEL_LOAD, FROZEN);
  vllm_engine_free(loaded(NOT_STREAMED));
  vllm_engine_free(loaded(COPIED));

  /* What the host puts into the environment between two engines counts. */
  setenv("VT_MOE_EXPERT_STREAM", "0", 1);
  vllm_engine_free(loaded(STREAMED));
  setenv("VT_MOE_EXPERT_STREAM", "1", 1);
  refused(NOT_STREAMED, VLLM_ERR_MODEL_LOAD, FROZEN);
  vllm_engine_free(loaded(NULL));
  unsetenv("VT_MOE_EXPERT_STREAM");

  vllm_engine_free(loaded(FIT));
  refused(BY_HAND, VLLM_ERR_MODEL_LOAD, "cannot be combined with a manual placement");
  vllm_engine_free(loaded("{\"vllm_cpp\":{\"placement\":{\"fit\":false,\"cpu_moe\":true}}}"));
  setenv("VT_PLACEMENT_FIT", "1", 1);
  refused(NULL, VLLM_ERR_MODEL_LOAD, "cannot be combined with a manual placement");
  unsetenv("VT_PLACEMENT_FIT");
  vllm_engine_free(loaded(NULL));
}

static const char* const documents[THREADS] = {MAPPED, COPIED, NOT_STREAMED, STREAMED, NULL, "{", "{\"vllm-cpp\":{}}", "{}"};
static pthread_barrier_t together;
static vllm_engine* shared;

static void* at_once(void* argument) {
  size_t me = (size_t)argument;
  const char* document = documents[me];
  for (int round = 0; round < 3; round++) {
    pthread_barrier_wait(&together);
    vllm_engine* own = (vllm_engine*)1;
    vllm_status status = try_load(document, &own);
    if (me == 5) CHECK(status == VLLM_ERR_INVALID_ARGUMENT && strstr(vllm_last_error(), "malformed JSON"));
    else if (me == 6) CHECK(status == VLLM_ERR_INVALID_ARGUMENT && strstr(vllm_last_error(), "unknown key \"vllm-cpp\""));
    else if (me == 3) CHECK(status == VLLM_ERR_MODEL_LOAD && strstr(vllm_last_error(), FROZEN));
    else CHECK(status == VLLM_OK && !*vllm_last_error());
    if (status == VLLM_OK) same_answer(own, shared);
    else CHECK(!own);
    vllm_engine_free(own);
  }
  return NULL;
}

static vllm_status statuses[THREADS];

/* No model was loaded yet: the first to use the decision takes it for all, and whoever asked for the other is refused. */
static void* first(void* argument) {
  size_t me = (size_t)argument;
  static const char* const wishes[] = {STREAMED, NOT_STREAMED, NULL, COPIED};
  pthread_barrier_wait(&together);
  vllm_engine* own;
  statuses[me] = try_load(wishes[me % 4], &own);
  CHECK(statuses[me] == VLLM_OK || strstr(vllm_last_error(), "expert_stream cannot be changed once a model of this process used it"));
  vllm_engine_free(own);
  return NULL;
}

static void race(void) {
  pthread_t threads[THREADS];
  for (size_t i = 0; i < THREADS; i++) CHECK(!pthread_create(&threads[i], NULL, first, (void*)i));
  for (size_t i = 0; i < THREADS; i++) CHECK(!pthread_join(threads[i], NULL));
  CHECK(statuses[0] != statuses[1]);
  for (size_t i = 0; i < THREADS; i++) CHECK(statuses[i] == (i % 4 < 2 ? statuses[i % 2] : VLLM_OK));
}

int main(int argc, char** argv) {
  (void)argc;
  path = argv[2];
  CHECK(!pthread_barrier_init(&together, NULL, THREADS));
  if (!strcmp(argv[1], "race")) {
    race();
    return 0;
  }
  if (!strcmp(argv[1], "forward")) in_turn(MAPPED, COPIED);
  if (!strcmp(argv[1], "backward")) in_turn(COPIED, MAPPED);
  if (!strcmp(argv[1], "partial")) in_turn(COPIED, "{\"vllm_cpp\":{\"mmap\":{\"prefault\":false},\"expert_stream\":{\"slots\":9}}}");
  if (!strcmp(argv[1], "equal")) in_turn(COPIED, COPIED);
  if (!strcmp(argv[1], "inert")) in_turn("", "{}");
  decided();
  shared = loaded(NULL);
  pthread_t threads[THREADS];
  for (size_t i = 0; i < THREADS; i++) CHECK(!pthread_create(&threads[i], NULL, at_once, (void*)i));
  for (size_t i = 0; i < THREADS; i++) CHECK(!pthread_join(threads[i], NULL));
  vllm_engine_free(shared);
  return 0;
}
