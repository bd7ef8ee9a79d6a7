/*
 * start.c - brings Python up, once, on the first call that needs it.
 *
 * Owns the search for the interpreter, the start-up state, and the refusals after a fork or a failed start. A failure is a text and a
 * NULL, never a crash or an exit, and it sticks: a half-started interpreter cannot be started again. Must not include Python.h, so that
 * libvllm.so loads where no Python is; the few names it needs are looked up.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "door.h"

/* Baked in by the build: DOOR_PYTHON "3.11", DOOR_EMBED the embedding module's file name, DOOR_BUILD_PYTHON the interpreter that built
   this and DOOR_BUILD_BASE the directory of its base, DOOR_LIBPYTHON the name of its shared library, DOOR_BUILD_LIBPYTHON the path ("" when
   there was none), and DOOR_MULTIARCH the directory that Debian keeps such libraries in. */

enum { COLD, STARTING, READY, FAILED, FORKED };

static atomic_int state = COLD;
static pthread_mutex_t start_lock = PTHREAD_MUTEX_INITIALIZER;
static char failure[3072];
static door_table table;

static char here[PATH_MAX];       /* the directory of this library */
static char site[PATH_MAX];       /* the directory that holds the vllm_capi this library belongs to */
static char executable[PATH_MAX]; /* the interpreter to start */

/* ---- paths ---- */

static void parent(char* path) {
  char* slash = strrchr(path, '/');
  if (slash) *slash = 0;
}

/* Takes "." and ".." out of an absolute path by its text alone: links in it keep their names. pkg-config's run paths hold such steps. */
static void tidy(char* path) {
  char* out = path;
  for (const char* at = path; *at;) {
    const char* end = at + 1 + strcspn(at + 1, "/"); /* `at` stands on a slash */
    size_t n = (size_t)(end - at);
    if (n == 3 && !strncmp(at, "/..", n)) {
      while (out > path && *--out != '/') continue;
    } else if (n > 1 && !(n == 2 && at[1] == '.')) {
      memmove(out, at, n);
      out += n;
    }
    at = end;
  }
  *out = 0;
}

static int is_executable(const char* path) {
  struct stat found;
  return stat(path, &found) == 0 && S_ISREG(found.st_mode) && access(path, X_OK) == 0;
}

static int is_directory(const char* path) {
  struct stat found;
  return stat(path, &found) == 0 && S_ISDIR(found.st_mode);
}

/* <site>/vllm_capi/lib/libvllm.so.0: by the name it was loaded under, so that an environment made of links is found as itself; by the
   file's own place when that name is a link from elsewhere. */
static void find_self(void) {
  Dl_info self;
  char module[PATH_MAX + 128];
  for (int resolved = 0; resolved < 2; resolved++) {
    here[0] = 0;
    if (!dladdr((void*)find_self, &self) || !self.dli_fname) return;
    if (resolved || self.dli_fname[0] != '/') {
      if (!realpath(self.dli_fname, here)) snprintf(here, sizeof here, "%s", self.dli_fname);
    } else {
      snprintf(here, sizeof here, "%s", self.dli_fname);
      tidy(here);
    }
    parent(here);
    snprintf(module, sizeof module, "%s/" DOOR_EMBED, here);
    if (access(module, R_OK) == 0) break;
  }
  snprintf(site, sizeof site, "%s", here);
  parent(site);
  parent(site);
}

/* ---- the interpreter ---- */

/* An interpreter of another version would be given this version's library and find no standard library, or the wrong one. */
static int fits(const char* python) {
  char library[PATH_MAX + 64];
  const char* slash = strrchr(python, '/');
  if (!slash || !strstr(slash, "python")) return 0; /* /bin/sh stands beside a lib/pythonX.Y as well */
  snprintf(library, sizeof library, "%s", python);
  parent(library);
  snprintf(library + strlen(library), 64, "/../lib/python" DOOR_PYTHON);
  return is_executable(python) && is_directory(library);
}

/* <prefix>/bin/pythonX.Y for a library below <prefix>/lib/pythonX.Y/site-packages; an editable install lies somewhere else. */
static int find_own(char* prefix) {
  prefix[0] = 0;
  const char* folder = strrchr(site, '/');
  if (!folder || (strcmp(folder, "/site-packages") && strcmp(folder, "/dist-packages"))) return 0;
  snprintf(prefix, PATH_MAX, "%s", site);
  for (int i = 0; i < 3; i++) parent(prefix);
  return (size_t)snprintf(executable, sizeof executable, "%s/bin/python" DOOR_PYTHON, prefix) < sizeof executable && fits(executable);
}

static int find_executable(void) {
  const char* named = getenv("VLLM_PYTHON");
  if (named && *named) {
    snprintf(executable, sizeof executable, "%s", named);
    if (fits(executable)) return 0;
    snprintf(failure, sizeof failure,
             "VLLM_PYTHON is '%s', which is not the path of a Python " DOOR_PYTHON " executable with its ../lib/python" DOOR_PYTHON
             "; name one, or unset it", named);
    return -1;
  }
  char prefix[PATH_MAX];
  if (find_own(prefix)) return 0;
  snprintf(executable, sizeof executable, "%s", DOOR_BUILD_PYTHON);
  if (fits(executable)) return 0;
  const char* beside = *prefix ? " beside this library, in " : "";
  snprintf(failure, sizeof failure,
           "no Python " DOOR_PYTHON " found%s%s%s, nor at " DOOR_BUILD_PYTHON ", which built it; set VLLM_PYTHON to the executable of the "
           "environment that has vllm-cpp", beside, prefix, *prefix ? "/bin" : "");
  return -1;
}

/* The directory of the interpreter that a virtual environment was made from; of any other, its own. */
static void find_base(char* base) {
  char file[PATH_MAX + 32], line[PATH_MAX + 16];
  snprintf(base, PATH_MAX, "%s", executable);
  parent(base);
  snprintf(file, sizeof file, "%s/../pyvenv.cfg", base);
  FILE* config = fopen(file, "r");
  while (config && fgets(line, sizeof line, config)) {
    line[strcspn(line, "\r\n")] = 0;
    if (!strncmp(line, "home = ", 7)) snprintf(base, PATH_MAX, "%s", line + 7);
  }
  if (config) fclose(config);
}

static void* open_globally(const char* library) { return *library ? dlopen(library, RTLD_NOW | RTLD_GLOBAL) : NULL; }

/* Into the global scope, because numpy, numba and the rest are not linked with libpython and expect its names there. Near the interpreter
   first: a library of the same version from elsewhere would run with this one's standard library. */
static int open_libpython(void) {
  const char* named = getenv("VLLM_LIBPYTHON");
  char base[PATH_MAX], beside[PATH_MAX + 128];
  void* library = NULL;
  if (named && *named) {
    library = open_globally(named);
  } else {
    find_base(base);
    snprintf(beside, sizeof beside, "%s/../lib/" DOOR_LIBPYTHON, base);
    library = open_globally(beside);
    snprintf(beside, sizeof beside, "%s/../lib/" DOOR_MULTIARCH "/" DOOR_LIBPYTHON, base);
    if (!library) library = open_globally(beside);
    if (!library && !strcmp(base, DOOR_BUILD_BASE)) library = open_globally(DOOR_BUILD_LIBPYTHON);
    if (!library) library = open_globally(DOOR_LIBPYTHON);
  }
  if (library) return 0;
  snprintf(failure, sizeof failure,
           "cannot open " DOOR_LIBPYTHON ", the shared library of %s: %s; install it (a Python built with --enable-shared), or set "
           "VLLM_LIBPYTHON to its path", executable, dlerror());
  return -1;
}

/* A name of the Python that this process already has, or NULL. */
static void* python_symbol(const char* name) { return dlsym(RTLD_DEFAULT, name); }

static int check_version(void) {
  const char* (*version)(void) = (const char* (*)(void))python_symbol("Py_GetVersion");
  const char* have = version ? version() : "";
  size_t n = strlen(DOOR_PYTHON);
  if (!strncmp(have, DOOR_PYTHON, n) && (have[n] < '0' || have[n] > '9')) return 0;
  snprintf(failure, sizeof failure,
           "this process runs Python %.*s, and this libvllm was built for Python " DOOR_PYTHON "; install vllm-cpp for that Python, or "
           "load it into another process", (int)strcspn(have, " "), have);
  return -1;
}

/* ---- start ---- */

/* A child has the memory of a running Python and none of its threads; of an idle door it has everything, but perhaps a lock that a thread
   it does not have was about to use. */
static void in_child(void) {
  if (atomic_load(&state) != COLD) atomic_store(&state, FORKED);
  pthread_mutex_init(&start_lock, NULL);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, in_child); }

static int start(void) {
  static door_host host; /* outlives this call: the embedding module keeps it */
  char module[PATH_MAX + 128];
  find_self();
  snprintf(module, sizeof module, "%s/" DOOR_EMBED, here);
  if (access(module, R_OK)) {
    snprintf(failure, sizeof failure, "%s is missing: the installation is incomplete; install vllm-cpp again", module);
    return -1;
  }
  if (!python_symbol("Py_IsInitialized")) {
    if (find_executable() || open_libpython()) return -1;
  } else if (!((int (*)(void))python_symbol("Py_IsInitialized"))()) {
    if (find_executable()) return -1;
  }
  if (check_version()) return -1;
  void* library = dlopen(module, RTLD_NOW | RTLD_LOCAL);
  door_boot boot = library ? (door_boot)dlsym(library, "vllm_embed_boot") : NULL;
  if (!boot) {
    snprintf(failure, sizeof failure, "cannot load the Python side: %s", dlerror());
    return -1;
  }
  host = (door_host){
    .set_error = door_set_error,
    .interrupted = door_interrupted,
    .failure = failure,
    .failure_bytes = sizeof failure,
    .executable = executable,
    .site = site,
    .watch_counters = door_watch_counters,
  };
  return boot(&host, &table);
}

/* One caller starts; the others wait here. A host thread that holds Python's lock must not wait with it: the starter needs it. */
static void start_once(void) {
  int (*held)(void) = (int (*)(void))python_symbol("PyGILState_Check");
  int (*initialized)(void) = (int (*)(void))python_symbol("Py_IsInitialized");
  void* thread = NULL;
  if (held && initialized && initialized() && held()) thread = ((void* (*)(void))python_symbol("PyEval_SaveThread"))();
  pthread_mutex_lock(&start_lock);
  if (atomic_load(&state) == COLD) {
    atomic_store(&state, STARTING);
    int failed = start();
    atomic_store(&state, failed ? FAILED : READY);
  }
  pthread_mutex_unlock(&start_lock);
  if (thread) ((void (*)(void*))python_symbol("PyEval_RestoreThread"))(thread);
}

const door_table* door_open(void) {
  int now = atomic_load_explicit(&state, memory_order_acquire);
  if (now == COLD || now == STARTING) {
    start_once();
    now = atomic_load(&state);
  }
  return now == READY && table.python_alive() ? &table : NULL;
}

const char* door_failure(void) {
  switch (atomic_load(&state)) {
    case FORKED: return "libvllm was started before fork(), and a forked child cannot use it; fork first, or exec";
    case FAILED: return failure;
    default: return "the process has finalised its Python; libvllm ended with it";
  }
}
