/* layout.c - every struct, field, signature and default of ABI 21, written down a second time. Compiles as C11 and as C++17. */
#include <stddef.h>

#include "check.h"

#ifdef __cplusplus
#define STATIC(condition) static_assert(condition, #condition)
#else
#define STATIC(condition) _Static_assert(condition, #condition)
#endif

typedef const char* text;
typedef const char* const* texts;
typedef const float* floats;

#define FIELD(type, field_type, field, offset) \
  {                                            \
    STATIC(offsetof(type, field) == (offset)); \
    static type whole;                         \
    field_type* part = &whole.field;           \
    (void)part;                                \
  }

static void structs(void) {
  STATIC(sizeof(vllm_model_params) == 128);
  FIELD(vllm_model_params, text, model_path, 0)
  FIELD(vllm_model_params, text, tokenizer_config_path, 8)
  FIELD(vllm_model_params, int32_t, block_size, 16)
  FIELD(vllm_model_params, int32_t, num_blocks, 20)
  FIELD(vllm_model_params, int32_t, max_model_len, 24)
  FIELD(vllm_model_params, int32_t, max_num_seqs, 28)
  FIELD(vllm_model_params, text, tool_parser, 32)
  FIELD(vllm_model_params, text, reasoning_parser, 40)
  FIELD(vllm_model_params, text, speculative_config, 48)
  FIELD(vllm_model_params, int32_t, enable_prefix_caching, 56)
  FIELD(vllm_model_params, int32_t, max_num_batched_tokens, 60)
  FIELD(vllm_model_params, text, scheduling_policy, 64)
  FIELD(vllm_model_params, text, kv_transfer_config, 72)
  FIELD(vllm_model_params, text, offload_config, 80)
  FIELD(vllm_model_params, int32_t, enable_jump_forward, 88)
  FIELD(vllm_model_params, int32_t, device, 92)
  FIELD(vllm_model_params, double, gpu_memory_utilization, 96)
  FIELD(vllm_model_params, int64_t, kv_cache_memory_bytes, 104)
  FIELD(vllm_model_params, int32_t, language_model_only, 112)
  FIELD(vllm_model_params, text, limit_mm_per_prompt, 120)

  STATIC(sizeof(vllm_sampling_params) == 136);
  FIELD(vllm_sampling_params, float, temperature, 0)
  FIELD(vllm_sampling_params, float, top_p, 4)
  FIELD(vllm_sampling_params, int32_t, top_k, 8)
  FIELD(vllm_sampling_params, float, min_p, 12)
  FIELD(vllm_sampling_params, int32_t, max_tokens, 16)
  FIELD(vllm_sampling_params, uint64_t, seed, 24)
  FIELD(vllm_sampling_params, int32_t, has_seed, 32)
  FIELD(vllm_sampling_params, float, presence_penalty, 36)
  FIELD(vllm_sampling_params, float, frequency_penalty, 40)
  FIELD(vllm_sampling_params, float, repetition_penalty, 44)
  FIELD(vllm_sampling_params, int32_t, min_tokens, 48)
  FIELD(vllm_sampling_params, int32_t, ignore_eos, 52)
  FIELD(vllm_sampling_params, texts, stop, 56)
  FIELD(vllm_sampling_params, int32_t, n_stop, 64)
  FIELD(vllm_sampling_params, text, structured_json, 72)
  FIELD(vllm_sampling_params, text, structured_regex, 80)
  FIELD(vllm_sampling_params, texts, structured_choice, 88)
  FIELD(vllm_sampling_params, int32_t, n_structured_choice, 96)
  FIELD(vllm_sampling_params, text, structured_grammar, 104)
  FIELD(vllm_sampling_params, int32_t, structured_json_object, 112)
  FIELD(vllm_sampling_params, vllm_logits_processor, logits_processor, 120)
  FIELD(vllm_sampling_params, void*, logits_processor_user_data, 128)

  STATIC(sizeof(vllm_completion) == 24);
  FIELD(vllm_completion, char*, text, 0)
  FIELD(vllm_completion, text, finish_reason, 8)
  FIELD(vllm_completion, int32_t, prompt_tokens, 16)
  FIELD(vllm_completion, int32_t, completion_tokens, 20)

  STATIC(sizeof(vllm_transcription_params) == 32);
  FIELD(vllm_transcription_params, text, audio_path, 0)
  FIELD(vllm_transcription_params, floats, pcm, 8)
  FIELD(vllm_transcription_params, int64_t, n_samples, 16)
  FIELD(vllm_transcription_params, int32_t, sample_rate, 24)

  STATIC(sizeof(vllm_transcription) == 24);
  FIELD(vllm_transcription, char*, text, 0)
  FIELD(vllm_transcription, int32_t*, token_ids, 8)
  FIELD(vllm_transcription, int32_t, n_token_ids, 16)
  FIELD(vllm_transcription, int32_t, has_text, 20)

  STATIC(sizeof(vllm_embedding_result) == 24);
  FIELD(vllm_embedding_result, float*, values, 0)
  FIELD(vllm_embedding_result, int32_t, n_embeddings, 8)
  FIELD(vllm_embedding_result, int32_t, dim, 12)
  FIELD(vllm_embedding_result, int32_t, prompt_tokens, 16)

  STATIC(sizeof(vllm_video_model_params) == 120);
  FIELD(vllm_video_model_params, text, dit_path, 0)
  FIELD(vllm_video_model_params, text, encoder_path, 8)
  FIELD(vllm_video_model_params, text, tokenizer_path, 16)
  FIELD(vllm_video_model_params, text, video_vae_path, 24)
  FIELD(vllm_video_model_params, text, video_vae_config_path, 32)
  FIELD(vllm_video_model_params, text, audio_vae_path, 40)
  FIELD(vllm_video_model_params, text, audio_vae_config_path, 48)
  FIELD(vllm_video_model_params, text, prompt_embeds_path, 56)
  FIELD(vllm_video_model_params, text, partition, 64)
  FIELD(vllm_video_model_params, int32_t, device, 72)
  FIELD(vllm_video_model_params, int32_t, dequant_bf16, 76)
  FIELD(vllm_video_model_params, int32_t, fp4_resident, 80)
  FIELD(vllm_video_model_params, text, family, 88)
  FIELD(vllm_video_model_params, texts, extra_keys, 96)
  FIELD(vllm_video_model_params, texts, extra_values, 104)
  FIELD(vllm_video_model_params, int32_t, n_extras, 112)

  STATIC(sizeof(vllm_video_params) == 120);
  FIELD(vllm_video_params, text, prompt, 0)
  FIELD(vllm_video_params, int32_t, width, 8)
  FIELD(vllm_video_params, int32_t, height, 12)
  FIELD(vllm_video_params, int32_t, num_frames, 16)
  FIELD(vllm_video_params, int32_t, steps, 20)
  FIELD(vllm_video_params, uint64_t, seed, 24)
  FIELD(vllm_video_params, int32_t, has_seed, 32)
  FIELD(vllm_video_params, text, first_frame, 40)
  FIELD(vllm_video_params, text, last_frame, 48)
  FIELD(vllm_video_params, text, ref_image, 56)
  FIELD(vllm_video_params, text, ref_video, 64)
  FIELD(vllm_video_params, text, ref_audio, 72)
  FIELD(vllm_video_params, float, noise_aug, 80)
  FIELD(vllm_video_params, text, output_dir, 88)
  FIELD(vllm_video_params, texts, extra_keys, 96)
  FIELD(vllm_video_params, texts, extra_values, 104)
  FIELD(vllm_video_params, int32_t, n_extras, 112)

  STATIC(sizeof(vllm_video_result) == 56);
  FIELD(vllm_video_result, char*, frame_dir, 0)
  FIELD(vllm_video_result, char*, audio_path, 8)
  FIELD(vllm_video_result, int32_t, frame_count, 16)
  FIELD(vllm_video_result, int32_t, width, 20)
  FIELD(vllm_video_result, int32_t, height, 24)
  FIELD(vllm_video_result, int32_t, fps, 28)
  FIELD(vllm_video_result, int32_t, sample_rate, 32)
  FIELD(vllm_video_result, char**, mux_argv, 40)
  FIELD(vllm_video_result, int32_t, mux_argc, 48)

  STATIC(sizeof(vllm_video_mux_params) == 32);
  FIELD(vllm_video_mux_params, text, frames, 0)
  FIELD(vllm_video_mux_params, text, audio_path, 8)
  FIELD(vllm_video_mux_params, text, output_path, 16)
  FIELD(vllm_video_mux_params, int32_t, fps, 24)
  FIELD(vllm_video_mux_params, int32_t, crf, 28)

  STATIC(sizeof(vllm_speech_model_params) == 24);
  FIELD(vllm_speech_model_params, text, path, 0)
  FIELD(vllm_speech_model_params, text, family, 8)
  FIELD(vllm_speech_model_params, int32_t, device, 16)

  STATIC(sizeof(vllm_speech_params) == 96);
  FIELD(vllm_speech_params, text, text, 0)
  FIELD(vllm_speech_params, text, language, 8)
  FIELD(vllm_speech_params, floats, reference_audio, 16)
  FIELD(vllm_speech_params, int64_t, n_reference_audio, 24)
  FIELD(vllm_speech_params, int32_t, reference_sample_rate, 32)
  FIELD(vllm_speech_params, text, lyrics, 40)
  FIELD(vllm_speech_params, text, description, 48)
  FIELD(vllm_speech_params, double, audio_duration_s, 56)
  FIELD(vllm_speech_params, int32_t, num_inference_steps, 64)
  FIELD(vllm_speech_params, double, guidance_scale, 72)
  FIELD(vllm_speech_params, int32_t, has_guidance_scale, 80)
  FIELD(vllm_speech_params, int64_t, seed, 88)

  STATIC(sizeof(vllm_speech_result) == 40);
  FIELD(vllm_speech_result, float*, samples, 0)
  FIELD(vllm_speech_result, int64_t, n_samples, 8)
  FIELD(vllm_speech_result, int32_t, sample_rate, 16)
  FIELD(vllm_speech_result, int32_t, channels, 20)
  FIELD(vllm_speech_result, char*, wav, 24)
  FIELD(vllm_speech_result, int64_t, n_wav, 32)
}

#define SIGNATURE(result, name, ...)          \
  {                                           \
    result (*function)(__VA_ARGS__) = name;   \
    CHECK(function != NULL);                  \
  }

static void signatures(void) {
  SIGNATURE(vllm_model_params, vllm_model_params_default, void)
  SIGNATURE(vllm_sampling_params, vllm_sampling_params_default, void)
  SIGNATURE(vllm_status, vllm_engine_load, const vllm_model_params*, vllm_engine**)
  SIGNATURE(void, vllm_engine_free, vllm_engine*)
  SIGNATURE(vllm_status, vllm_complete, vllm_engine*, text, const vllm_sampling_params*, vllm_completion*)
  SIGNATURE(vllm_status, vllm_complete_tokens, vllm_engine*, const int32_t*, int32_t, const vllm_sampling_params*, int32_t*, int32_t,
            int32_t*, vllm_completion*)
  SIGNATURE(vllm_status, vllm_complete_stream, vllm_engine*, text, const vllm_sampling_params*, vllm_token_callback, void*)
  SIGNATURE(vllm_status, vllm_request_submit, vllm_engine*, text, const vllm_sampling_params*, vllm_token_callback, void*, vllm_request**)
  SIGNATURE(vllm_status, vllm_request_cancel, vllm_request*)
  SIGNATURE(vllm_status, vllm_request_wait, vllm_request*)
  SIGNATURE(bool, vllm_request_done, const vllm_request*)
  SIGNATURE(text, vllm_request_error, const vllm_request*)
  SIGNATURE(void, vllm_request_free, vllm_request*)
  SIGNATURE(vllm_status, vllm_chat, vllm_engine*, text, char**)
  SIGNATURE(vllm_status, vllm_chat_stream, vllm_engine*, text, vllm_token_callback, void*)
  SIGNATURE(vllm_transcription_params, vllm_transcription_params_default, void)
  SIGNATURE(vllm_status, vllm_transcribe, vllm_engine*, const vllm_transcription_params*, vllm_transcription*)
  SIGNATURE(void, vllm_transcription_free, vllm_transcription*)
  SIGNATURE(vllm_status, vllm_embed, vllm_engine*, texts, int32_t, vllm_embedding_result*)
  SIGNATURE(void, vllm_embedding_result_free, vllm_embedding_result*)
  SIGNATURE(vllm_video_model_params, vllm_video_model_params_default, void)
  SIGNATURE(vllm_video_params, vllm_video_params_default, void)
  SIGNATURE(vllm_status, vllm_video_engine_load, const vllm_video_model_params*, vllm_video_engine**)
  SIGNATURE(void, vllm_video_engine_free, vllm_video_engine*)
  SIGNATURE(text, vllm_video_engine_family, const vllm_video_engine*)
  SIGNATURE(vllm_status, vllm_video_generate, vllm_video_engine*, const vllm_video_params*, vllm_video_result*)
  SIGNATURE(void, vllm_video_result_free, vllm_video_result*)
  SIGNATURE(vllm_video_mux_params, vllm_video_mux_params_default, void)
  SIGNATURE(vllm_status, vllm_video_mux_argv, const vllm_video_mux_params*, char***, int32_t*)
  SIGNATURE(void, vllm_video_mux_argv_free, char**, int32_t)
  SIGNATURE(vllm_speech_model_params, vllm_speech_model_params_default, void)
  SIGNATURE(vllm_speech_params, vllm_speech_params_default, void)
  SIGNATURE(vllm_status, vllm_speech_engine_load, const vllm_speech_model_params*, vllm_speech_engine**)
  SIGNATURE(void, vllm_speech_engine_free, vllm_speech_engine*)
  SIGNATURE(text, vllm_speech_engine_family, const vllm_speech_engine*)
  SIGNATURE(int32_t, vllm_speech_engine_sample_rate, const vllm_speech_engine*)
  SIGNATURE(int32_t, vllm_speech_engine_requires_reference_audio, const vllm_speech_engine*)
  SIGNATURE(int32_t, vllm_speech_engine_device, const vllm_speech_engine*)
  SIGNATURE(vllm_status, vllm_synthesize, vllm_speech_engine*, const vllm_speech_params*, vllm_speech_result*)
  SIGNATURE(void, vllm_speech_result_free, vllm_speech_result*)
  SIGNATURE(void, vllm_string_free, char*)
  SIGNATURE(void, vllm_completion_free, vllm_completion*)
  SIGNATURE(text, vllm_last_error, void)
  SIGNATURE(text, vllm_version, void)
  SIGNATURE(int32_t, vllm_server_main, int32_t, char**)
  SIGNATURE(int32_t, vllm_abi_version, void)
}

static bool all_zero(const void* bytes, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (((const char*)bytes)[i]) return false;
  return true;
}

#define ALL_ZERO(type, value)                 \
  {                                           \
    type given = value;                       \
    CHECK(all_zero(&given, sizeof given));    \
  }

static void defaults(void) {
  vllm_model_params model = vllm_model_params_default();
  CHECK(model.block_size == 32 && model.max_num_seqs == 32 && model.gpu_memory_utilization == 0.92);
  model.block_size = model.max_num_seqs = 0;
  model.gpu_memory_utilization = 0;
  ALL_ZERO(vllm_model_params, model)

  vllm_sampling_params sampling = vllm_sampling_params_default();
  CHECK(sampling.temperature == 1.0f && sampling.top_p == 1.0f && sampling.max_tokens == 16 && sampling.repetition_penalty == 1.0f);
  sampling.temperature = sampling.top_p = sampling.repetition_penalty = 0;
  sampling.max_tokens = 0;
  ALL_ZERO(vllm_sampling_params, sampling)

  ALL_ZERO(vllm_transcription_params, vllm_transcription_params_default())
  ALL_ZERO(vllm_video_model_params, vllm_video_model_params_default())
  ALL_ZERO(vllm_video_params, vllm_video_params_default())
  ALL_ZERO(vllm_video_mux_params, vllm_video_mux_params_default())
  ALL_ZERO(vllm_speech_model_params, vllm_speech_model_params_default())
  ALL_ZERO(vllm_speech_params, vllm_speech_params_default())
}

int main(void) {
  STATIC(VLLM_ABI_VERSION == 21);
  STATIC(VLLM_OK == 0 && VLLM_ERR_INVALID_ARGUMENT == 1 && VLLM_ERR_MODEL_LOAD == 2 && VLLM_ERR_RUNTIME == 3 && VLLM_ERR_UNKNOWN == 4);
  structs();
  signatures();
  defaults();
  CHECK(vllm_abi_version() == 21);
  puts(vllm_version());
  return 0;
}
