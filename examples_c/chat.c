/* chat.c - one OpenAI chat request, answered whole and then streamed.     ./chat model.gguf ["What is the capital of France?"] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vllm.h>

/* A JSON string of `text`, with what JSON wants escaped. A real program uses its JSON library. */
static char* quoted(const char* text) {
  char *out = malloc(6 * strlen(text) + 3), *at = out;
  if (!out) exit(1);
  *at++ = '"';
  for (; *text; text++) {
    if (*text == '"' || *text == '\\') *at++ = '\\';
    if ((unsigned char)*text < 0x20) at += sprintf(at, "\\u%04x", *text);
    else *at++ = *text;
  }
  strcpy(at, "\"");
  return out;
}

/* Each call brings a chat.completion.chunk object, the last one "" with finished set. */
static bool print_chunk(const char* chunk, bool finished, void* user_data) {
  int* chunks = user_data;
  if (finished) return true;
  ++*chunks;
  return printf("%s\n", chunk) > 0;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: %s model.gguf [question]\n", argv[0]);
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

  char* question = quoted(argc > 2 ? argv[2] : "What is the capital of France?");
  size_t room = strlen(question) + 128;
  char* request = malloc(room);
  if (!request) return 1;
  snprintf(request, room, "{\"messages\": [{\"role\": \"user\", \"content\": %s}], \"temperature\": 0, \"max_tokens\": 32}", question);

  char* answer;
  vllm_status status = vllm_chat(engine, request, &answer);
  if (status == VLLM_OK) {
    printf("%s\n", answer);
    vllm_string_free(answer);
    int chunks = 0;
    status = vllm_chat_stream(engine, request, print_chunk, &chunks);
    printf("-- the same in %d chunks\n", chunks);
  }
  if (status != VLLM_OK) fprintf(stderr, "%s\n", vllm_last_error());

  free(request);
  free(question);
  vllm_engine_free(engine);
  return status == VLLM_OK ? 0 : 1;
}
