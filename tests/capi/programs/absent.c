/* absent.c - tasks without a model: video and speech by their loaders, the mux command, the server.     absent text.gguf */
#include <unistd.h>

#include "check.h"

static const char* joined(char** argv, int32_t argc) {
  static char line[1024];
  line[0] = 0;
  for (int32_t i = 0; i < argc; i++) strcat(strcat(line, i ? " " : ""), argv[i]);
  return line;
}

static void mux(void) {
  char** argv = (char**)1;
  int32_t argc = 5;
  vllm_video_mux_params params = vllm_video_mux_params_default();
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_video_mux_argv", vllm_video_mux_argv(NULL, &argv, &argc), "NULL");
  CHECK(!argv && !argc);
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_video_mux_argv", vllm_video_mux_argv(&params, &argv, &argc), "frames");
  params.frames = "f_%06d.ppm";
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_video_mux_argv", vllm_video_mux_argv(&params, &argv, &argc), "output_path");
  params.output_path = "a b.mp4";
  CHECK(vllm_video_mux_argv(&params, &argv, &argc) == VLLM_OK);
  CHECK(argv[argc] == NULL);
  CHECK(!strcmp(joined(argv, argc), "ffmpeg -y -framerate 24 -i f_%06d.ppm -c:v libx264 -pix_fmt yuv420p -crf 18 "
                                    "-movflags +faststart a b.mp4"));
  vllm_video_mux_argv_free(argv, argc);
  params.audio_path = "s.wav";
  params.fps = 30;
  params.crf = 20;
  CHECK(vllm_video_mux_argv(&params, &argv, &argc) == VLLM_OK);
  CHECK(!strcmp(joined(argv, argc), "ffmpeg -y -framerate 30 -i f_%06d.ppm -i s.wav -c:v libx264 -pix_fmt yuv420p -crf 20 "
                                    "-c:a aac -shortest -movflags +faststart a b.mp4"));
  vllm_video_mux_argv_free(argv, argc);
}

static void video(const char* text_model) {
  vllm_video_model_params model = vllm_video_model_params_default();
  vllm_video_params params = vllm_video_params_default();
  vllm_video_engine* engine = (vllm_video_engine*)1;
  vllm_video_result result;
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_video_engine_load", vllm_video_engine_load(NULL, &engine), "NULL");
  CHECK(!engine);
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_video_engine_load", vllm_video_engine_load(&model, NULL), "NULL");
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_video_engine_load", vllm_video_engine_load(&model, &engine), "dit_path");
  model.dit_path = text_model;
  CHECK_REFUSED(VLLM_ERR_MODEL_LOAD, "vllm_video_engine_load", vllm_video_engine_load(&model, &engine), text_model);
  CHECK(strstr(vllm_last_error(), "vllm_engine_load"));
  model.family = "no-such-family";
  CHECK_REFUSED(VLLM_ERR_MODEL_LOAD, "vllm_video_engine_load", vllm_video_engine_load(&model, &engine), "no family named 'no-such-family'");
  model.dit_path = "/nonexistent";
  CHECK_REFUSED(VLLM_ERR_MODEL_LOAD, "vllm_video_engine_load", vllm_video_engine_load(&model, &engine), "does not exist");
  CHECK(!vllm_video_engine_family(NULL));
  memset(&result, 0xab, sizeof result);
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_video_generate", vllm_video_generate(NULL, &params, &result), "NULL");
  CHECK(!result.frame_dir && !result.mux_argv && !result.frame_count);
  engine = (vllm_video_engine*)1;
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_video_generate", vllm_video_generate(engine, &params, &result), "not a video");
}

static void speech(const char* text_model) {
  vllm_speech_model_params model = vllm_speech_model_params_default();
  vllm_speech_params params = vllm_speech_params_default();
  vllm_speech_engine* engine = (vllm_speech_engine*)1;
  vllm_speech_result result;
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_speech_engine_load", vllm_speech_engine_load(&model, &engine), "path");
  CHECK(!engine);
  model.path = text_model;
  CHECK_REFUSED(VLLM_ERR_MODEL_LOAD, "vllm_speech_engine_load", vllm_speech_engine_load(&model, &engine), "vllm_engine_load");
  model.path = "/tmp";
  CHECK_REFUSED(VLLM_ERR_MODEL_LOAD, "vllm_speech_engine_load", vllm_speech_engine_load(&model, &engine), "no family claims '/tmp'");
  CHECK(!vllm_speech_engine_family(NULL) && !vllm_speech_engine_sample_rate(NULL));
  CHECK(!vllm_speech_engine_requires_reference_audio(NULL) && !vllm_speech_engine_device(NULL));
  memset(&result, 0xab, sizeof result);
  CHECK_REFUSED(VLLM_ERR_INVALID_ARGUMENT, "vllm_synthesize", vllm_synthesize(NULL, &params, &result), "NULL");
  CHECK(!result.samples && !result.wav && !result.n_samples);
}

int main(int argc, char** argv) {
  (void)argc;
  mux();
  video(argv[1]);
  speech(argv[1]);
  char* words[] = {"vllm-server", "--help", NULL};
  CHECK(vllm_server_main(2, words) == 1);
  CHECK(strstr(vllm_last_error(), "vllm_server_main: ") && strstr(vllm_last_error(), "no server"));
  return 0;
}
