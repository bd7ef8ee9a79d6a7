// throwing.cpp - a callback that throws: the exception reaches the caller, and the engine serves on.     throwing model.gguf
#include <stdexcept>

#include "check.h"

static bool boom(const char*, bool, void* user_data) {
  ++*static_cast<int*>(user_data);
  throw std::runtime_error("boom");
}

int main(int, char** argv) {
  vllm_engine* engine = load(argv[1]);
  vllm_sampling_params endless = greedy(0);
  for (int i = 0; i < 3; i++) {
    int calls = 0;
    bool caught = false;
    try {
      vllm_complete_stream(engine, "hello", &endless, boom, &calls);
    } catch (const std::runtime_error& error) {
      caught = !strcmp(error.what(), "boom");
    }
    CHECK(caught && calls == 1);
  }
  static collected to;
  vllm_sampling_params sampling = greedy(4);
  CHECK(vllm_complete_stream(engine, "hello", &sampling, collect, &to) == VLLM_OK);
  CHECK(to.finished);
  vllm_engine_free(engine);
  return 0;
}
