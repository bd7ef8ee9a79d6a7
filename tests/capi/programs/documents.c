/* documents.c - what vllm_engine_load says of each document of a file, in which they stand one after the other, each ended by a NUL.
   documents list      prints, for each: its status, a space, the text, a NUL */
#include "check.h"

static char documents[4 << 20];

int main(int argc, char** argv) {
  (void)argc;
  FILE* file = fopen(argv[1], "rb");
  CHECK(file);
  size_t size = fread(documents, 1, sizeof documents, file);
  CHECK(size && size < sizeof documents && !documents[size - 1]);
  for (const char* document = documents; document < documents + size; document += strlen(document) + 1) {
    vllm_model_params params = vllm_model_params_default();
    params.model_path = "/nonexistent/model.gguf";
    params.gpu_memory_utilization = 0;
    params.offload_config = document;
    vllm_engine* engine = (vllm_engine*)1;
    vllm_status status = vllm_engine_load(&params, &engine);
    CHECK(status != VLLM_OK && !engine);
    printf("%d %s%c", status, vllm_last_error(), 0);
  }
  return 0;
}
