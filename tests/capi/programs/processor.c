/* processor.c - the logits processor is called once a token, sees what was generated, and its edits decide.     processor model.gguf */
#include "check.h"

typedef struct seen {
  int calls;
  int32_t vocab_size;
  int32_t ids[16];
  vllm_engine* engine;
  vllm_status nested; /* of a call that would wait for the thread we hold up */
} seen;

/* Each token is forced to be 40 + the number of tokens before it. */
static void force(const int32_t* token_ids, int32_t n_token_ids, float* logits, int32_t vocab_size, void* user_data) {
  seen* to = (seen*)user_data;
  CHECK(n_token_ids == to->calls); /* none on the first call */
  for (int32_t i = 0; i < n_token_ids; i++) CHECK(token_ids[i] == 40 + i);
  to->calls++;
  to->vocab_size = vocab_size;
  for (int32_t i = 0; i < vocab_size; i++) logits[i] = -1e30f;
  logits[40 + n_token_ids] = 1e30f;
  if (to->engine) {
    vllm_sampling_params sampling = greedy(1);
    vllm_completion answer;
    to->nested = vllm_complete(to->engine, "x", &sampling, &answer);
    to->engine = NULL;
  }
}

int main(int argc, char** argv) {
  (void)argc;
  vllm_engine* engine = load(argv[1]);
  seen to = {0};
  vllm_sampling_params sampling = greedy(10);
  sampling.logits_processor = force;
  sampling.logits_processor_user_data = &to;
  const int32_t prompt[] = {5};
  int32_t ids[16], n;
  CHECK(vllm_complete_tokens(engine, prompt, 1, &sampling, ids, 16, &n, NULL) == VLLM_OK);
  CHECK(n == 10 && to.calls == 10 && to.vocab_size > 50);
  for (int32_t i = 0; i < n; i++) CHECK(ids[i] == 40 + i);

  memset(&to, 0, sizeof to);
  to.engine = engine;
  CHECK(vllm_complete_tokens(engine, prompt, 1, &sampling, ids, 16, &n, NULL) == VLLM_OK);
  CHECK(to.nested == VLLM_ERR_INVALID_ARGUMENT); /* refused, not a deadlock */
  CHECK(!*vllm_last_error());
  vllm_engine_free(engine);
  return 0;
}
