/*
 * vllm.h - the C interface of libvllm, and its manual.
 *
 * libvllm runs GGUF language models inside your process. Load a model once, then ask it for text (or for embeddings, which is what some
 * models are for) from as many threads as you like:
 *
 *     #include <stdio.h>
 *     #include <vllm.h>
 *
 *     int main(int argc, char** argv) {
 *       if (argc < 2 || vllm_abi_version() != VLLM_ABI_VERSION) return 2;
 *       vllm_model_params model = vllm_model_params_default();
 *       model.model_path = argv[1];
 *       vllm_engine* engine;
 *       if (vllm_engine_load(&model, &engine) != VLLM_OK) { fprintf(stderr, "%s\n", vllm_last_error()); return 1; }
 *
 *       vllm_sampling_params sampling = vllm_sampling_params_default();
 *       sampling.temperature = 0;
 *       vllm_completion answer;
 *       if (vllm_complete(engine, "The capital of France is", &sampling, &answer) == VLLM_OK) puts(answer.text);
 *       else fprintf(stderr, "%s\n", vllm_last_error());
 *       vllm_completion_free(&answer);
 *       vllm_engine_free(engine);
 *     }
 *
 *     cc hello.c $(pkg-config --cflags --libs vllm) -o hello
 *
 * RULES THAT HOLD EVERYWHERE
 *
 * Errors. A call that can fail returns a vllm_status; VLLM_OK is 0. On any other status vllm_last_error() holds one line saying what was
 *   wrong, what was expected and the way out. Nothing is thrown and no traceback is printed. After any error the engine serves on.
 * Outputs. When a call fails, its output handle is NULL, its output struct is all zero and its output count is 0, whatever they held.
 * Ownership. What you pass in stays yours and is read only until the call returns. What a call gives you has one function that frees it,
 *   named beside it. Every free function takes NULL and may be called twice on the same struct: it leaves the struct zeroed.
 *   Static strings (vllm_version, finish_reason) are never freed.
 * Handles. A handle is a name, not an address: never dereference it. Using one after its free is VLLM_ERR_INVALID_ARGUMENT, not a crash.
 * Text. Every string is NUL-terminated UTF-8. A U+0000 that a model writes reaches you as U+FFFD.
 * Threads. Every function may be called from any thread at any time, with a stack as small as 64 KiB; requests made together are computed
 *   together. Loading and generating run on the library's own threads, which block every signal, so your handlers run on your threads.
 * Callbacks must return: do not throw or longjmp out of them. They may call any function here, except where a block below says otherwise.
 * Signals. The library changes no signal disposition and no locale of yours. In a host that is a Python, Ctrl-C ends a call that waits:
 *   VLLM_ERR_RUNTIME, what the call began is cancelled, and the host's own handler runs when the call has returned.
 * Python. The engine is written in Python and compiled by numba. The first call that needs a model starts an interpreter inside your
 *   process, in isolation: PYTHON* variables, user site directories and your arguments do not reach it. When the process is already a
 *   Python of the same version, that interpreter is used. The functions marked "plain C" never start one. Python is found next to the
 *   library (its own virtual environment), else where it was built; VLLM_PYTHON (an executable) and VLLM_LIBPYTHON (a shared library)
 *   overrule that. When it cannot be started, calls return VLLM_ERR_RUNTIME with the reason, for the life of the process.
 * Unloading. dlclose() is harmless and unloads nothing: a Python cannot be unloaded.
 * fork(). Before the first call that needs a model: both processes may use the library. After it: the child gets VLLM_ERR_RUNTIME from
 *   every such call (fork and exec, or fork first); the parent is unaffected.
 * exit(). May be called at any moment, from any thread, with requests in flight; they are abandoned.
 *
 * Every function here is in the library since version 0.1.0, ABI 21.
 */
#ifndef VLLM_H_
#define VLLM_H_

#include <stddef.h>
#include <stdint.h>
#ifndef __cplusplus
#include <stdbool.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The interface described here. It changes when a struct or a signature changes; compare it with vllm_abi_version() after a dlopen. */
#define VLLM_ABI_VERSION 21

#ifndef VLLM_API
#define VLLM_API __attribute__((visibility("default")))
#endif

/* ----------------------------------------------------------------------------------------------------------------- statuses and handles */

typedef enum vllm_status {
  VLLM_OK = 0,
  VLLM_ERR_INVALID_ARGUMENT = 1, /* an argument or a document is wrong; found before any model file is read */
  VLLM_ERR_MODEL_LOAD = 2,       /* the arguments were accepted, but the model, or the device you named, could not be brought up */
  VLLM_ERR_RUNTIME = 3,          /* generation failed, or Python could not be started */
  VLLM_ERR_UNKNOWN = 4           /* a broken promise inside the library: please report it */
} vllm_status;

/* A loaded model with its threads and its cache. From vllm_engine_load; ends with vllm_engine_free. */
typedef struct vllm_engine vllm_engine;

/* One generation in progress. From vllm_request_submit; ends with vllm_request_free. */
typedef struct vllm_request vllm_request;

/* Video and speech engines: their functions are here so that programs link, and refuse by name. */
typedef struct vllm_video_engine vllm_video_engine;
typedef struct vllm_speech_engine vllm_speech_engine;

/* ------------------------------------------------------------------------------------------------------------------------------ structs */

/*
 * What to load, and how. Start from vllm_model_params_default(). Zero, NULL and "" mean "the default" in every field but model_path; a
 * size below zero is refused.
 */
typedef struct vllm_model_params {
  const char* model_path;            /* required: a .gguf file (any shard of a split one), or a directory that holds one model */
  const char* tokenizer_config_path; /* where the chat template comes from instead of the model's own */
  int32_t block_size;                /* tokens in one KV block, a multiple of 16; 0: 32 */
  int32_t num_blocks;                /* KV blocks; 0: as many as kv_cache_memory_bytes holds, else 256 */
  int32_t max_model_len;             /* longest prompt + answer, in tokens; 0: the model's own limit, or what the KV blocks hold */
  int32_t max_num_seqs;              /* requests computed together; 0: 8 */
  const char* tool_parser;           /* "none", "hermes" or "qwen3", checked at the first chat call; tools are refused in this version */
  const char* reasoning_parser;      /* "none", "deepseek_r1" or "qwen3", checked likewise; reasoning stays in the content for now */
  const char* speculative_config;    /* a JSON object; NULL: no speculation. Refused in this version */
  int32_t enable_prefix_caching;     /* reuse of equal prompt beginnings. 0 and 1: on, except in models with recurrent layers; 2: off */
  int32_t max_num_batched_tokens;    /* tokens computed in one step; 0: 2048, for a mixture of experts 8192 or 4096 by max_num_seqs */
  const char* scheduling_policy;     /* "fcfs", "priority" or "lpm"; NULL: fcfs, all that is not refused in this version */
  const char* kv_transfer_config;    /* a JSON object; NULL: none. Refused in this version */
  const char* offload_config;        /* a JSON object saying where weights live; NULL: nothing asked */
  int32_t enable_jump_forward;       /* 0: default, 1: on, 2: off; VT_ENABLE_JUMP_FORWARD wins. On is refused in this version */
  int32_t device;                    /* 0: auto, 1: cpu, 2: cuda, which is refused in this version */
  double gpu_memory_utilization;     /* share of device memory to use; sizes nothing yet */
  int64_t kv_cache_memory_bytes;     /* bytes for the KV cache; 0: unset; less than one KV block is refused */
  int32_t language_model_only;       /* not 0: leave the other modalities of a multimodal model unloaded */
  const char* limit_mm_per_prompt;   /* a JSON object, modality to count; NULL: no limits */
} vllm_model_params;

/*
 * Edits the logits of one request, once for every token, the first included, before penalties and sampling.
 *   token_ids    the n_token_ids tokens generated so far, oldest first (none on the first call); read only
 *   logits       the row the token will be drawn from, vocab_size floats; edit it in place
 * Both pointers are borrowed for the call. Runs on the engine's own thread, and every request waits while it runs: a call in here that
 * would wait for this engine is VLLM_ERR_INVALID_ARGUMENT, and vllm_engine_free and vllm_request_free only ask and do not wait.
 */
typedef void (*vllm_logits_processor)(const int32_t* token_ids, int32_t n_token_ids, float* logits, int32_t vocab_size, void* user_data);

/*
 * How to choose tokens. Start from vllm_sampling_params_default(); an all-zero struct is refused (repetition_penalty must be above 0).
 * At most one of the five structured_ constraints may be set; this version refuses them all by name.
 */
typedef struct vllm_sampling_params {
  float temperature;        /* 0 or less: always the likeliest token */
  float top_p;              /* keep the likeliest tokens that hold this share of probability; in (0, 1] */
  int32_t top_k;            /* keep this many tokens; 0: all */
  float min_p;              /* keep tokens at least this likely, relative to the likeliest; in [0, 1] */
  int32_t max_tokens;       /* stop after this many; 0 or less: when the context is full */
  uint64_t seed;            /* read when has_seed is not 0 */
  int32_t has_seed;         /* not 0: the same seed and the same prompt give the same text */
  float presence_penalty;   /* in [-2, 2]; above 0: less of what has been said at all */
  float frequency_penalty;  /* in [-2, 2]; above 0: less of what has been said often */
  float repetition_penalty; /* above 0; 1: none; above 1: less of what prompt and answer hold */
  int32_t min_tokens;       /* no end before this many */
  int32_t ignore_eos;       /* not 0: the model's end-of-text token does not end the answer */
  const char* const* stop;  /* n_stop strings, each of which ends the answer and is not part of it; they may span tokens */
  int32_t n_stop;
  const char* structured_json;          /* a JSON schema the answer must fit */
  const char* structured_regex;         /* a regular expression the answer must match */
  const char* const* structured_choice; /* n_structured_choice strings, one of which is the answer */
  int32_t n_structured_choice;
  const char* structured_grammar; /* a GBNF grammar the answer must follow */
  int32_t structured_json_object; /* not 0: the answer is some JSON object */
  vllm_logits_processor logits_processor;
  void* logits_processor_user_data; /* handed to logits_processor as it is */
} vllm_sampling_params;

/* One finished answer. Free with vllm_completion_free. */
typedef struct vllm_completion {
  char* text;
  const char* finish_reason; /* static: stop, length, abort, error, repetition or unknown */
  int32_t prompt_tokens;
  int32_t completion_tokens;
} vllm_completion;

/*
 * Receives an answer as it grows. delta_text is new, well-formed UTF-8 (a character is never split), valid during the call, and may be "".
 * The last call has finished = true. Return false to end the answer there: no further call follows.
 */
typedef bool (*vllm_token_callback)(const char* delta_text, bool finished, void* user_data);

/* Speech to transcribe: either audio_path, or pcm with n_samples (mono, -1 to 1) and sample_rate. */
typedef struct vllm_transcription_params {
  const char* audio_path;
  const float* pcm;
  int64_t n_samples;
  int32_t sample_rate; /* Hz */
} vllm_transcription_params;

/* Free with vllm_transcription_free. */
typedef struct vllm_transcription {
  char* text;
  int32_t* token_ids;
  int32_t n_token_ids;
  int32_t has_text;
} vllm_transcription;

/* n_embeddings rows of dim floats, each of length 1. Free with vllm_embedding_result_free. */
typedef struct vllm_embedding_result {
  float* values;
  int32_t n_embeddings;
  int32_t dim;
  int32_t prompt_tokens;
} vllm_embedding_result;

typedef struct vllm_video_model_params {
  const char* dit_path; /* required */
  const char* encoder_path;
  const char* tokenizer_path;
  const char* video_vae_path;
  const char* video_vae_config_path;
  const char* audio_vae_path;
  const char* audio_vae_config_path;
  const char* prompt_embeds_path;
  const char* partition;
  int32_t device;
  int32_t dequant_bf16;
  int32_t fp4_resident;
  const char* family;             /* NULL: recognised from the files */
  const char* const* extra_keys;  /* n_extras names ... */
  const char* const* extra_values; /* ... and their values */
  int32_t n_extras;
} vllm_video_model_params;

typedef struct vllm_video_params {
  const char* prompt;
  int32_t width;
  int32_t height;
  int32_t num_frames;
  int32_t steps;
  uint64_t seed;
  int32_t has_seed;
  const char* first_frame;
  const char* last_frame;
  const char* ref_image;
  const char* ref_video;
  const char* ref_audio;
  float noise_aug;
  const char* output_dir; /* required */
  const char* const* extra_keys;
  const char* const* extra_values;
  int32_t n_extras;
} vllm_video_params;

/* Free with vllm_video_result_free. */
typedef struct vllm_video_result {
  char* frame_dir;
  char* audio_path;
  int32_t frame_count;
  int32_t width;
  int32_t height;
  int32_t fps;
  int32_t sample_rate;
  char** mux_argv; /* as from vllm_video_mux_argv, but freed with the result */
  int32_t mux_argc;
} vllm_video_result;

typedef struct vllm_video_mux_params {
  const char* frames;      /* required: a printf pattern, such as out/frame_%06d.ppm */
  const char* audio_path;  /* NULL or "": no sound */
  const char* output_path; /* required: the .mp4 to write */
  int32_t fps;             /* 0 or less: 24 */
  int32_t crf;             /* quality, lower is better; 0 or less: 18 */
} vllm_video_mux_params;

typedef struct vllm_speech_model_params {
  const char* path;   /* required */
  const char* family; /* NULL: recognised from the files */
  int32_t device;     /* 0: cpu, 1: an accelerator */
} vllm_speech_model_params;

typedef struct vllm_speech_params {
  const char* text;
  const char* language;
  const float* reference_audio;
  int64_t n_reference_audio;
  int32_t reference_sample_rate;
  const char* lyrics;
  const char* description;
  double audio_duration_s;
  int32_t num_inference_steps;
  double guidance_scale;
  int32_t has_guidance_scale;
  int64_t seed;
} vllm_speech_params;

/* Free with vllm_speech_result_free. */
typedef struct vllm_speech_result {
  float* samples;
  int64_t n_samples;
  int32_t sample_rate;
  int32_t channels;
  char* wav;
  int64_t n_wav;
} vllm_speech_result;

/* ------------------------------------------------------------------------------------------------------------ versions, errors, strings */

/* VLLM_ABI_VERSION as the library was built. Plain C; any thread. */
VLLM_API int32_t vllm_abi_version(void);

/* The library's version, such as "0.1.0". Static. Plain C; any thread. */
VLLM_API const char* vllm_version(void);

/*
 * Why the last call on this thread failed, as "vllm_engine_load: <text>". Never NULL; "" after a call that succeeded. Owned by the
 * library, valid until this thread's next call. Each thread has its own. Functions that return no status leave it as it is (but
 * for vllm_server_main). Plain C.
 */
VLLM_API const char* vllm_last_error(void);

/* Frees a string from vllm_chat, or a completion's text taken out of its struct. NULL does nothing. Plain C; any thread. */
VLLM_API void vllm_string_free(char* s);

/* -------------------------------------------------------------------------------------------------------------------- loading an engine */

/* The defaults: block_size 32, max_num_seqs 32, gpu_memory_utilization 0.92, all else 0 or NULL. Plain C; any thread. */
VLLM_API vllm_model_params vllm_model_params_default(void);

/*
 * Loads a model. Weights are used in place, from a mapping of the file, wherever their form allows it.
 *   params   not NULL, with a model_path; strings are copied
 *   out      not NULL; receives an engine to be ended with vllm_engine_free, or NULL
 * Takes from a fraction of a second to minutes; the very first load on a machine also compiles kernels, and says so on stderr. Several
 * engines may live in one process, and engines may be loaded and freed again and again.
 * VLLM_ERR_INVALID_ARGUMENT: a NULL, a value or a document is wrong; nothing was read. VLLM_ERR_MODEL_LOAD: the device is absent (checked
 * before the path), the file is missing or broken, the architecture is unknown, or a setting asks for what this version cannot do.
 */
VLLM_API vllm_status vllm_engine_load(const vllm_model_params* params, vllm_engine** out);

/*
 * Ends an engine and gives its memory back. NULL or an ended engine does nothing. What is still running on it is cut short (finish_reason
 * "abort"); request handles stay valid and must still be freed. Returns when the engine's threads have stopped.
 */
VLLM_API void vllm_engine_free(vllm_engine* engine);

/* --------------------------------------------------------------------------------------------------------------------------- completion */

/* The defaults: temperature 1, top_p 1, max_tokens 16, repetition_penalty 1, all else 0 or NULL. Plain C; any thread. */
VLLM_API vllm_sampling_params vllm_sampling_params_default(void);

/*
 * Completes a prompt and waits for the whole answer.
 *   prompt   tokenized as the model asks, special tokens recognised
 *   out      receives the answer, to be freed with vllm_completion_free
 * No pointer may be NULL. VLLM_ERR_INVALID_ARGUMENT: a NULL, a sampling value out of range, a prompt longer than the context, an engine
 * that embeds.
 * VLLM_ERR_RUNTIME: generation failed.
 */
VLLM_API vllm_status vllm_complete(vllm_engine* engine, const char* prompt, const vllm_sampling_params* params, vllm_completion* out);

/*
 * The same, from token ids to token ids.
 *   prompt, n_prompt     at least one id, each within the vocabulary
 *   out_tokens, max_out  room for the ids generated; a short buffer shortens the report, never the generation. NULL only with max_out 0
 *   n_out                receives the number of ids written; not NULL
 *   out                  receives the answer as text, to be freed with vllm_completion_free; may be NULL
 */
VLLM_API vllm_status vllm_complete_tokens(vllm_engine* engine, const int32_t* prompt, int32_t n_prompt, const vllm_sampling_params* params,
                                          int32_t* out_tokens, int32_t max_out, int32_t* n_out, vllm_completion* out);

/*
 * Completes a prompt and hands the answer to `callback` as it grows, on the calling thread, before it returns. The deltas joined are what
 * vllm_complete returns. Returning false from the callback ends the answer early, and is VLLM_OK. A slow callback slows no other request.
 * After an error the callback is not called again. engine, prompt, params and callback may not be NULL.
 */
VLLM_API vllm_status vllm_complete_stream(vllm_engine* engine, const char* prompt, const vllm_sampling_params* params,
                                          vllm_token_callback callback, void* user_data);

/* Frees the text and zeroes the struct. NULL or an already freed struct does nothing. Plain C; any thread. */
VLLM_API void vllm_completion_free(vllm_completion* completion);

/* ----------------------------------------------------------------------------------------------------------------------------- requests */

/*
 * Starts an answer and returns at once. `callback` receives it from a thread of the library, one call at a time, as for
 * vllm_complete_stream; user_data must stay valid until vllm_request_wait or vllm_request_free has returned.
 *   out      not NULL; receives a request to be ended with vllm_request_free, or NULL
 * An error found here is returned; one found later is told by vllm_request_wait and vllm_request_error.
 */
VLLM_API vllm_status vllm_request_submit(vllm_engine* engine, const char* prompt, const vllm_sampling_params* params,
                                         vllm_token_callback callback, void* user_data, vllm_request** out);

/* Asks a request to end soon; its last call then has finished = true. May be repeated, and is VLLM_OK on a finished request. */
VLLM_API vllm_status vllm_request_cancel(vllm_request* request);

/*
 * Waits until the request has made its last call. VLLM_OK: finished or cancelled; else the failure, and its text. May be repeated, and
 * from several threads. From within the request's own callback it would wait for itself: VLLM_ERR_INVALID_ARGUMENT.
 */
VLLM_API vllm_status vllm_request_wait(vllm_request* request);

/* Whether the request has made its last call. NULL or a freed request: false. */
VLLM_API bool vllm_request_done(const vllm_request* request);

/* Why the request failed; "" while it runs, when it did not, and of no request. Never NULL. Owned by the request, valid until its free. */
VLLM_API const char* vllm_request_error(const vllm_request* request);

/*
 * Ends the handle: cancels what still runs and waits for the last call; from within the request's own callback it does not wait, and no
 * call follows. From within a logits processor of its engine it does not wait either, and no call follows one that is under way. NULL or a
 * freed request does nothing.
 */
VLLM_API void vllm_request_free(vllm_request* request);

/* --------------------------------------------------------------------------------------------------------------------------------- chat */

/*
 * Answers one OpenAI chat-completions request, through the model's own chat template.
 *   request_json  the request object; its `model` and `stream` are ignored
 *   out_json      receives a chat.completion object, to be freed with vllm_string_free, or NULL
 * VLLM_ERR_INVALID_ARGUMENT: malformed JSON, a wrong or unsupported field, a model without a chat template, an unknown tool or reasoning
 * parser.
 */
VLLM_API vllm_status vllm_chat(vllm_engine* engine, const char* request_json, char** out_json);

/*
 * The same, streamed on the calling thread: each call brings one chat.completion.chunk object as bare JSON (first the role, then the
 * deltas, then the finish reason), and a last call brings "" with finished = true. Returning false ends the answer early.
 */
VLLM_API vllm_status vllm_chat_stream(vllm_engine* engine, const char* request_json, vllm_token_callback callback, void* user_data);

/* ---------------------------------------------------------------------------------------------------------------------------- embedding */

/*
 * Embeds texts: one row of `dim` floats for each, of length 1, in the order of the texts. For models whose files say how hidden states are
 * pooled ({architecture}.pooling_type: bert, nomic-bert and nomic-bert-moe, and qwen3, qwen2 or llama files that have the key). An engine
 * does one of the two: such a model generates no text, and a model that generates text embeds none.
 *   texts, n_texts  at least one text; none is NULL. Each is tokenized as the model asks, special tokens recognised, and computed together
 *                   with the others and with what other threads ask for
 *   out             receives the rows, and prompt_tokens for all texts together; to be freed with vllm_embedding_result_free
 * VLLM_ERR_INVALID_ARGUMENT: a NULL, a text that is no UTF-8 or has more tokens than max_model_len, an engine that generates text. One text
 * that is refused refuses them all. VLLM_ERR_RUNTIME: computing failed.
 */
VLLM_API vllm_status vllm_embed(vllm_engine* engine, const char* const* texts, int32_t n_texts, vllm_embedding_result* out);

/* Frees the values and zeroes the struct. NULL does nothing. Plain C; any thread. */
VLLM_API void vllm_embedding_result_free(vllm_embedding_result* result);

/* --------------------------------------------------------------------------------------------------- transcription: not in this version */

/* All zero. Plain C; any thread. */
VLLM_API vllm_transcription_params vllm_transcription_params_default(void);

/* This version transcribes with no model: VLLM_ERR_INVALID_ARGUMENT, naming the calls that the engine does answer. */
VLLM_API vllm_status vllm_transcribe(vllm_engine* engine, const vllm_transcription_params* params, vllm_transcription* out);

/* Frees the members and zeroes the struct. NULL does nothing. Plain C; any thread. */
VLLM_API void vllm_transcription_free(vllm_transcription* transcription);

/* ----------------------------------------------------------------------------------------------------------- video: not in this version */

/* All zero. Plain C; any thread. */
VLLM_API vllm_video_model_params vllm_video_model_params_default(void);

/* All zero. Plain C; any thread. */
VLLM_API vllm_video_params vllm_video_params_default(void);

/* No video family is registered in this version: VLLM_ERR_MODEL_LOAD, naming what was tried, and *out NULL. Plain C. */
VLLM_API vllm_status vllm_video_engine_load(const vllm_video_model_params* params, vllm_video_engine** out);

/* NULL does nothing. Plain C. */
VLLM_API void vllm_video_engine_free(vllm_video_engine* engine);

/* The family an engine belongs to; NULL when it is no engine. Plain C. */
VLLM_API const char* vllm_video_engine_family(const vllm_video_engine* engine);

/* VLLM_ERR_INVALID_ARGUMENT, since no video engine can exist; *out is zeroed. Plain C. */
VLLM_API vllm_status vllm_video_generate(vllm_video_engine* engine, const vllm_video_params* params, vllm_video_result* out);

/* Frees the members and zeroes the struct. NULL does nothing. Plain C; any thread. */
VLLM_API void vllm_video_result_free(vllm_video_result* result);

/* All zero. Plain C; any thread. */
VLLM_API vllm_video_mux_params vllm_video_mux_params_default(void);

/*
 * Writes the ffmpeg command that joins numbered frames, and sound if there is any, into an H.264 (yuv420p) and AAC .mp4. Runs nothing.
 *   out_argv  receives a NULL-terminated vector for execvp, argv[0] "ffmpeg", to be freed with vllm_video_mux_argv_free, or NULL
 *   out_argc  receives the number of strings, the NULL not counted
 * No pointer may be NULL, and frames and output_path must be set: else VLLM_ERR_INVALID_ARGUMENT. Plain C; any thread.
 */
VLLM_API vllm_status vllm_video_mux_argv(const vllm_video_mux_params* params, char*** out_argv, int32_t* out_argc);

/* Frees such a vector. NULL does nothing. Plain C; any thread. */
VLLM_API void vllm_video_mux_argv_free(char** argv, int32_t argc);

/* ---------------------------------------------------------------------------------------------------------- speech: not in this version */

/* All zero. Plain C; any thread. */
VLLM_API vllm_speech_model_params vllm_speech_model_params_default(void);

/* All zero. Plain C; any thread. */
VLLM_API vllm_speech_params vllm_speech_params_default(void);

/* No speech family is registered in this version: VLLM_ERR_MODEL_LOAD, naming what was tried, and *out NULL. Plain C. */
VLLM_API vllm_status vllm_speech_engine_load(const vllm_speech_model_params* params, vllm_speech_engine** out);

/* NULL does nothing. Plain C. */
VLLM_API void vllm_speech_engine_free(vllm_speech_engine* engine);

/* The family an engine belongs to; NULL when it is no engine. Plain C. */
VLLM_API const char* vllm_speech_engine_family(const vllm_speech_engine* engine);

/* Hz of what an engine produces; 0 when it is no engine. Plain C. */
VLLM_API int32_t vllm_speech_engine_sample_rate(const vllm_speech_engine* engine);

/* 1 when an engine needs a voice to imitate; 0 when it does not, or is no engine. Plain C. */
VLLM_API int32_t vllm_speech_engine_requires_reference_audio(const vllm_speech_engine* engine);

/* The device an engine runs on: 0 cpu, 1 an accelerator; 0 when it is no engine. Plain C. */
VLLM_API int32_t vllm_speech_engine_device(const vllm_speech_engine* engine);

/* VLLM_ERR_INVALID_ARGUMENT, since no speech engine can exist; *out is zeroed. Plain C. */
VLLM_API vllm_status vllm_synthesize(vllm_speech_engine* engine, const vllm_speech_params* params, vllm_speech_result* out);

/* Frees the members and zeroes the struct. NULL does nothing. Plain C; any thread. */
VLLM_API void vllm_speech_result_free(vllm_speech_result* result);

/* ------------------------------------------------------------------------------------------------------------------------------- server */

/*
 * Runs the OpenAI-compatible server as a main() would, and returns its exit code. This version has no server: it says so on stderr and in
 * vllm_last_error(), and returns 1.
 */
VLLM_API int32_t vllm_server_main(int32_t argc, char** argv);

#ifdef __cplusplus
}
#endif
#endif /* VLLM_H_ */
