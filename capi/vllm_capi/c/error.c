/* error.c - the last error of each thread. Plain C, so that it works before, without and after Python. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "door.h"

static _Thread_local char last_error[4096];

const char* vllm_last_error(void) { return last_error; }

void door_set_error(const char* text) { snprintf(last_error, sizeof last_error, "%s", text); }

vllm_status door_finish(const char* function, vllm_status status) {
  if (status == VLLM_OK) {
    last_error[0] = 0; /* also when a callback of this call left one behind */
    return status;
  }
  size_t head = strlen(function) + 2, body = strlen(last_error) + 1;
  if (head + body > sizeof last_error) body = sizeof last_error - head;
  memmove(last_error + head, last_error, body);
  memcpy(last_error, function, head - 2);
  memcpy(last_error + head - 2, ": ", 2);
  last_error[sizeof last_error - 1] = 0;
  return status;
}

vllm_status door_fail(const char* function, vllm_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return door_finish(function, status);
}
