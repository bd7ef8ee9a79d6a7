/* check.h - a failed check prints where it stands and what the library said, and ends the program with 1. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vllm.h>

#define CHECK(condition)                                                                                                  \
  do {                                                                                                                    \
    if (!(condition)) {                                                                                                   \
      fprintf(stderr, "%s:%d: not so: %s; last error: '%s'\n", __FILE__, __LINE__, #condition, vllm_last_error());         \
      exit(1);                                                                                                            \
    }                                                                                                                     \
  } while (0)

/* A refused call: its status, and its text, which begins with the function's name. */
#define CHECK_REFUSED(status, function, call, text)                        \
  do {                                                                     \
    CHECK((call) == (status));                                             \
    CHECK(!strncmp(vllm_last_error(), function ": ", sizeof function + 1)); \
    CHECK(strstr(vllm_last_error(), text));                                \
  } while (0)

static inline vllm_engine* load(const char* path) {
  vllm_model_params params = vllm_model_params_default();
  params.model_path = path;
  params.num_blocks = 32;
  vllm_engine* engine = NULL;
  CHECK(vllm_engine_load(&params, &engine) == VLLM_OK);
  CHECK(engine != NULL);
  CHECK(!*vllm_last_error());
  return engine;
}

static inline vllm_sampling_params greedy(int32_t max_tokens) {
  vllm_sampling_params params = vllm_sampling_params_default();
  params.temperature = 0;
  params.max_tokens = max_tokens;
  params.ignore_eos = 1; /* the tiny models say anything at any time */
  return params;
}

/* What a callback collects. */
typedef struct collected {
  char text[8192];
  int calls;
  int finished;
  int stop_at; /* answer false at this call; 0: never */
} collected;

static inline bool collect(const char* delta, bool finished, void* user_data) {
  collected* to = (collected*)user_data;
  CHECK(delta != NULL);
  CHECK(!to->finished); /* the finished call is the last */
  CHECK(strlen(to->text) + strlen(delta) < sizeof to->text);
  strcat(to->text, delta);
  to->calls++;
  to->finished = finished;
  return to->calls != to->stop_at;
}

#endif
