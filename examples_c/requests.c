/* requests.c - several answers at once, computed together; one of them is cancelled.     ./requests model.gguf */
#include <stdatomic.h>
#include <stdio.h>
#include <vllm.h>

enum { REQUESTS = 4 };

static const char* const prompts[REQUESTS] = {"The sea is", "My favourite colour is", "Once upon a time", "One, two, three,"};

/* Called from a thread of the library, one call at a time for a request; requests are delivered side by side. */
static bool count(const char* text, bool finished, void* user_data) {
  (void)text, (void)finished;
  atomic_fetch_add((atomic_int*)user_data, 1);
  return true;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: %s model.gguf\n", argv[0]);
    return 2;
  }
  vllm_model_params model = vllm_model_params_default();
  model.model_path = argv[1];
  model.max_num_seqs = REQUESTS;
  model.num_blocks = 64;
  vllm_engine* engine;
  if (vllm_engine_load(&model, &engine) != VLLM_OK) {
    fprintf(stderr, "%s\n", vllm_last_error());
    return 1;
  }

  vllm_sampling_params sampling = vllm_sampling_params_default();
  sampling.temperature = 0;
  sampling.max_tokens = 32;
  sampling.ignore_eos = 1;
  vllm_request* requests[REQUESTS];
  atomic_int calls[REQUESTS] = {0}; /* must outlive the requests */
  for (int i = 0; i < REQUESTS; i++)
    if (vllm_request_submit(engine, prompts[i], &sampling, count, &calls[i], &requests[i]) != VLLM_OK) {
      fprintf(stderr, "%s\n", vllm_last_error());
      return 1;
    }
  printf("%d requests are running\n", REQUESTS);
  vllm_request_cancel(requests[REQUESTS - 1]); /* it ends soon; waiting for it is no error */

  int failures = 0;
  for (int i = 0; i < REQUESTS; i++) {
    if (vllm_request_wait(requests[i]) == VLLM_OK) printf("\"%s\" was answered in %d calls\n", prompts[i], atomic_load(&calls[i]));
    else failures += printf("\"%s\" failed: %s\n", prompts[i], vllm_request_error(requests[i])) > 0;
    vllm_request_free(requests[i]);
  }
  vllm_engine_free(engine);
  return failures ? 1 : 0;
}
