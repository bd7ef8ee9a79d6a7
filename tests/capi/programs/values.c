/* values.c - what needs no model: frees that take NULL and come twice, refusals of NULLs, and that none of it starts Python. */
#include "check.h"

static void frees(void) {
  vllm_string_free(NULL);
  vllm_engine_free(NULL);
  vllm_request_free(NULL);
  vllm_video_engine_free(NULL);
  vllm_speech_engine_free(NULL);
  vllm_completion_free(NULL);
  vllm_transcription_free(NULL);
  vllm_embedding_result_free(NULL);
  vllm_video_result_free(NULL);
  vllm_speech_result_free(NULL);
  vllm_video_mux_argv_free(NULL, 3);

  vllm_string_free(strdup("text"));
  vllm_completion completion = {strdup("text"), "stop", 1, 2};
  vllm_transcription transcription = {strdup("text"), malloc(8), 2, 1};
  vllm_embedding_result embedding = {malloc(8), 1, 2, 3};
  vllm_speech_result speech = {malloc(8), 2, 3, 4, malloc(5), 5};
  vllm_video_result video = {strdup("frames"), strdup("sound"), 1, 2, 3, 4, 5, calloc(2, sizeof(char*)), 1};
  video.mux_argv[0] = strdup("ffmpeg");
  for (int twice = 0; twice < 2; twice++) {
    vllm_completion_free(&completion);
    vllm_transcription_free(&transcription);
    vllm_embedding_result_free(&embedding);
    vllm_speech_result_free(&speech);
    vllm_video_result_free(&video);
    CHECK(!completion.text && !completion.finish_reason && !completion.prompt_tokens && !completion.completion_tokens);
    CHECK(!transcription.text && !transcription.token_ids && !transcription.n_token_ids && !transcription.has_text);
    CHECK(!embedding.values && !embedding.n_embeddings && !embedding.dim && !embedding.prompt_tokens);
    CHECK(!speech.samples && !speech.wav && !speech.n_samples && !speech.n_wav && !speech.sample_rate && !speech.channels);
    CHECK(!video.frame_dir && !video.audio_path && !video.mux_argv && !video.mux_argc && !video.frame_count);
  }
}

static void nulls(void) {
  vllm_model_params model = vllm_model_params_default();
  vllm_sampling_params sampling = vllm_sampling_params_default();
  vllm_engine* engine = (vllm_engine*)&model;
  vllm_engine* some = (vllm_engine*)&model;
  vllm_request* request = (vllm_request*)&model;
  vllm_completion out;
  collected to = {0};
  char* json = (char*)&model;
  int32_t ids[2] = {1, 2}, n_out = 7;

#define REFUSED(function, call, text) CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, function, call, text)
  REFUSED("vllm_engine_load", vllm_engine_load(&model, NULL), "out is NULL");
  REFUSED("vllm_engine_load", vllm_engine_load(NULL, &engine), "params is NULL");
  CHECK(!engine);
  engine = some;
  REFUSED("vllm_engine_load", vllm_engine_load(&model, &engine), "model_path is NULL");
  CHECK(!engine);

  memset(&out, 0xab, sizeof out);
  REFUSED("vllm_complete", vllm_complete(NULL, "x", &sampling, &out), "engine is NULL");
  CHECK(!out.text && !out.finish_reason && !out.prompt_tokens && !out.completion_tokens);
  REFUSED("vllm_complete", vllm_complete(some, NULL, &sampling, &out), "prompt is NULL");
  REFUSED("vllm_complete", vllm_complete(some, "x", NULL, &out), "params is NULL");
  REFUSED("vllm_complete", vllm_complete(some, "x", &sampling, NULL), "out is NULL");

  REFUSED("vllm_complete_tokens", vllm_complete_tokens(NULL, ids, 1, &sampling, ids, 2, &n_out, NULL), "engine is NULL");
  CHECK(n_out == 0);
  REFUSED("vllm_complete_tokens", vllm_complete_tokens(some, NULL, 1, &sampling, ids, 2, &n_out, NULL), "prompt is NULL");
  REFUSED("vllm_complete_tokens", vllm_complete_tokens(some, ids, 0, &sampling, ids, 2, &n_out, NULL), "n_prompt is 0");
  REFUSED("vllm_complete_tokens", vllm_complete_tokens(some, ids, 1, NULL, ids, 2, &n_out, NULL), "params is NULL");
  REFUSED("vllm_complete_tokens", vllm_complete_tokens(some, ids, 1, &sampling, NULL, 2, &n_out, NULL), "out_tokens is NULL");
  REFUSED("vllm_complete_tokens", vllm_complete_tokens(some, ids, 1, &sampling, ids, 2, NULL, NULL), "n_out is NULL");
  n_out = 7;
  REFUSED("vllm_complete_tokens", vllm_complete_tokens(some, ids, 1, &sampling, ids, -1, &n_out, NULL), "max_out is -1");
  CHECK(n_out == 0);

  REFUSED("vllm_complete_stream", vllm_complete_stream(NULL, "x", &sampling, collect, &to), "engine is NULL");
  REFUSED("vllm_complete_stream", vllm_complete_stream(some, NULL, &sampling, collect, &to), "prompt is NULL");
  REFUSED("vllm_complete_stream", vllm_complete_stream(some, "x", NULL, collect, &to), "params is NULL");
  REFUSED("vllm_complete_stream", vllm_complete_stream(some, "x", &sampling, NULL, &to), "callback is NULL");

  REFUSED("vllm_request_submit", vllm_request_submit(NULL, "x", &sampling, collect, &to, &request), "engine is NULL");
  CHECK(!request);
  REFUSED("vllm_request_submit", vllm_request_submit(some, NULL, &sampling, collect, &to, &request), "prompt is NULL");
  REFUSED("vllm_request_submit", vllm_request_submit(some, "x", NULL, collect, &to, &request), "params is NULL");
  REFUSED("vllm_request_submit", vllm_request_submit(some, "x", &sampling, NULL, &to, &request), "callback is NULL");
  REFUSED("vllm_request_submit", vllm_request_submit(some, "x", &sampling, collect, &to, NULL), "out is NULL");
  REFUSED("vllm_request_cancel", vllm_request_cancel(NULL), "request is NULL");
  REFUSED("vllm_request_wait", vllm_request_wait(NULL), "request is NULL");
  CHECK(!vllm_request_done(NULL));
  CHECK(!*vllm_request_error(NULL));

  REFUSED("vllm_chat", vllm_chat(NULL, "{}", &json), "engine is NULL");
  CHECK(!json);
  REFUSED("vllm_chat", vllm_chat(some, NULL, &json), "request_json is NULL");
  REFUSED("vllm_chat", vllm_chat(some, "{}", NULL), "out_json is NULL");
  REFUSED("vllm_chat_stream", vllm_chat_stream(some, "{}", NULL, NULL), "callback is NULL");
  CHECK(to.calls == 0);
}

/* The kernel's list of what this process has mapped. */
static bool python_is_here(void) {
  char line[4096];
  bool here = false;
  FILE* maps = fopen("/proc/self/maps", "r");
  CHECK(maps);
  while (fgets(line, sizeof line, maps)) here |= strstr(line, "libpython") || strstr(line, "_vllm_embed");
  fclose(maps);
  return here;
}

int main(void) {
  CHECK(!*vllm_last_error());
  frees();
  nulls();
  const char* before = "vllm_chat_stream: callback is NULL";
  CHECK(!strcmp(vllm_last_error(), before));
  vllm_model_params_default();
  vllm_version();
  vllm_abi_version();
  frees();
  CHECK(!strcmp(vllm_last_error(), before)); /* they leave it as it is */
  CHECK(!python_is_here());
  return 0;
}
