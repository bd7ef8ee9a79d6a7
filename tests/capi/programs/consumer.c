/* consumer.c - binds as a well-known Go backend does: global scope, text and video functions by name, then the version.
   consumer LIBRARY model.gguf */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vllm.h>

static void* library;

static void* bound(const char* name) {
  void* function = dlsym(library, name);
  if (!function) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  return function;
}

static int deltas;

static bool count(const char* delta, bool finished, void* user_data) {
  (void)delta, (void)finished, (void)user_data;
  return ++deltas > 0;
}

int main(int argc, char** argv) {
  (void)argc;
  library = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
  if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
  static const char* const names[] = {
      "vllm_engine_load", "vllm_engine_free", "vllm_complete", "vllm_complete_stream", "vllm_chat", "vllm_chat_stream", "vllm_string_free",
      "vllm_completion_free", "vllm_last_error", "vllm_version", "vllm_abi_version", "vllm_video_engine_load", "vllm_video_engine_free",
      "vllm_video_generate", "vllm_video_result_free", "vllm_video_mux_argv", "vllm_video_mux_argv_free",
  };
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) bound(names[i]);
  int32_t (*abi_version)(void);
  *(void**)&abi_version = bound("vllm_abi_version");
  if (abi_version() != 21) return fprintf(stderr, "interface %d\n", abi_version()), 1;

  /* Structs of its own making: the layouts, not the header, are what such a caller has. */
  unsigned char model[128] = {0}, sampling[136] = {0};
  const char* path = argv[2];
  int32_t blocks = 32, max_tokens = 4, yes = 1;
  float one = 1.0f;
  memcpy(model, &path, sizeof path);
  memcpy(model + 20, &blocks, sizeof blocks);
  memcpy(sampling + 4, &one, sizeof one);             /* top_p */
  memcpy(sampling + 16, &max_tokens, sizeof max_tokens);
  memcpy(sampling + 44, &one, sizeof one);            /* repetition_penalty */
  memcpy(sampling + 52, &yes, sizeof yes);            /* ignore_eos */
  int (*load)(const void*, void**);
  int (*stream)(void*, const char*, const void*, vllm_token_callback, void*);
  const char* (*last_error)(void);
  *(void**)&load = bound("vllm_engine_load");
  *(void**)&stream = bound("vllm_complete_stream");
  *(void**)&last_error = bound("vllm_last_error");
  void* engine = NULL;
  if (load(model, &engine) || stream(engine, "hello", sampling, count, NULL)) return fprintf(stderr, "%s\n", last_error()), 1;
  printf("%d deltas\n", deltas);
  return deltas > 1 ? 0 : 1;
}
