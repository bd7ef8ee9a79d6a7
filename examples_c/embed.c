/* embed.c - load a model that embeds, and say how near texts are to the first one.     ./embed model.gguf ["a text" "another" ...] */
#include <stdio.h>
#include <vllm.h>

/* Rows have length 1, so their product is the cosine of the angle between them: 1 for the same direction. */
static double nearness(const float* a, const float* b, int dim) {
  double sum = 0;
  for (int i = 0; i < dim; i++) sum += (double)a[i] * b[i];
  return sum;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: %s model.gguf [text...]\n", argv[0]);
    return 2;
  }
  static const char* const some[] = {"a boat on the sea", "ships sail the ocean", "the price of a loaf of bread"};
  const char* const* texts = argc > 2 ? (const char* const*)argv + 2 : some;
  int n = argc > 2 ? argc - 2 : 3;

  vllm_model_params model = vllm_model_params_default();
  model.model_path = argv[1];
  vllm_engine* engine;
  if (vllm_engine_load(&model, &engine) != VLLM_OK) {
    fprintf(stderr, "%s\n", vllm_last_error());
    return 1;
  }

  vllm_embedding_result rows;
  vllm_status status = vllm_embed(engine, texts, n, &rows);
  if (status == VLLM_OK) {
    for (int i = 0; i < rows.n_embeddings; i++) printf("%+.4f  %s\n", nearness(rows.values, rows.values + i * rows.dim, rows.dim), texts[i]);
    printf("-- %d rows of %d floats, from %d tokens\n", rows.n_embeddings, rows.dim, rows.prompt_tokens);
  } else {
    fprintf(stderr, "%s\n", vllm_last_error());
  }

  vllm_embedding_result_free(&rows); /* safe after a failure too */
  vllm_engine_free(engine);
  return status == VLLM_OK ? 0 : 1;
}
