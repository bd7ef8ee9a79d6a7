/* values.c - versions, defaults and frees: everything that needs no model, and so no Python. */
#include <stdlib.h>
#include <string.h>

#include "door.h"

int32_t vllm_abi_version(void) { return VLLM_ABI_VERSION; }

const char* vllm_version(void) { return DOOR_VERSION; }

vllm_model_params vllm_model_params_default(void) {
  return (vllm_model_params){.block_size = 32, .max_num_seqs = 32, .gpu_memory_utilization = 0.92};
}

vllm_sampling_params vllm_sampling_params_default(void) {
  return (vllm_sampling_params){.temperature = 1.0f, .top_p = 1.0f, .max_tokens = 16, .repetition_penalty = 1.0f};
}

vllm_transcription_params vllm_transcription_params_default(void) { return (vllm_transcription_params){0}; }

vllm_video_model_params vllm_video_model_params_default(void) { return (vllm_video_model_params){0}; }

vllm_video_params vllm_video_params_default(void) { return (vllm_video_params){0}; }

vllm_video_mux_params vllm_video_mux_params_default(void) { return (vllm_video_mux_params){0}; }

vllm_speech_model_params vllm_speech_model_params_default(void) { return (vllm_speech_model_params){0}; }

vllm_speech_params vllm_speech_params_default(void) { return (vllm_speech_params){0}; }

void vllm_string_free(char* s) { free(s); }

void vllm_completion_free(vllm_completion* completion) {
  if (!completion) return;
  free(completion->text);
  memset(completion, 0, sizeof *completion);
}

void vllm_transcription_free(vllm_transcription* transcription) {
  if (!transcription) return;
  free(transcription->text);
  free(transcription->token_ids);
  memset(transcription, 0, sizeof *transcription);
}

void vllm_embedding_result_free(vllm_embedding_result* result) {
  if (!result) return;
  free(result->values);
  memset(result, 0, sizeof *result);
}

void vllm_video_mux_argv_free(char** argv, int32_t argc) {
  if (!argv) return;
  for (int32_t i = 0; i < argc; i++) free(argv[i]);
  free(argv);
}

void vllm_video_result_free(vllm_video_result* result) {
  if (!result) return;
  free(result->frame_dir);
  free(result->audio_path);
  vllm_video_mux_argv_free(result->mux_argv, result->mux_argc);
  memset(result, 0, sizeof *result);
}

void vllm_speech_result_free(vllm_speech_result* result) {
  if (!result) return;
  free(result->samples);
  free(result->wav);
  memset(result, 0, sizeof *result);
}
