/* failing.c - a model whose third step fails, then every third again: what each way of asking is told.     failing fails.gguf */
#include "check.h"

static void fine(vllm_engine* engine) {
  vllm_sampling_params sampling = greedy(1);
  vllm_completion answer;
  CHECK(vllm_complete(engine, "x", &sampling, &answer) == VLLM_OK);
  vllm_completion_free(&answer);
}

int main(int argc, char** argv) {
  (void)argc;
  vllm_engine* engine = load(argv[1]);
  vllm_sampling_params sampling = greedy(8);
  vllm_completion answer;
  memset(&answer, 0xab, sizeof answer);
  CHECK_REFUSED(VLLM_ERR_RUNTIME, "vllm_complete", vllm_complete(engine, "x", &sampling, &answer), "this step fails");
  CHECK(!answer.text && !answer.finish_reason && !answer.completion_tokens);
  fine(engine);
  CHECK(!*vllm_last_error());
  fine(engine);

  const int32_t prompt[] = {5};
  int32_t ids[8], n = 9;
  CHECK_REFUSED(VLLM_ERR_RUNTIME, "vllm_complete_tokens", vllm_complete_tokens(engine, prompt, 1, &sampling, ids, 8, &n, &answer),
                "this step fails");
  CHECK(n == 0 && !answer.text);

  collected to = {0};
  CHECK_REFUSED(VLLM_ERR_RUNTIME, "vllm_complete_stream", vllm_complete_stream(engine, "x", &sampling, collect, &to), "this step fails");
  CHECK(!to.finished);

  vllm_request* request;
  memset(&to, 0, sizeof to);
  CHECK(vllm_request_submit(engine, "x", &sampling, collect, &to, &request) == VLLM_OK);
  CHECK_REFUSED(VLLM_ERR_RUNTIME, "vllm_request_wait", vllm_request_wait(request), "this step fails");
  CHECK_REFUSED(VLLM_ERR_RUNTIME, "vllm_request_wait", vllm_request_wait(request), "this step fails");
  CHECK(vllm_request_done(request) && strstr(vllm_request_error(request), "this step fails"));
  CHECK(vllm_request_cancel(request) == VLLM_OK);
  CHECK(!*vllm_last_error());
  vllm_request_free(request);
  CHECK(!*vllm_last_error()); /* a free tells nobody's failure */

  char* json = (char*)1;
  static const char chat[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}], \"max_tokens\": 8}";
  CHECK_REFUSED(VLLM_ERR_RUNTIME, "vllm_chat", vllm_chat(engine, chat, &json), "this step fails");
  CHECK(!json);
  memset(&to, 0, sizeof to);
  CHECK_REFUSED(VLLM_ERR_RUNTIME, "vllm_chat_stream", vllm_chat_stream(engine, chat, collect, &to), "this step fails");
  CHECK(!to.finished);
  fine(engine);
  vllm_engine_free(engine);
  return 0;
}
