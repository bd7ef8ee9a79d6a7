/*
 * absent.c - what the interface names and this version does not have: video, speech, and the server.
 *
 * The functions are here because programs bind every name before they use any. They refuse by name, and they need no Python to do it:
 * no family is registered, so no handle of theirs can exist.
 */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "door.h"

/* What stands at `path`, for a refusal that shows the way: a text model belongs to vllm_engine_load. */
static const char* nature(const char* path) {
  struct stat found;
  if (stat(path, &found)) return "does not exist";
  if (S_ISDIR(found.st_mode)) return "is a directory; if it holds a text model, load that with vllm_engine_load";
  char magic[4] = "";
  FILE* file = fopen(path, "rb");
  size_t n = file ? fread(magic, 1, sizeof magic, file) : 0;
  if (file) fclose(file);
  if (n == sizeof magic && !memcmp(magic, "GGUF", 4)) return "is a GGUF file; if it holds a text model, load that with vllm_engine_load";
  return "is a file of another kind; text models are loaded with vllm_engine_load";
}

static vllm_status no_family(const char* function, const char* kind, const char* path, const char* family) {
  if (family && *family)
    return door_fail(function, VLLM_ERR_MODEL_LOAD, "no family named '%s': this version registers no %s family; '%s' %s", family, kind,
                     path, nature(path));
  return door_fail(function, VLLM_ERR_MODEL_LOAD, "no family claims '%s', which %s: this version registers no %s family", path,
                   nature(path), kind);
}

vllm_status vllm_video_engine_load(const vllm_video_model_params* params, vllm_video_engine** out) {
  if (out) *out = NULL;
  if (!params || !out) return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "params or out is NULL");
  if (!params->dit_path || !*params->dit_path) return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "dit_path is not set");
  return no_family(__func__, "video", params->dit_path, params->family);
}

vllm_status vllm_speech_engine_load(const vllm_speech_model_params* params, vllm_speech_engine** out) {
  if (out) *out = NULL;
  if (!params || !out) return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "params or out is NULL");
  if (!params->path || !*params->path) return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "path is not set");
  return no_family(__func__, "speech", params->path, params->family);
}

vllm_status vllm_video_generate(vllm_video_engine* engine, const vllm_video_params* params, vllm_video_result* out) {
  if (out) memset(out, 0, sizeof *out);
  if (!engine || !params || !out) return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "engine, params or out is NULL");
  return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "this is not a video engine: this version registers no video family");
}

vllm_status vllm_synthesize(vllm_speech_engine* engine, const vllm_speech_params* params, vllm_speech_result* out) {
  if (out) memset(out, 0, sizeof *out);
  if (!engine || !params || !out) return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "engine, params or out is NULL");
  return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "this is not a speech engine: this version registers no speech family");
}

void vllm_video_engine_free(vllm_video_engine* engine) { (void)engine; }

void vllm_speech_engine_free(vllm_speech_engine* engine) { (void)engine; }

const char* vllm_video_engine_family(const vllm_video_engine* engine) { return (void)engine, NULL; }

const char* vllm_speech_engine_family(const vllm_speech_engine* engine) { return (void)engine, NULL; }

int32_t vllm_speech_engine_sample_rate(const vllm_speech_engine* engine) { return (void)engine, 0; }

int32_t vllm_speech_engine_requires_reference_audio(const vllm_speech_engine* engine) { return (void)engine, 0; }

int32_t vllm_speech_engine_device(const vllm_speech_engine* engine) { return (void)engine, 0; }

int32_t vllm_server_main(int32_t argc, char** argv) {
  static const char line[] = "vllm-server: this version of libvllm has no server; call vllm_chat, or run vllm-cli\n";
  (void)argc, (void)argv;
  if (write(STDERR_FILENO, line, sizeof line - 1) < 0) { /* the text is in vllm_last_error() too */
  }
  door_fail(__func__, VLLM_ERR_RUNTIME, "this version of libvllm has no server; call vllm_chat, or run vllm-cli");
  return 1;
}
