/* completing.c - vllm_complete, vllm_complete_tokens and vllm_complete_stream agree, repeat, and refuse.     completing model.gguf */
#include "check.h"

static bool well_formed(const char* text) {
  const unsigned char* at = (const unsigned char*)text;
  while (*at) {
    int more = *at < 0x80 ? 0 : *at >= 0xc2 && *at < 0xe0 ? 1 : *at >= 0xe0 && *at < 0xf0 ? 2 : *at >= 0xf0 && *at < 0xf5 ? 3 : -1;
    if (more < 0) return false;
    for (at++; more; more--, at++)
      if ((*at & 0xc0) != 0x80) return false;
  }
  return true;
}

static bool collect_well_formed(const char* delta, bool finished, void* user_data) {
  CHECK(well_formed(delta));
  return collect(delta, finished, user_data);
}

static char* text_of(vllm_engine* engine, const char* prompt, vllm_sampling_params sampling) {
  vllm_completion answer;
  CHECK(vllm_complete(engine, prompt, &sampling, &answer) == VLLM_OK);
  CHECK(answer.text && well_formed(answer.text));
  return answer.text;
}

static void blocking(vllm_engine* engine) {
  vllm_sampling_params sampling = greedy(12);
  vllm_completion answer;
  CHECK(vllm_complete(engine, "hello world", &sampling, &answer) == VLLM_OK);
  CHECK(!*vllm_last_error());
  CHECK(!strcmp(answer.finish_reason, "length"));
  CHECK(answer.completion_tokens == 12);
  CHECK(answer.prompt_tokens >= 1 && answer.prompt_tokens <= 11);
  char* again = text_of(engine, "hello world", sampling);
  CHECK(!strcmp(answer.text, again));
  vllm_string_free(again);

  /* A stop string ends the answer and is not part of it. */
  char stop[3] = {0};
  size_t length = strlen(answer.text);
  size_t at = length / 2;
  while (at && ((unsigned char)answer.text[at] & 0xc0) == 0x80) at--;
  size_t end = at + 1;
  while (((unsigned char)answer.text[end] & 0xc0) == 0x80) end++;
  char* word = strndup(answer.text + at, end - at);
  (void)stop;
  const char* stops[] = {word};
  sampling.stop = stops;
  sampling.n_stop = 1;
  vllm_completion stopped;
  CHECK(vllm_complete(engine, "hello world", &sampling, &stopped) == VLLM_OK);
  CHECK(!strcmp(stopped.finish_reason, "stop"));
  CHECK(!strstr(stopped.text, word));
  CHECK(!strncmp(stopped.text, answer.text, strlen(stopped.text)));
  free(word);
  vllm_completion_free(&stopped);
  vllm_completion_free(&answer);

  /* A seed repeats; max_tokens 0 goes on until the context is full. */
  vllm_sampling_params seeded = vllm_sampling_params_default();
  seeded.has_seed = 1;
  seeded.seed = UINT64_MAX - 1;
  seeded.ignore_eos = 1;
  char* first = text_of(engine, "x", seeded);
  char* second = text_of(engine, "x", seeded);
  CHECK(!strcmp(first, second));
  vllm_string_free(first);
  vllm_string_free(second);
}

static void tokens(vllm_engine* engine) {
  vllm_sampling_params sampling = greedy(8);
  const int32_t prompt[] = {10, 20, 30};
  int32_t ids[16] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1}, n = -1, few[2] = {-1, -1}, n_few = -1;
  vllm_completion answer;
  CHECK(vllm_complete_tokens(engine, prompt, 3, &sampling, ids, 16, &n, &answer) == VLLM_OK);
  CHECK(n == 8 && answer.completion_tokens == 8 && answer.prompt_tokens == 3);
  CHECK(ids[7] >= 0 && ids[8] == -1);
  vllm_completion_free(&answer);
  CHECK(vllm_complete_tokens(engine, prompt, 3, &sampling, few, 2, &n_few, &answer) == VLLM_OK);
  CHECK(n_few == 2 && few[0] == ids[0] && few[1] == ids[1]);
  CHECK(answer.completion_tokens == 8); /* a short buffer shortens the report only */
  vllm_completion_free(&answer);
  CHECK(vllm_complete_tokens(engine, prompt, 3, &sampling, NULL, 0, &n, NULL) == VLLM_OK);
  CHECK(n == 0);
  const int32_t outside[] = {10, 1 << 30}, negative[] = {-1};
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_complete_tokens",
                vllm_complete_tokens(engine, outside, 2, &sampling, ids, 16, &n, &answer), "1073741824");
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_complete_tokens",
                vllm_complete_tokens(engine, negative, 1, &sampling, ids, 16, &n, &answer), "-1");
  CHECK(n == 0 && !answer.text);
}

static void streaming(vllm_engine* engine) {
  vllm_sampling_params sampling = greedy(24);
  char* whole = text_of(engine, "hello", sampling);
  collected all = {0};
  CHECK(vllm_complete_stream(engine, "hello", &sampling, collect_well_formed, &all) == VLLM_OK);
  CHECK(all.finished && all.calls > 2);
  CHECK(!strcmp(all.text, whole));
  collected some = {0};
  some.stop_at = 2;
  CHECK(vllm_complete_stream(engine, "hello", &sampling, collect, &some) == VLLM_OK);
  CHECK(some.calls == 2 && !some.finished);
  CHECK(!strncmp(whole, some.text, strlen(some.text)));
  collected after = {0};
  CHECK(vllm_complete_stream(engine, "hello", &sampling, collect, &after) == VLLM_OK);
  CHECK(after.finished && !strcmp(after.text, whole));
  vllm_string_free(whole);
}

static void refusals(vllm_engine* engine) {
  vllm_completion answer;
  collected to = {0};
  vllm_sampling_params zeros, sampling;
  memset(&zeros, 0, sizeof zeros);
  memset(&answer, 0xab, sizeof answer);
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_complete", vllm_complete(engine, "x", &zeros, &answer), "must be above 0");
  CHECK(!answer.text && !answer.finish_reason && !answer.prompt_tokens && !answer.completion_tokens);
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_complete_stream", vllm_complete_stream(engine, "x", &zeros, collect, &to),
                "must be above 0");
#define WRONG(field, value)                                                                                              \
  sampling = greedy(4);                                                                                                  \
  sampling.field = value;                                                                                                \
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_complete", vllm_complete(engine, "x", &sampling, &answer), #field);
  WRONG(top_p, 1.5f)
  WRONG(top_p, 0)
  WRONG(min_p, -0.1f)
  WRONG(presence_penalty, 3)
  WRONG(frequency_penalty, -3)
  WRONG(min_tokens, -1)
  WRONG(n_stop, -1)
  WRONG(n_stop, 2) /* of none */
  CHECK(strstr(vllm_last_error(), "stop is NULL, but n_stop is 2"));
  WRONG(n_structured_choice, -1)
  WRONG(n_structured_choice, 3)
  CHECK(strstr(vllm_last_error(), "structured_choice is NULL, but n_structured_choice is 3"));
  sampling = greedy(4);
  sampling.structured_grammar = "root ::= \"1\"";
  sampling.structured_json_object = 1;
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_complete", vllm_complete(engine, "x", &sampling, &answer), "at most one");
  sampling = greedy(4);
  const char* stops[] = {"a", NULL};
  sampling.stop = stops;
  sampling.n_stop = 2;
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_complete", vllm_complete(engine, "x", &sampling, &answer), "stop[1]");
  sampling = greedy(4);
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_complete", vllm_complete(engine, "\xc3(", &sampling, &answer), "not UTF-8");
  /* A text that is too long for its place ends between two characters. */
  for (int i = 0; i < 4; i++) {
    vllm_model_params params = vllm_model_params_default();
    vllm_engine* none;
    char path[6004] = "abc";
    path[i] = 0;
    for (int n = 0; n < 1500; n++) strcat(path, "\xf0\x9d\x84\x9e");
    params.model_path = path;
    CHECK(vllm_engine_load(&params, &none) != VLLM_OK);
    CHECK(strlen(vllm_last_error()) > 4090 && well_formed(vllm_last_error()));
  }
  char* endless = malloc(1 << 20);
  memset(endless, 'z', (1 << 20) - 1);
  endless[(1 << 20) - 1] = 0;
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_complete", vllm_complete(engine, endless, &sampling, &answer), "tokens");
  free(endless);
  const char* texts[] = {"x", NULL};
  vllm_embedding_result embedding;
  memset(&embedding, 0xab, sizeof embedding);
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_embed", vllm_embed(engine, texts, 2, &embedding), "texts[1]");
  CHECK(!embedding.values && !embedding.n_embeddings);
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_embed", vllm_embed(engine, texts, 1, &embedding), "vllm_complete");
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_embed", vllm_embed(engine, texts, 0, &embedding), "n_texts");
  vllm_transcription transcription;
  vllm_transcription_params audio = vllm_transcription_params_default();
  audio.audio_path = "a.wav";
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_transcribe", vllm_transcribe(engine, &audio, &transcription), "text-generation engine");
  CHECK(!transcription.text);
  CHECK(to.calls == 0);
}

int main(int argc, char** argv) {
  (void)argc;
  vllm_engine* engine = load(argv[1]);
  blocking(engine);
  tokens(engine);
  streaming(engine);
  refusals(engine);
  streaming(engine); /* after every error the engine serves on */
  CHECK(!*vllm_last_error());
  vllm_engine_free(engine);
  return 0;
}
