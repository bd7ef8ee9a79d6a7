/* names.c - libvllm.so and libvllm.so.0, linked or loaded, in any order: one library.     names LIBRARY... (or "global" before them)
   With -DLINKED the program is linked to it as well. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include <vllm.h>

typedef const char* (*error_function)(void);
typedef vllm_status (*load_function)(const vllm_model_params*, vllm_engine**);

static void* look(void* library, const char* name) {
  void* found = dlsym(library, name);
  void* versioned = dlvsym(library, name, "VLLM_ABI_1");
  if (!found || found != versioned) fprintf(stderr, "%s: %p, as VLLM_ABI_1 %p\n", name, found, versioned);
  return found == versioned ? found : NULL;
}

int main(int argc, char** argv) {
  int flags = RTLD_NOW | RTLD_LOCAL;
  load_function first = NULL;
  error_function error_of_first = NULL;
#ifdef LINKED
  first = vllm_engine_load;
  error_of_first = vllm_last_error;
#endif
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "global")) {
      flags = RTLD_NOW | RTLD_GLOBAL;
      continue;
    }
    void* library = dlopen(argv[i], flags);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    load_function load;
    error_function error;
    *(void**)&load = look(library, "vllm_engine_load");
    *(void**)&error = look(library, "vllm_last_error");
    if (!load || !error) return 1;
    if (!first) first = load, error_of_first = error;
    if (load != first || error != error_of_first) return fprintf(stderr, "%s is a second library\n", argv[i]), 1;
    /* Loads under one name, asks under the other. */
    if (load(NULL, NULL) != VLLM_ERR_INVALID_ARGUMENT || !strstr(error_of_first(), "vllm_engine_load: ")) return 1;
    if (dlclose(library)) return 1;
    if (!strstr(error_of_first(), "vllm_engine_load: ")) return 1; /* it stays after dlclose */
  }
  return 0;
}
