/* loading.c - what vllm_engine_load refuses, with which status, and in which order.     loading model.gguf */
#include "check.h"

static const char nowhere[] = "/nonexistent/model.gguf";

/* A load that fails leaves no engine. */
static vllm_status try_load(const vllm_model_params* params) {
  vllm_engine* engine = (vllm_engine*)1;
  vllm_status status = vllm_engine_load(params, &engine);
  if (status == VLLM_OK) vllm_engine_free(engine);
  else CHECK(!engine && strstr(vllm_last_error(), "vllm_engine_load: ") == vllm_last_error() && strlen(vllm_last_error()) > 20);
  return status;
}

#define LOAD(path, expected, told, ...)                      \
  {                                                          \
    vllm_model_params params = vllm_model_params_default();  \
    params.model_path = path;                                \
    __VA_ARGS__;                                             \
    CHECK(try_load(&params) == expected);                    \
    CHECK(strstr(vllm_last_error(), told));                  \
  }

static void values(void) {
  LOAD(nowhere, VLLM_ERR_MODEL_LOAD, nowhere, )
  LOAD("/dev/null", VLLM_ERR_MODEL_LOAD, "/dev/null", )
  for (int32_t value = 0; value < 3; value++) {
    LOAD(nowhere, VLLM_ERR_MODEL_LOAD, "", params.enable_prefix_caching = value)
    LOAD(nowhere, VLLM_ERR_MODEL_LOAD, "", params.enable_jump_forward = value)
  }
  LOAD(nowhere, VLLM_ERR_INVALID_ARGUMENT, "enable_prefix_caching", params.enable_prefix_caching = 3)
  LOAD(nowhere, VLLM_ERR_INVALID_ARGUMENT, "enable_prefix_caching", params.enable_prefix_caching = -1)
  LOAD(nowhere, VLLM_ERR_INVALID_ARGUMENT, "enable_jump_forward", params.enable_jump_forward = 7)
  LOAD(nowhere, VLLM_ERR_INVALID_ARGUMENT, "device", params.device = 3)
  LOAD(nowhere, VLLM_ERR_INVALID_ARGUMENT, "device", params.device = -1)
  LOAD(nowhere, VLLM_ERR_INVALID_ARGUMENT, "block_size", params.block_size = 24)
  LOAD(nowhere, VLLM_ERR_MODEL_LOAD, nowhere, params.max_num_batched_tokens = 8192)
#define NEGATIVE(size) LOAD(nowhere, VLLM_ERR_INVALID_ARGUMENT, #size " must be between 0 and", params.size = -1)
  NEGATIVE(block_size)
  NEGATIVE(num_blocks)
  NEGATIVE(max_model_len)
  NEGATIVE(max_num_seqs)
  NEGATIVE(max_num_batched_tokens)
  NEGATIVE(kv_cache_memory_bytes)

  static const char* const policies[] = {"fcfs", "priority", "lpm", ""};
  for (int i = 0; i < 4; i++) LOAD(nowhere, VLLM_ERR_MODEL_LOAD, "", params.scheduling_policy = policies[i])
  LOAD(nowhere, VLLM_ERR_INVALID_ARGUMENT, "round-robin", params.scheduling_policy = "round-robin")

  LOAD(nowhere, VLLM_ERR_INVALID_ARGUMENT, "speculative_config", params.speculative_config = "{not json")
  LOAD(nowhere, VLLM_ERR_INVALID_ARGUMENT, "kv_transfer_config", params.kv_transfer_config = "{not json")
  LOAD(nowhere, VLLM_ERR_INVALID_ARGUMENT, "limit_mm_per_prompt", params.limit_mm_per_prompt = "[1]")
  LOAD(nowhere, VLLM_ERR_INVALID_ARGUMENT, "limit_mm_per_prompt", params.limit_mm_per_prompt = "{\"image\": -1}")
  LOAD(nowhere, VLLM_ERR_MODEL_LOAD, nowhere, params.limit_mm_per_prompt = "{\"image\": 2}")
  LOAD(nowhere, VLLM_ERR_INVALID_ARGUMENT, "not UTF-8", params.scheduling_policy = "\xff\xfe")
}

static void documents(void) {
  static const char* const inert[] = {"", " ", "{}", "{\"vllm_cpp\": {}}"};
  for (int i = 0; i < 4; i++) LOAD(nowhere, VLLM_ERR_MODEL_LOAD, nowhere, params.offload_config = inert[i])
  static const char* const wrong[] = {
      "{not json", "[]", "{\"offload_backend\": \"disk\"}", "{\"uva\": 5}", "{\"uva\": {\"cpu_offload_gb\": \"ten\"}}",
      "{\"uva\": {\"cpu_offload_gb\": -1}}", "{\"prefetch\": {\"offload_group_size\": 4, \"offload_num_in_group\": 5}}",
      "{\"vllm_cpp\": {\"expert_stream\": {\"slots\": 8000.0}}}", "{\"vllm_cpp\": {\"expert_stream\": {\"slot\": 1}}}",
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
    LOAD(nowhere, VLLM_ERR_INVALID_ARGUMENT, "", params.offload_config = wrong[i])
  /* A back end that does not match its fields is a warning, so the path is what fails. */
  static const char mismatched[] = "{\"offload_backend\": \"uva\", \"uva\": {\"cpu_offload_gb\": 1}, "
                                   "\"prefetch\": {\"offload_group_size\": 8}}";
  LOAD(nowhere, VLLM_ERR_MODEL_LOAD, nowhere, params.offload_config = mismatched)
}

/* Documents and enums, then the device, then the path. */
static void order(void) {
  LOAD(nowhere, VLLM_ERR_INVALID_ARGUMENT, "offload config", params.device = 2; params.offload_config = "[]")
  LOAD(nowhere, VLLM_ERR_MODEL_LOAD, "cuda", params.device = 2)
  LOAD(nowhere, VLLM_ERR_MODEL_LOAD, nowhere, params.device = 1)
}

int main(int argc, char** argv) {
  (void)argc;
  values();
  documents();
  order();

  /* After every refusal the right thing still works, under either spelling of "default", and the caller's strings may go at once. */
  vllm_model_params zeros;
  memset(&zeros, 0, sizeof zeros);
  char path[4096];
  strcpy(path, argv[1]);
  zeros.model_path = path;
  vllm_engine* engine;
  CHECK(vllm_engine_load(&zeros, &engine) == VLLM_OK);
  CHECK(!*vllm_last_error());
  memset(path, 'x', sizeof path - 1);
  vllm_sampling_params sampling = greedy(2);
  vllm_completion answer;
  CHECK(vllm_complete(engine, "a", &sampling, &answer) == VLLM_OK);
  vllm_completion_free(&answer);
  vllm_engine_free(engine);
  vllm_engine_free(engine); /* an ended handle: nothing to do */
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_complete", vllm_complete(engine, "a", &sampling, &answer), "not a live engine");
  return 0;
}
