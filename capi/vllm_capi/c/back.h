/*
 * back.h - what C gives to the bridge: its way to this thread's error, to memory the caller can free, and to static strings.
 *
 * cffi reads it as declarations; embed.c defines it.
 */
void vllmpy_set_error(const char* text);            /* the calling thread's error; the door adds the function's name */
void vllmpy_interrupted(void);                      /* SIGINT ended this call: raise it again once the call is over */
void vllmpy_start_failed(const char* text);         /* why bind() could not finish */
int vllmpy_owns_interpreter(void);                  /* 1: libvllm started this interpreter; 0: the host did */
char* vllmpy_copy(const char* bytes, size_t n);     /* malloc'ed, NUL-terminated; NULL when memory is out */
void vllmpy_watch_counters(int64_t* counters);      /* the statistics to print at the end of the process (counts.c) */
void vllmpy_before_exit(void (*function)(void));    /* called when the process that asked ends, before what was loaded so far is taken down */
const char* vllmpy_finish_reason(const char* name); /* the static string of that name, else "unknown" */
