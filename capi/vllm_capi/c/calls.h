/*
 * calls.h - the functions of the bridge: written in Python (bridge.py), called by the C door.
 *
 * The one list of them. cffi reads it as the embedding interface, embed.c compiles it, and door.h makes a table of pointers from it, so
 * a call cannot be declared in two ways. Handles are ids (0 is none). Each returns a status, after vllmpy_set_error() when it is not OK.
 */

/* Engines. */
vllm_status vllmpy_engine_load(const vllm_model_params* params, uint64_t* engine);
vllm_status vllmpy_engine_free(uint64_t engine);

/* Blocking answers. The strings and arrays they leave in `out` come from malloc. */
vllm_status vllmpy_complete(uint64_t engine, const char* prompt, const vllm_sampling_params* params, vllm_completion* out);
vllm_status vllmpy_complete_tokens(uint64_t engine, const int32_t* prompt, int32_t n_prompt, const vllm_sampling_params* params,
                                   int32_t* out_tokens, int32_t max_out, int32_t* n_out, vllm_completion* out);
vllm_status vllmpy_chat(uint64_t engine, const char* request_json, char** out_json);
vllm_status vllmpy_embed(uint64_t engine, const char* const* texts, int32_t n_texts, vllm_embedding_result* out);
vllm_status vllmpy_transcribe(uint64_t engine); /* refuses: there are no such models yet */

/*
 * Streams: an answer as a queue of deltas, pulled by C, so that no Python frame is on the stack while the caller's callback runs.
 * next gives a malloc'ed delta, or a failure; after finished = true there is no next. close cancels what still runs.
 */
vllm_status vllmpy_stream_open(uint64_t engine, const char* prompt, const vllm_sampling_params* params, uint64_t* stream);
vllm_status vllmpy_chat_stream_open(uint64_t engine, const char* request_json, uint64_t* stream);
vllm_status vllmpy_stream_next(uint64_t stream, char** delta, bool* finished);
vllm_status vllmpy_stream_close(uint64_t stream);

/*
 * Requests: a stream that a C thread delivers (stream_next), and that others watch. delivered is called once, after the last callback.
 * free cancels what runs, waits for delivered if asked to, and ends the handle. done, error and free take any handle and never fail.
 */
vllm_status vllmpy_request_open(uint64_t engine, const char* prompt, const vllm_sampling_params* params, uint64_t* request);
vllm_status vllmpy_request_delivered(uint64_t request);
vllm_status vllmpy_request_cancel(uint64_t request);
vllm_status vllmpy_request_wait(uint64_t request);
vllm_status vllmpy_request_done(uint64_t request, bool* done);
vllm_status vllmpy_request_error(uint64_t request, const char** error);
vllm_status vllmpy_request_free(uint64_t request, bool wait);
