/*
 * surface.c - the calls that need an engine: check pointers, open the door, hand over, and deliver answers to callbacks.
 *
 * Owns the callbacks: an answer is pulled from the bridge delta by delta and handed over here, in plain C, so that the caller's code runs
 * on a bare stack, without Python's lock, on the thread the header promises. Must not know what an engine is.
 */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "door.h"

#define REQUIRE(pointer)                                                                             \
  do {                                                                                               \
    if (!(pointer)) return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "%s is NULL", #pointer);   \
  } while (0)

#define OPEN(door)                                                                  \
  const door_table* door = door_open();                                             \
  if (!door) return door_fail(__func__, VLLM_ERR_RUNTIME, "%s", door_failure())

static uint64_t id_of(const void* handle) { return (uint64_t)(uintptr_t)handle; }

static void* handle_of(uint64_t id) { return (void*)(uintptr_t)id; }

/* ---- engines ---- */

vllm_status vllm_engine_load(const vllm_model_params* params, vllm_engine** out) {
  if (out) *out = NULL;
  REQUIRE(out);
  REQUIRE(params);
  REQUIRE(params->model_path);
  OPEN(door);
  uint64_t id = 0;
  vllm_status status = door->engine_load(params, &id);
  if (status == VLLM_OK) *out = handle_of(id);
  return door_finish(__func__, status);
}

void vllm_engine_free(vllm_engine* engine) {
  const door_table* door = engine ? door_open() : NULL;
  if (door) door->engine_free(id_of(engine));
  door_raise_interrupt();
}

/* ---- blocking answers ---- */

vllm_status vllm_complete(vllm_engine* engine, const char* prompt, const vllm_sampling_params* params, vllm_completion* out) {
  if (out) memset(out, 0, sizeof *out);
  REQUIRE(engine);
  REQUIRE(prompt);
  REQUIRE(params);
  REQUIRE(out);
  OPEN(door);
  return door_finish(__func__, door->complete(id_of(engine), prompt, params, out));
}

vllm_status vllm_complete_tokens(vllm_engine* engine, const int32_t* prompt, int32_t n_prompt, const vllm_sampling_params* params,
                                 int32_t* out_tokens, int32_t max_out, int32_t* n_out, vllm_completion* out) {
  if (n_out) *n_out = 0;
  if (out) memset(out, 0, sizeof *out);
  REQUIRE(engine);
  REQUIRE(prompt);
  REQUIRE(params);
  REQUIRE(n_out);
  if (n_prompt < 1) return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "n_prompt is %d; expected at least 1", n_prompt);
  if (max_out < 0) return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "max_out is %d; expected 0 or more", max_out);
  if (!out_tokens && max_out > 0)
    return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "out_tokens is NULL, which goes only with max_out 0; max_out is %d", max_out);
  OPEN(door);
  return door_finish(__func__, door->complete_tokens(id_of(engine), prompt, n_prompt, params, out_tokens, max_out, n_out, out));
}

vllm_status vllm_chat(vllm_engine* engine, const char* request_json, char** out_json) {
  if (out_json) *out_json = NULL;
  REQUIRE(engine);
  REQUIRE(request_json);
  REQUIRE(out_json);
  OPEN(door);
  return door_finish(__func__, door->chat(id_of(engine), request_json, out_json));
}

/* ---- streams ---- */

typedef struct stream {
  const door_table* door;
  uint64_t id;
} stream;

/* The request whose callbacks this thread makes (0: none), and whether one of them freed it. */
static _Thread_local uint64_t delivering;
static _Thread_local bool abandoned;

/* As clean-ups of their scopes these also run when a C++ callback throws through us: the answer is cancelled, nothing leaks. A stream is
   closed before door_finish, which may raise a signal: no frame of Python's but the host's may see that. */
static void close_stream(stream* open) { open->door->stream_close(open->id); }
static void free_text(char** text) { free(*text); }

static vllm_status deliver(stream from, vllm_token_callback callback, void* user_data) {
  for (;;) {
    __attribute__((cleanup(free_text))) char* delta = NULL;
    bool finished = false;
    vllm_status status = from.door->stream_next(from.id, &delta, &finished);
    if (status != VLLM_OK) return status;
    if (!callback(delta, finished, user_data) || finished || (from.id == delivering && abandoned)) return VLLM_OK;
  }
}

static vllm_status deliver_and_close(stream from, vllm_token_callback callback, void* user_data) {
  __attribute__((cleanup(close_stream))) stream opened = from;
  return deliver(opened, callback, user_data);
}

vllm_status vllm_complete_stream(vllm_engine* engine, const char* prompt, const vllm_sampling_params* params,
                                 vllm_token_callback callback, void* user_data) {
  REQUIRE(engine);
  REQUIRE(prompt);
  REQUIRE(params);
  REQUIRE(callback);
  OPEN(door);
  uint64_t id = 0;
  vllm_status status = door->stream_open(id_of(engine), prompt, params, &id);
  if (status != VLLM_OK) return door_finish(__func__, status);
  return door_finish(__func__, deliver_and_close((stream){door, id}, callback, user_data));
}

vllm_status vllm_chat_stream(vllm_engine* engine, const char* request_json, vllm_token_callback callback, void* user_data) {
  REQUIRE(engine);
  REQUIRE(request_json);
  REQUIRE(callback);
  OPEN(door);
  uint64_t id = 0;
  vllm_status status = door->chat_stream_open(id_of(engine), request_json, &id);
  if (status != VLLM_OK) return door_finish(__func__, status);
  return door_finish(__func__, deliver_and_close((stream){door, id}, callback, user_data));
}

/* ---- requests ---- */

typedef struct delivery {
  stream request;
  vllm_token_callback callback;
  void* user_data;
} delivery;

static void* deliver_request(void* argument) {
  delivery work = *(delivery*)argument;
  free(argument);
  delivering = work.request.id;
  deliver(work.request, work.callback, work.user_data); /* a failure is the bridge's to remember: it comes from there */
  work.request.door->request_delivered(work.request.id);
  if (abandoned) work.request.door->request_free(work.request.id, false);
  return NULL;
}

/* A detached thread of the library's own: every signal stays with the host's threads, and the host's callback has a full stack. */
static int start_delivery(delivery* work) {
  enum { STACK_BYTES = 8 << 20 };
  sigset_t all, before;
  sigfillset(&all);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, STACK_BYTES);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  int failed = pthread_create(&thread, &attributes, deliver_request, work);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return failed;
}

vllm_status vllm_request_submit(vllm_engine* engine, const char* prompt, const vllm_sampling_params* params,
                                vllm_token_callback callback, void* user_data, vllm_request** out) {
  if (out) *out = NULL;
  REQUIRE(engine);
  REQUIRE(prompt);
  REQUIRE(params);
  REQUIRE(callback);
  REQUIRE(out);
  OPEN(door);
  delivery* work = malloc(sizeof *work);
  if (!work) return door_fail(__func__, VLLM_ERR_RUNTIME, "out of memory");
  uint64_t id = 0;
  vllm_status status = door->request_open(id_of(engine), prompt, params, &id);
  if (status != VLLM_OK) {
    free(work);
    return door_finish(__func__, status);
  }
  *work = (delivery){{door, id}, callback, user_data};
  *out = handle_of(id); /* before the first callback, which may want it */
  int failed = start_delivery(work);
  if (failed) {
    *out = NULL;
    free(work);
    door->request_delivered(id);
    door->request_free(id, false);
    return door_fail(__func__, VLLM_ERR_RUNTIME, "no thread for the callbacks: %s", strerror(failed));
  }
  return door_finish(__func__, VLLM_OK);
}

vllm_status vllm_request_cancel(vllm_request* request) {
  REQUIRE(request);
  OPEN(door);
  return door_finish(__func__, door->request_cancel(id_of(request)));
}

vllm_status vllm_request_wait(vllm_request* request) {
  REQUIRE(request);
  if (id_of(request) == delivering)
    return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "called from the request's own callback, where it would wait for itself; "
                                                          "wait from another thread, or look at `finished`");
  OPEN(door);
  return door_finish(__func__, door->request_wait(id_of(request)));
}

bool vllm_request_done(const vllm_request* request) {
  bool done = false;
  const door_table* door = request ? door_open() : NULL;
  if (door) door->request_done(id_of(request), &done);
  return done;
}

const char* vllm_request_error(const vllm_request* request) {
  const char* error = "";
  const door_table* door = request ? door_open() : NULL;
  if (door) door->request_error(id_of(request), &error);
  return error;
}

void vllm_request_free(vllm_request* request) {
  const door_table* door = request ? door_open() : NULL;
  if (!door) return;
  uint64_t id = id_of(request);
  if (id == delivering) {
    abandoned = true; /* the thread we are on ends it, once the callback has returned */
    door->request_cancel(id);
  } else {
    door->request_free(id, true);
    door_raise_interrupt();
  }
}

/* ---- other tasks ---- */

vllm_status vllm_embed(vllm_engine* engine, const char* const* texts, int32_t n_texts, vllm_embedding_result* out) {
  if (out) memset(out, 0, sizeof *out);
  REQUIRE(engine);
  REQUIRE(texts);
  REQUIRE(out);
  if (n_texts < 1) return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "n_texts is %d; expected at least 1", n_texts);
  for (int32_t i = 0; i < n_texts; i++)
    if (!texts[i]) return door_fail(__func__, VLLM_ERR_INVALID_ARGUMENT, "texts[%d] is NULL", i);
  OPEN(door);
  return door_finish(__func__, door->embed(id_of(engine), texts, n_texts, out));
}

vllm_status vllm_transcribe(vllm_engine* engine, const vllm_transcription_params* params, vllm_transcription* out) {
  if (out) memset(out, 0, sizeof *out);
  REQUIRE(engine);
  REQUIRE(params);
  REQUIRE(out);
  OPEN(door);
  return door_finish(__func__, door->transcribe(id_of(engine)));
}
