/* processor.c - the logits processor is called once a token, sees what was generated, and its edits decide. In it, no call waits.
   processor model.gguf */
#include "check.h"

typedef struct seen {
  int calls;
  int32_t vocab_size;
  vllm_engine* engine; /* what it is to try waiting for */
  vllm_request* request;
} seen;

static const char chat[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}";

static bool never(const char* delta, bool finished, void* user_data) {
  (void)delta, (void)finished, (void)user_data;
  CHECK(!"called");
  return false;
}

/* Refused by name, not a deadlock; and free, which cannot be refused, returns. */
static void wait_in_every_way(vllm_engine* engine, vllm_request* request) {
  vllm_sampling_params sampling = greedy(1);
  vllm_completion answer;
  const int32_t prompt[] = {5};
  int32_t n;
  char* text;
#define REFUSED(function, ...) \
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, #function, function(__VA_ARGS__), "called from a logits processor")
  REFUSED(vllm_complete, engine, "x", &sampling, &answer);
  REFUSED(vllm_complete_tokens, engine, prompt, 1, &sampling, NULL, 0, &n, NULL);
  REFUSED(vllm_complete_stream, engine, "x", &sampling, never, NULL);
  REFUSED(vllm_chat, engine, chat, &text);
  REFUSED(vllm_chat_stream, engine, chat, never, NULL);
  REFUSED(vllm_request_wait, request);
  CHECK(!vllm_request_done(request));
  vllm_request_free(request);
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_request_cancel", vllm_request_cancel(request), "not a live request");
  vllm_request_free(request);
}

static bool count(const char* delta, bool finished, void* user_data) {
  (void)delta;
  CHECK(!finished); /* freed before its end */
  ++*(int*)user_data;
  return true;
}

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
    wait_in_every_way(to->engine, to->request);
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
  int counted = 0;
  vllm_sampling_params endless = greedy(0);
  CHECK(vllm_request_submit(engine, "x", &endless, count, &counted, &to.request) == VLLM_OK);
  CHECK(vllm_complete_tokens(engine, prompt, 1, &sampling, ids, 16, &n, NULL) == VLLM_OK);
  CHECK(n == 10 && !to.engine);
  CHECK(!*vllm_last_error());
  vllm_engine_free(engine);
  return 0;
}
