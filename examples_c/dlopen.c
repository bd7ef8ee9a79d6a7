/* dlopen.c - use the library without linking to it, as plugins and other languages do.     ./dlopen model.gguf [libvllm.so] */
#include <dlfcn.h>
#include <stdio.h>
#include <vllm.h>

/* The functions wanted, each with its name and the type that the header gives it. */
static struct {
  __typeof__(&vllm_abi_version) abi_version;
  __typeof__(&vllm_last_error) last_error;
  __typeof__(&vllm_model_params_default) model_params_default;
  __typeof__(&vllm_sampling_params_default) sampling_params_default;
  __typeof__(&vllm_engine_load) engine_load;
  __typeof__(&vllm_engine_free) engine_free;
  __typeof__(&vllm_complete) complete;
  __typeof__(&vllm_completion_free) completion_free;
} vllm;

static int bind(void* library, const char* name, void* slot) {
  *(void**)slot = dlsym(library, name);
  if (!*(void**)slot) fprintf(stderr, "%s\n", dlerror());
  return *(void**)slot ? 0 : -1;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: %s model.gguf [libvllm.so]\n", argv[0]);
    return 2;
  }
  void* library = dlopen(argc > 2 ? argv[2] : "libvllm.so", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    fprintf(stderr, "%s\n(give its path, which is in the directory that `vllm-config --libdir` prints)\n", dlerror());
    return 1;
  }
#define BIND(name) bind(library, "vllm_" #name, &vllm.name)
  if (BIND(abi_version) || BIND(last_error) || BIND(model_params_default) || BIND(sampling_params_default) || BIND(engine_load) ||
      BIND(engine_free) || BIND(complete) || BIND(completion_free))
    return 1;
  if (vllm.abi_version() != VLLM_ABI_VERSION) { /* structs may differ: go no further */
    fprintf(stderr, "the library has interface %d, this program was compiled for %d\n", vllm.abi_version(), VLLM_ABI_VERSION);
    return 1;
  }

  vllm_model_params model = vllm.model_params_default();
  model.model_path = argv[1];
  model.num_blocks = 64;
  vllm_engine* engine;
  vllm_status status = vllm.engine_load(&model, &engine);
  vllm_completion answer = {0};
  if (status == VLLM_OK) {
    vllm_sampling_params sampling = vllm.sampling_params_default();
    sampling.temperature = 0;
    status = vllm.complete(engine, "The capital of France is", &sampling, &answer);
  }
  if (status == VLLM_OK) printf("interface %d says:%s\n", vllm.abi_version(), answer.text);
  else fprintf(stderr, "%s\n", vllm.last_error());
  vllm.completion_free(&answer);
  vllm.engine_free(engine);
  return status == VLLM_OK ? 0 : 1;
}
