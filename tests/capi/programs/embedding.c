/* embedding.c - vllm_embed: rows of length 1, what is refused, and by which name.     embedding model.gguf text...
   Prints one line of numbers for each text, then the number of tokens. */
#include <math.h>
#include <pthread.h>

#include "check.h"

static vllm_engine* engine;

static void refusals(void) {
  vllm_embedding_result out;
  const char* texts[] = {"hello", NULL, "\xc3("};
  memset(&out, 0xab, sizeof out);
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_embed", vllm_embed(NULL, texts, 1, &out), "engine is NULL");
  CHECK(!out.values && !out.n_embeddings && !out.dim && !out.prompt_tokens);
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_embed", vllm_embed(engine, NULL, 1, &out), "texts is NULL");
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_embed", vllm_embed(engine, texts, 1, NULL), "out is NULL");
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_embed", vllm_embed(engine, texts, 0, &out), "n_texts is 0");
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_embed", vllm_embed(engine, texts, -1, &out), "n_texts is -1");
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_embed", vllm_embed(engine, texts, 2, &out), "texts[1] is NULL");
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_embed", vllm_embed(engine, texts + 2, 1, &out), "texts[0] is not UTF-8");
  char* endless = malloc(1 << 16);
  for (int i = 0; i < (1 << 16) - 1; i++) endless[i] = i % 2 ? ' ' : 'z';
  endless[(1 << 16) - 1] = 0;
  texts[1] = endless;
  memset(&out, 0xab, sizeof out);
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_embed", vllm_embed(engine, texts, 2, &out), "texts[1] has 32770 tokens");
  CHECK(strstr(vllm_last_error(), "max_model_len=256"));
  CHECK(!out.values && !out.n_embeddings && !out.dim && !out.prompt_tokens);
  free(endless);
}

/* A model that embeds does nothing else, and says what it does. */
static void other_tasks(void) {
  vllm_sampling_params sampling = greedy(4);
  vllm_completion answer;
  vllm_request* request;
  vllm_transcription transcription;
  vllm_transcription_params audio = vllm_transcription_params_default();
  collected to = {0};
  int32_t ids[] = {5}, n_out;
  char* text;
  const vllm_status invalid = VLLM_ERR_INVALID_ARGUMENT;
  CHECK_REFUSED(invalid, "vllm_complete", vllm_complete(engine, "x", &sampling, &answer), "vllm_embed");
  CHECK_REFUSED(invalid, "vllm_complete_tokens", vllm_complete_tokens(engine, ids, 1, &sampling, NULL, 0, &n_out, NULL), "vllm_embed");
  CHECK_REFUSED(invalid, "vllm_complete_stream", vllm_complete_stream(engine, "x", &sampling, collect, &to), "vllm_embed");
  CHECK_REFUSED(invalid, "vllm_request_submit", vllm_request_submit(engine, "x", &sampling, collect, &to, &request), "vllm_embed");
  CHECK_REFUSED(invalid, "vllm_chat", vllm_chat(engine, "{}", &text), "vllm_embed");
  CHECK_REFUSED(invalid, "vllm_chat_stream", vllm_chat_stream(engine, "{}", collect, &to), "vllm_embed");
  CHECK_REFUSED(invalid, "vllm_transcribe", vllm_transcribe(engine, &audio, &transcription), "call vllm_embed");
  CHECK(!request && !text && !to.calls);
}

static float* embedded(const char* const* texts, int32_t n, vllm_embedding_result* out) {
  CHECK(vllm_embed(engine, texts, n, out) == VLLM_OK && !*vllm_last_error());
  CHECK(out->n_embeddings == n && out->dim > 0 && out->prompt_tokens >= 2 * n);
  for (int32_t row = 0; row < n; row++) {
    double squares = 0;
    for (int32_t i = 0; i < out->dim; i++) squares += (double)out->values[row * out->dim + i] * out->values[row * out->dim + i];
    CHECK(fabs(squares - 1) < 1e-5);
  }
  return out->values;
}

/* Many at once get the same numbers as one alone. */
static void* one_of_many(void* argument) {
  const vllm_embedding_result* expected = argument;
  const char* texts[] = {"the sea", "hello world", "the sea"};
  for (int i = 0; i < 20; i++) {
    vllm_embedding_result out;
    float* values = embedded(texts, 3, &out);
    for (int32_t row = 0; row < 3; row += 2)
      CHECK(!memcmp(values + row * out.dim, expected->values, sizeof(float) * (size_t)out.dim));
    vllm_embedding_result_free(&out);
    CHECK(!out.values && !out.n_embeddings && !out.dim && !out.prompt_tokens);
    vllm_embedding_result_free(&out);
  }
  return NULL;
}

static void many(void) {
  enum { THREADS = 6 };
  const char* text = "the sea";
  vllm_embedding_result alone;
  embedded(&text, 1, &alone);
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++) CHECK(!pthread_create(&threads[i], NULL, one_of_many, &alone));
  for (int i = 0; i < THREADS; i++) CHECK(!pthread_join(threads[i], NULL));
  vllm_embedding_result_free(&alone);
}

int main(int argc, char** argv) {
  engine = load(argv[1]);
  refusals();
  other_tasks();
  many();
  vllm_embedding_result out;
  embedded((const char* const*)argv + 2, argc - 2, &out);
  for (int32_t i = 0; i < out.n_embeddings * out.dim; i++) printf("%.9g%c", out.values[i], i % out.dim == out.dim - 1 ? '\n' : ' ');
  printf("%d\n", out.prompt_tokens);
  vllm_engine_free(engine);
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_embed", vllm_embed(engine, (const char* const*)argv + 2, 1, &(vllm_embedding_result){0}), "handle");
  CHECK(out.values[0] == out.values[0]); /* the rows are the caller's, and outlive the engine */
  vllm_embedding_result_free(&out);
  return 0;
}
