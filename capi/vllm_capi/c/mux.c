/* mux.c - the ffmpeg command for frames and sound. It writes a command and runs nothing: starting processes is the host's business. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "door.h"

enum { MOST_WORDS = 32 };

vllm_status vllm_video_mux_argv(const vllm_video_mux_params* params, char*** out_argv, int32_t* out_argc) {
  if (out_argv) *out_argv = NULL;
  if (out_argc) *out_argc = 0;
  if (!params || !out_argv || !out_argc) return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "params, out_argv or out_argc is NULL");
  if (!params->frames || !*params->frames)
    return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "frames is not set; expected a printf pattern such as out/frame_%%06d.ppm");
  if (!params->output_path || !*params->output_path)
    return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "output_path is not set; expected the .mp4 to write");

  char fps[16], crf[16];
  snprintf(fps, sizeof fps, "%d", params->fps > 0 ? params->fps : 24);
  snprintf(crf, sizeof crf, "%d", params->crf > 0 ? params->crf : 18);
  int sound = params->audio_path && *params->audio_path;
  const char* words[MOST_WORDS];
  int32_t n = 0;
#define WORDS(...)                                                                                    \
  do {                                                                                                \
    const char* const added[] = {__VA_ARGS__};                                                        \
    for (size_t i = 0; i < sizeof added / sizeof *added; i++) words[n++] = added[i];                  \
  } while (0)
  WORDS("ffmpeg", "-y", "-framerate", fps, "-i", params->frames);
  if (sound) WORDS("-i", params->audio_path);
  WORDS("-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", crf);
  if (sound) WORDS("-c:a", "aac", "-shortest"); /* frames and sound rarely end together */
  WORDS("-movflags", "+faststart", params->output_path);
#undef WORDS

  char** argv = calloc((size_t)n + 1, sizeof *argv);
  for (int32_t i = 0; argv && i < n; i++) {
    argv[i] = strdup(words[i]);
    if (!argv[i]) {
      vllm_video_mux_argv_free(argv, i);
      argv = NULL;
    }
  }
  if (!argv) return door_fail(__func__, VLLM_ERR_RUNTIME, "out of memory");
  *out_argv = argv;
  *out_argc = n;
  return door_finish(__func__, VLLM_OK);
}
