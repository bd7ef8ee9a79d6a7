/* offload.c - say where weights live, and what a document with a mistake is told.     ./offload model.gguf */
#include <stdio.h>
#include <vllm.h>

/* Loads the model under a document and says what became of it. */
static vllm_status try_document(const char* path, const char* document) {
  vllm_model_params model = vllm_model_params_default();
  model.model_path = path;
  model.num_blocks = 64;
  model.offload_config = document;
  vllm_engine* engine;
  vllm_status status = vllm_engine_load(&model, &engine);
  printf("\n%s\n", document);
  if (status == VLLM_OK) printf("  loaded\n");
  else printf("  status %d, %s\n", status, vllm_last_error());
  vllm_engine_free(engine); /* NULL after a failure, and then nothing to do */
  return status;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: %s model.gguf\n", argv[0]);
    return 2;
  }
  /* Mistakes are found before the model is opened, and are named with what was expected. */
  static const char* const mistakes[] = {
      "{\"vllm_cpp\": {\"mmap\": true}}",
      "{\"vllm_cpp\": {\"mmap\": {\"enabled\": \"yes\"}}}",
      "{\"vllm_cpp\": {\"expert_stream\": {\"slot\": 4000}}}",
      "{\"vllm_cpp\": {\"expert_stream\": {\"slots\": 0}}}",
      "{\"offload_backend\": \"disk\"}",
      "{\"vllm_cpp\": ",
  };
  int failures = 0;
  for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++)
    failures += try_document(argv[1], mistakes[i]) != VLLM_ERR_INVALID_ARGUMENT;

  /* Weights in place from the file's mapping, read in page by page as they are used; then copied into memory. */
  failures += try_document(argv[1], "{\"vllm_cpp\": {\"mmap\": {\"enabled\": true, \"prefault\": false}}}") != VLLM_OK;
  failures += try_document(argv[1], "{\"vllm_cpp\": {\"mmap\": {\"enabled\": false}}}") != VLLM_OK;
  return failures ? 1 : 0;
}
