/* stream.c - print an answer while it is written, and end it after a given number of characters.     ./stream model.gguf [prompt] */
#include <stdio.h>
#include <string.h>
#include <vllm.h>

enum { MOST_BYTES = 400 };

/* Called on this thread, before vllm_complete_stream returns. A character is never split, so it may go straight to the terminal. */
static bool print(const char* text, bool finished, void* user_data) {
  size_t* printed = user_data;
  *printed += strlen(text);
  fputs(text, stdout);
  fflush(stdout);
  if (finished) printf("\n-- the answer ended\n");
  return *printed < MOST_BYTES; /* false: enough, stop generating */
}

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: %s model.gguf [prompt]\n", argv[0]);
    return 2;
  }
  vllm_model_params model = vllm_model_params_default();
  model.model_path = argv[1];
  model.num_blocks = 64;
  vllm_engine* engine;
  if (vllm_engine_load(&model, &engine) != VLLM_OK) {
    fprintf(stderr, "%s\n", vllm_last_error());
    return 1;
  }

  vllm_sampling_params sampling = vllm_sampling_params_default();
  sampling.temperature = 0.8f;
  sampling.top_p = 0.95f;
  sampling.has_seed = 1; /* the same seed and prompt give the same text */
  sampling.seed = 1;
  sampling.max_tokens = 200;
  const char* const stops[] = {"\n\n"};
  sampling.stop = stops;
  sampling.n_stop = 1;

  const char* prompt = argc > 2 ? argv[2] : "Once upon a time";
  fputs(prompt, stdout);
  size_t printed = 0;
  vllm_status status = vllm_complete_stream(engine, prompt, &sampling, print, &printed);
  if (status != VLLM_OK) fprintf(stderr, "%s\n", vllm_last_error());
  if (printed >= MOST_BYTES) printf("\n-- stopped here, after %zu bytes\n", printed);

  vllm_engine_free(engine);
  return status == VLLM_OK ? 0 : 1;
}
