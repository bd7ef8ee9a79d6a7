"""A host that is itself a Python, and whose user presses Ctrl-C while it waits in a call.     interrupted.py LIBRARY model.gguf"""

import ctypes
import signal
import sys
import threading

library = ctypes.CDLL(sys.argv[1])
library.vllm_last_error.restype = ctypes.c_char_p
PROCESSOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_char_p, ctypes.c_bool, ctypes.c_void_p)
signal.signal(signal.SIGINT, signal.default_int_handler)
calls = 0


@PROCESSOR
def press(_ids, _n_ids, _logits, _vocab_size, _data):
    """On the engine's thread: Ctrl-C, after the first token."""
    global calls
    calls += 1
    if calls == 2:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@CALLBACK
def on_delta(_text, _finished, _data):
    return True


def sampling(max_tokens, processor=None):
    params = ctypes.create_string_buffer(136)
    ctypes.c_float.from_buffer(params, 4).value = 1.0
    ctypes.c_int32.from_buffer(params, 16).value = max_tokens
    ctypes.c_float.from_buffer(params, 44).value = 1.0
    ctypes.c_int32.from_buffer(params, 52).value = 1
    if processor:
        ctypes.c_void_p.from_buffer(params, 120).value = ctypes.cast(processor, ctypes.c_void_p).value
    return params


def interrupted(name, *arguments):
    """Makes the call; the host's handler raises here, and the call has said why it ended."""
    global calls
    calls = 0
    try:
        status = getattr(library, name)(*arguments)
    except KeyboardInterrupt:
        said = library.vllm_last_error().decode()
        assert said.startswith(f"{name}: interrupted (KeyboardInterrupt)"), said
    else:
        raise AssertionError((name, status, library.vllm_last_error()))


model, answer = ctypes.create_string_buffer(128), ctypes.create_string_buffer(24)
path = ctypes.c_char_p(sys.argv[2].encode())
ctypes.memmove(model, ctypes.byref(path), 8)
ctypes.c_int32.from_buffer(model, 20).value = 32
engine = ctypes.c_void_p()
assert library.vllm_engine_load(model, ctypes.byref(engine)) == 0, library.vllm_last_error()

endless, short = sampling(0, press), sampling(4)
ids, count = (ctypes.c_int32 * 1)(5), ctypes.c_int32()
for call in (
    ("vllm_complete", engine, b"hello", endless, answer),
    ("vllm_complete_tokens", engine, ids, 1, endless, None, 0, ctypes.byref(count), None),
    ("vllm_complete_stream", engine, b"hello", endless, on_delta, None),
):
    interrupted(*call)
    assert library.vllm_complete(engine, b"hello", short, answer) == 0, library.vllm_last_error()
    library.vllm_completion_free(answer)
    assert calls < 200, "the engine went on with what nobody waits for"

# A wait that is interrupted has begun nothing: the request goes on.
request = ctypes.c_void_p()
calls = 2  # not yet
assert library.vllm_request_submit(engine, b"hello", sampling(0, press), on_delta, None, ctypes.byref(request)) == 0
interrupted("vllm_request_wait", request)
assert library.vllm_request_wait(request) == 0, library.vllm_last_error()
library.vllm_request_free(request)
library.vllm_engine_free(engine)
print("interrupted")
