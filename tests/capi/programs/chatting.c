/* chatting.c - vllm_chat and vllm_chat_stream: shapes, refusals, parsers checked at the first chat. Chunks go to stdout.
   chatting model.gguf */
#include "check.h"

static const char request[] = "{\"model\": \"any\", \"stream\": true, \"temperature\": 0, \"max_tokens\": 6, "
                              "\"messages\": [{\"role\": \"user\", \"content\": \"hello\"}]}";

static bool print_chunk(const char* chunk, bool finished, void* user_data) {
  int* calls = user_data;
  CHECK(finished == !*chunk); /* the last call brings nothing but the end */
  if (!finished) puts(chunk);
  return ++*calls >= 0;
}

static bool stop(const char* chunk, bool finished, void* user_data) {
  (void)chunk, (void)finished;
  return ++*(int*)user_data < 2;
}

/* Parsers are named at load, and looked up by the first chat. */
static void parser(const char* path, const char* tool, const char* reasoning, const char* told) {
  vllm_model_params params = vllm_model_params_default();
  params.model_path = path;
  params.num_blocks = 32;
  params.tool_parser = tool;
  params.reasoning_parser = reasoning;
  vllm_engine* engine;
  CHECK(vllm_engine_load(&params, &engine) == VLLM_OK);
  char* answer;
  if (told) CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_chat", vllm_chat(engine, request, &answer), told);
  else CHECK(vllm_chat(engine, request, &answer) == VLLM_OK);
  vllm_string_free(answer);
  vllm_engine_free(engine);
}

int main(int argc, char** argv) {
  (void)argc;
  vllm_engine* engine = load(argv[1]);
  char* answer = (char*)1;
  static const char* const wrong[] = {"{not json", "[]",  "{}", "{\"messages\": []}", "{\"messages\": [{\"role\": \"user\"}], \"n\": 2}",
                                      ""};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_chat", vllm_chat(engine, wrong[i], &answer), "");
    CHECK(!answer);
    int calls = 0;
    CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_chat_stream", vllm_chat_stream(engine, wrong[i], stop, &calls), "");
    CHECK(!calls);
  }
  CHECK(vllm_chat(engine, request, &answer) == VLLM_OK);
  puts(answer);
  vllm_string_free(answer);
  int calls = 0;
  CHECK(vllm_chat_stream(engine, request, print_chunk, &calls) == VLLM_OK);
  CHECK(calls > 3);
  calls = 0;
  CHECK(vllm_chat_stream(engine, request, stop, &calls) == VLLM_OK);
  CHECK(calls == 2);
  vllm_engine_free(engine);

  parser(argv[1], "no-such-parser", NULL, "no-such-parser");
  parser(argv[1], NULL, "no-such-reasoner", "no-such-reasoner");
  parser(argv[1], "hermes", "none", NULL);
  return 0;
}
