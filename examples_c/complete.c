/* complete.c - load a model, complete a prompt, print the answer.     ./complete model.gguf ["The capital of France is"] */
#include <stdio.h>
#include <vllm.h>

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: %s model.gguf [prompt]\n", argv[0]);
    return 2;
  }
  const char* prompt = argc > 2 ? argv[2] : "The capital of France is";

  vllm_model_params model = vllm_model_params_default();
  model.model_path = argv[1];
  model.num_blocks = 64; /* 64 blocks of 32 tokens: plenty for one short answer */
  vllm_engine* engine;
  if (vllm_engine_load(&model, &engine) != VLLM_OK) {
    fprintf(stderr, "%s\n", vllm_last_error());
    return 1;
  }

  vllm_sampling_params sampling = vllm_sampling_params_default();
  sampling.temperature = 0; /* always the likeliest token */
  sampling.max_tokens = 24;
  vllm_completion answer;
  vllm_status status = vllm_complete(engine, prompt, &sampling, &answer);
  if (status == VLLM_OK) {
    printf("%s%s\n", prompt, answer.text);
    printf("-- %d tokens after a prompt of %d, ended by: %s\n", answer.completion_tokens, answer.prompt_tokens, answer.finish_reason);
  } else {
    fprintf(stderr, "%s\n", vllm_last_error());
  }

  vllm_completion_free(&answer); /* safe after a failure too */
  vllm_engine_free(engine);
  return status == VLLM_OK ? 0 : 1;
}
