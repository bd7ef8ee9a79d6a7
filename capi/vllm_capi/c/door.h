/*
 * door.h - what the two halves of libvllm know of each other.
 *
 * libvllm.so.0 is plain C and exports the header; the embedding module (_vllm_embed, built by cffi) holds Python. The door opens the
 * module on the first call that needs it and gets a table of the bridge's functions. Private: nothing here is installed.
 */
#ifndef VLLM_DOOR_H
#define VLLM_DOOR_H

#include "vllm.h"

#include "calls.h"

/* The bridge's functions, by the declarations in calls.h. */
#define DOOR_CALLS(X)                                                                                                                     \
  X(engine_load) X(engine_free) X(complete) X(complete_tokens) X(chat) X(embed) X(transcribe)                                             \
  X(stream_open) X(chat_stream_open) X(stream_next) X(stream_close)                                                                       \
  X(request_open) X(request_delivered) X(request_cancel) X(request_wait) X(request_done) X(request_error) X(request_free)

typedef struct door_table {
#define DOOR_FIELD(name) __typeof__(&vllmpy_##name) name;
  DOOR_CALLS(DOOR_FIELD)
#undef DOOR_FIELD
  int (*python_alive)(void); /* 0 once the host has finalised an interpreter that was its own */
} door_table;

/* What the door tells the embedding module. */
typedef struct door_host {
  void (*set_error)(const char* text); /* the calling thread's last error, without the function's name */
  void (*interrupted)(void);           /* SIGINT ended what the calling thread waited for: it is raised again when the call is over */
  char* failure;                       /* where a failed start leaves its reason */
  size_t failure_bytes;
  const char* executable; /* the interpreter to start; "" when the process already runs one */
  const char* site;       /* the directory that holds this vllm_capi, in case the interpreter does not know it */
  void (*watch_counters)(int64_t* counters); /* counts.c: print these when the process ends, unless Python has */
} door_host;

/* The embedding module's one entry point: 0, or the reason in host->failure. */
typedef int (*door_boot)(const door_host* host, door_table* table);
int vllm_embed_boot(const door_host* host, door_table* table);

/* error.c: this thread's last error. `door_finish` puts `function: ` before the text of a failure, and clears it after a success. */
void door_set_error(const char* text);
void door_interrupted(void);
void door_raise_interrupt(void); /* the end of a call without a status; door_finish does it too */
vllm_status door_fail(const char* function, vllm_status status, const char* format, ...) __attribute__((format(printf, 3, 4)));
vllm_status door_finish(const char* function, vllm_status status);

/* counts.c: the counters whose last line is printed at the end of the process. */
void door_watch_counters(int64_t* counters);

/* start.c: brings Python up once; NULL when it cannot be used. door_failure then says why. */
const door_table* door_open(void);
const char* door_failure(void);

#endif
