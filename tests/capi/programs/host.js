// A host that is node: koffi loads libvllm with RTLD_LOCAL, streams into JavaScript, and waits off the main thread.
//   node host.js KOFFI LIBRARY model.gguf
const [, , koffiPath, libraryPath, model] = process.argv;
const koffi = require(koffiPath);
const library = koffi.load(libraryPath);

const callback = koffi.proto("bool Callback(const char* text, bool finished, void* user_data)");
const load = library.func("int vllm_engine_load(const uint8_t* params, _Out_ void** engine)");
const free = library.func("void vllm_engine_free(void* engine)");
const asking = "void* engine, const char* prompt, const uint8_t* params, Callback* callback, void* user_data";
const stream = library.func(`int vllm_complete_stream(${asking})`);
const submit = library.func(`int vllm_request_submit(${asking}, _Out_ void** request)`);
const wait = library.func("int vllm_request_wait(void* request)");
const release = library.func("void vllm_request_free(void* request)");
const lastError = library.func("const char* vllm_last_error()");

function check(status) {
  if (status !== 0) throw new Error(lastError());
}

const path = Buffer.from(model + "\0");
const params = Buffer.alloc(128);
params.writeBigUInt64LE(koffi.address(path), 0);
params.writeInt32LE(32, 20);
const sampling = Buffer.alloc(136);
sampling.writeFloatLE(1, 4);
sampling.writeInt32LE(6, 16);
sampling.writeFloatLE(1, 44);
sampling.writeInt32LE(1, 52);

const engine = [null];
check(load(params, engine));
let text = "", calls = 0, ended = 0;
const onDelta = koffi.register((delta, finished) => {
  text += delta;
  calls++;
  ended += finished;
  return true;
}, koffi.pointer(callback));
check(stream(engine[0], "hello", sampling, onDelta, null));
const request = [null];
check(submit(engine[0], "hello", sampling, onDelta, null, request));
wait.async(request[0], (error, status) => {
  if (error) throw error;
  check(status);
  release(request[0]);
  free(engine[0]);
  if (ended !== 2 || calls < 4) throw new Error(`${calls} calls, ${ended} ends`);
  console.log(`${calls} deltas`);
});
