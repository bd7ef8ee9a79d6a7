"""A host that is itself a Python: loads libvllm by ctypes, streams into a Python callback, and lives on.     host.py LIBRARY model.gguf"""

import ctypes
import signal
import sys
import threading

library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_LOCAL)
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_char_p, ctypes.c_bool, ctypes.c_void_p)
library.vllm_last_error.restype = ctypes.c_char_p


def check(status):
    assert status == 0, library.vllm_last_error()


model, sampling = ctypes.create_string_buffer(128), ctypes.create_string_buffer(136)
path = ctypes.c_char_p(sys.argv[2].encode())
ctypes.memmove(model, ctypes.byref(path), 8)
ctypes.c_int32.from_buffer(model, 20).value = 32
ctypes.c_float.from_buffer(sampling, 4).value = 1.0
ctypes.c_int32.from_buffer(sampling, 16).value = 6
ctypes.c_float.from_buffer(sampling, 44).value = 1.0
ctypes.c_int32.from_buffer(sampling, 52).value = 1

before = signal.getsignal(signal.SIGINT)
engine = ctypes.c_void_p()
check(library.vllm_engine_load(model, ctypes.byref(engine)))
assert signal.getsignal(signal.SIGINT) is before
assert "vllm_capi.bridge" in sys.modules, "the interpreter is shared"

deltas, threads = [], set()


@CALLBACK
def on_delta(text, finished, _):
    threads.add(threading.get_ident())
    deltas.append((text, finished))
    return True


check(library.vllm_complete_stream(engine, b"hello", sampling, on_delta, None))
assert deltas[-1][1], deltas
assert threads == {threading.get_ident()}, "a stream is delivered on the calling thread"

request = ctypes.c_void_p()
check(library.vllm_request_submit(engine, b"hello", sampling, on_delta, None, ctypes.byref(request)))
check(library.vllm_request_wait(request))
assert len(threads) == 2, "a request is delivered on a thread of the library"
library.vllm_request_free(request)

# With Python's lock held, as from an extension module that does not let go of it.
holding = ctypes.PyDLL(sys.argv[1])
check(holding.vllm_complete_stream(engine, b"hello", sampling, on_delta, None))

import vllm_cpp  # noqa: E402 - the host's own use of the package, beside the library's

with vllm_cpp.load(sys.argv[2], num_blocks=32) as own:
    assert own.generate("hello", max_tokens=2, temperature=0).completion_tokens >= 1
library.vllm_engine_free(engine)
library.vllm_request_submit(engine, b"hello", sampling, on_delta, None, ctypes.byref(request))
print(len(deltas), "deltas")
