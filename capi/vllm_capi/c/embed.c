/*
 * embed.c - starts the interpreter and cffi's side of the door; compiled together with the file that cffi writes.
 *
 * Owns everything about CPython's start: isolation, the thread that becomes Python's main thread, the host's SIGINT. The only file that
 * includes Python.h. Must not know what a call does: that is bridge.py.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "door.h"

#include "back.h"

int vllmpy_start_cffi(void); /* in cffi's file: runs the init code, which binds bridge.py */

static const door_host* host;
static int owns_interpreter;

/* ---- what the bridge asks of C (back.h) ---- */

void vllmpy_set_error(const char* text) { host->set_error(text); }

void vllmpy_interrupted(void) { host->interrupted(); }

void vllmpy_start_failed(const char* text) { snprintf(host->failure, host->failure_bytes, "%s", text); }

int vllmpy_owns_interpreter(void) { return owns_interpreter; }

void vllmpy_watch_counters(int64_t* counters) { host->watch_counters(counters); }

/* ---- the end of the process ----

   exit() takes libraries down while our threads run: in the middle of an import, or of LLVM's work, that ends in a crash instead of the
   host's exit status. So its first step here is to let imports come to an end, and to keep LLVM from beginning anything. It has to be the
   first step, and what is registered later runs earlier, so it is registered again with every import. */

static void (*last_call)(void);
static pid_t starter_process; /* 0: the interpreter is the host's, and so is its end */
static atomic_int started;
static _Atomic int64_t last_import_ms;

static int64_t now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

/* Whether an import began a moment ago. Python's lock is held while a library is loaded, so to have had it means that none is. */
static int is_importing(void) {
  enum { A_MOMENT_MS = 100 };
  PyGILState_Release(PyGILState_Ensure());
  return now_ms() - atomic_load(&last_import_ms) < A_MOMENT_MS;
}

/* Not in a child of fork(), whose interpreter nobody runs. Imports end with LLVM's, behind which there is a last call. */
static void before_exit(void) {
  static atomic_int ran;
  if (getpid() != starter_process || atomic_exchange(&ran, 1)) return;
  enum { PATIENCE_MS = 30000 };
  int64_t end = now_ms() + PATIENCE_MS;
  while (!atomic_load(&started) && now_ms() < end) usleep(1000);
  if (!atomic_load(&started) || !Py_IsInitialized()) return;
  while (!last_call && is_importing() && now_ms() < end) usleep(1000);
  if (last_call) last_call();
}

/* Python tells of every import, and of every look into a library. */
static int on_event(const char* event, PyObject* args, void* data) {
  (void)args;
  (void)data;
  int is_import = !strcmp(event, "import");
  if (last_call || (!is_import && strncmp(event, "ctypes.dl", 9)) || getpid() != starter_process) return 0;
  if (is_import) atomic_store(&last_import_ms, now_ms());
  atexit(before_exit);
  return 0;
}

void vllmpy_before_exit(void (*function)(void)) {
  last_call = function;
  if (atexit(before_exit)) last_call = NULL;
}

char* vllmpy_copy(const char* bytes, size_t n) {
  char* copy = malloc(n + 1);
  if (!copy) return NULL;
  memcpy(copy, bytes, n);
  copy[n] = 0;
  return copy;
}

const char* vllmpy_finish_reason(const char* name) {
  static const char* const reasons[] = {"stop", "length", "abort", "error", "repetition"};
  for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
    if (!strcmp(reasons[i], name)) return reasons[i];
  return "unknown";
}

/* ---- start ---- */

static int fail_status(const char* what, PyStatus status) {
  const char* why = status.err_msg ? status.err_msg : "it asked to exit";
  snprintf(host->failure, host->failure_bytes, "%s with %s: %s", what, host->executable, why);
  return -1;
}

/* Isolated, and told where it is: no PYTHON* variable, user site or current directory counts, a virtual environment does, the host's
   locale and standard streams stay as they are, and a bad installation comes back as a status (Py_InitializeEx would end the process). */
static int start_interpreter(void) {
  PyPreConfig before;
  PyPreConfig_InitIsolatedConfig(&before);
  before.utf8_mode = 1;
  before.configure_locale = 0;
  PyStatus status = Py_PreInitialize(&before);
  if (PyStatus_Exception(status)) return fail_status("cannot prepare Python", status);

  PyConfig config;
  PyConfig_InitIsolatedConfig(&config);
  config.install_signal_handlers = 0;
  config.pathconfig_warnings = 0;
  status = PyConfig_SetBytesString(&config, &config.program_name, host->executable);
  if (!PyStatus_Exception(status)) status = PyConfig_SetBytesString(&config, &config.executable, host->executable);
  if (!PyStatus_Exception(status)) status = Py_InitializeFromConfig(&config);
  PyConfig_Clear(&config);
  if (PyStatus_Exception(status)) return fail_status("cannot start Python", status);
  return 0;
}

/* install_signal_handlers=0 is not enough: the first import of _signal, by whichever module, puts Python's handler on a SIGINT that was
   at its default, and Ctrl-C stops working. So import it now, and give the host its disposition back. */
static void keep_sigint(void) {
  struct sigaction before;
  sigaction(SIGINT, NULL, &before);
  Py_XDECREF(PyImport_ImportModule("_signal"));
  PyErr_Clear();
  sigaction(SIGINT, &before, NULL);
}

/* Opens the library behind an extension module, and all that it needs, without running any of it. */
static void open_library_of(const char* module) {
  PyObject* importer = PyImport_ImportModule("_frozen_importlib_external");
  PyObject* finder = importer ? PyObject_GetAttrString(importer, "PathFinder") : NULL;
  PyObject* spec = finder ? PyObject_CallMethod(finder, "find_spec", "s", module) : NULL;
  PyObject* origin = spec ? PyObject_GetAttrString(spec, "origin") : NULL;
  const char* path = origin && PyUnicode_Check(origin) ? PyUnicode_AsUTF8(origin) : NULL;
  if (path) dlopen(path, RTLD_LAZY);
  PyErr_Clear();
  Py_XDECREF(origin);
  Py_XDECREF(spec);
  Py_XDECREF(finder);
  Py_XDECREF(importer);
}

/* OpenSSL, which Python's hashes come from, cleans up at exit() whoever still uses it. Told before its first use, it leaves that be. */
static void keep_openssl(void) {
  static const char* const names[] = {"libcrypto.so.3", "libcrypto.so.1.1"};
  enum { NO_ATEXIT = 0x00080000 }; /* OPENSSL_INIT_NO_ATEXIT */
  open_library_of("_hashlib");
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    void* library = dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD);
    int (*init)(uint64_t, const void*) = library ? (int (*)(uint64_t, const void*))dlsym(library, "OPENSSL_init_crypto") : NULL;
    if (init) init(NO_ATEXIT, NULL);
    if (library) dlclose(library);
  }
}

static int fail_import(const char* module) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject* text = value ? PyObject_Str(value) : NULL;
  const char* what = text ? PyUnicode_AsUTF8(text) : NULL;
  snprintf(host->failure, host->failure_bytes,
           "Python at %s cannot import %s (%s), nor can it from %s; install vllm-cpp there, or set VLLM_PYTHON",
           owns_interpreter ? host->executable : "this process", module, what ? what : "no reason given", host->site);
  PyErr_Clear();
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return -1;
}

/* The directory this library lies in goes last, with its .pth files: for an interpreter other than its own environment's. */
static void add_own_site(void) {
  PyErr_Clear();
  PyObject* module = PyImport_ImportModule("site");
  PyObject* done = module ? PyObject_CallMethod(module, "addsitedir", "s", host->site) : NULL;
  Py_XDECREF(done);
  Py_XDECREF(module);
  PyErr_Clear();
}

/* cffi would print a traceback if these were missing, and then answer every call with zero, which is VLLM_OK. */
static int import_needs(void) {
  static const char* const needs[] = {"_cffi_backend", "vllm_capi"};
  for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) {
    PyObject* module = PyImport_ImportModule(needs[i]);
    if (!module) {
      add_own_site();
      module = PyImport_ImportModule(needs[i]);
    }
    if (!module) return fail_import(needs[i]);
    Py_DECREF(module);
  }
  return 0;
}

static int start_cffi(void) {
  host->failure[0] = 0;
  if (vllmpy_start_cffi() == 0 && !host->failure[0]) return 0;
  if (!host->failure[0]) snprintf(host->failure, host->failure_bytes, "cffi could not start its embedded module");
  return -1;
}

typedef struct starter {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int done;
  int failed;
} starter;

/* Python's main thread is one of ours, for the life of the process: the first caller may end, or have a small stack. It takes no signal
   of the host's, and neither do the threads that Python starts from it. */
static void* be_main_thread(void* argument) {
  starter* start = argument;
  starter_process = getpid();
  atexit(before_exit);
  PySys_AddAuditHook(on_event, NULL);
  int failed = start_interpreter();
  if (!failed) {
    keep_sigint();
    keep_openssl();
    failed = import_needs();
    PyEval_SaveThread();
    atomic_store(&started, 1);
    if (!failed) failed = start_cffi();
  }
  pthread_mutex_lock(&start->lock);
  start->failed = failed;
  start->done = 1;
  pthread_cond_signal(&start->changed);
  pthread_mutex_unlock(&start->lock);
  for (;;) pause();
  return NULL;
}

static int start_own(void) {
  enum { STACK_BYTES = 64 << 20 };
  static starter start = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0};
  sigset_t all, before;
  sigfillset(&all);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, STACK_BYTES);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  int failed = pthread_create(&thread, &attributes, be_main_thread, &start);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  if (failed) {
    snprintf(host->failure, host->failure_bytes, "no thread for Python: %s", strerror(failed));
    return -1;
  }
  pthread_mutex_lock(&start.lock);
  while (!start.done) pthread_cond_wait(&start.changed, &start.lock);
  pthread_mutex_unlock(&start.lock);
  return start.failed;
}

static int start_in_host(void) {
  PyGILState_STATE lock = PyGILState_Ensure();
  int failed = import_needs();
  PyGILState_Release(lock);
  return failed ? failed : start_cffi();
}

static int python_alive(void) { return Py_IsInitialized(); }

__attribute__((visibility("default"))) int vllm_embed_boot(const door_host* from, door_table* table) {
  host = from;
  owns_interpreter = !Py_IsInitialized();
  if (owns_interpreter ? start_own() : start_in_host()) return -1;
#define FILL(name) table->name = vllmpy_##name;
  DOOR_CALLS(FILL)
#undef FILL
  table->python_alive = python_alive;
  return 0;
}
