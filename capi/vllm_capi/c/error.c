/* error.c - the last error of each thread. Plain C, so that it works before, without and after Python. */
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "door.h"

static _Thread_local char last_error[4096];

const char* vllm_last_error(void) { return last_error; }

/* Ends the text where it stops being whole: a cut must not leave half a character. */
static void cut(size_t length) {
  size_t start = length;
  while (start > 0 && length - start < 3 && ((unsigned char)last_error[start - 1] & 0xc0) == 0x80) start--;
  if (start > 0) {
    unsigned char lead = (unsigned char)last_error[start - 1];
    size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1;
    if (length - (start - 1) < bytes) length = start - 1;
  }
  last_error[length] = 0;
}

void door_set_error(const char* text) {
  size_t length = strlen(text);
  if (length >= sizeof last_error) length = sizeof last_error - 1;
  memcpy(last_error, text, length);
  cut(length);
}

static _Thread_local bool interrupted;

void door_interrupted(void) { interrupted = true; }

void door_raise_interrupt(void) {
  if (!interrupted) return;
  interrupted = false;
  raise(SIGINT);
}

vllm_status door_finish(const char* function, vllm_status status) {
  door_raise_interrupt();
  if (status == VLLM_OK) {
    last_error[0] = 0; /* also when a callback of this call left one behind */
    return status;
  }
  size_t head = strlen(function) + 2, body = strlen(last_error) + 1;
  if (head + body > sizeof last_error) body = sizeof last_error - head;
  memmove(last_error + head, last_error, body);
  memcpy(last_error, function, head - 2);
  memcpy(last_error + head - 2, ": ", 2);
  cut(head + body - 1);
  return status;
}

vllm_status door_fail(const char* function, vllm_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  cut(strlen(last_error));
  return door_finish(function, status);
}
