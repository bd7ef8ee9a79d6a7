/* forks.c - a fork before the first real call leaves both processes whole; after it, the child is refused and the parent goes on.
   forks model.gguf */
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static void use(vllm_engine* engine) {
  vllm_sampling_params sampling = greedy(3);
  vllm_completion answer;
  CHECK(vllm_complete(engine, "x", &sampling, &answer) == VLLM_OK);
  vllm_completion_free(&answer);
}

static void expect_zero(pid_t child) {
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void in_child_after(vllm_engine* engine, vllm_request* request, const char* path) {
  vllm_sampling_params sampling = greedy(3);
  vllm_completion answer;
  vllm_model_params params = vllm_model_params_default(); /* plain C works on */
  params.model_path = path;
  vllm_engine* other = (vllm_engine*)1;
  CHECK_REFUSED(VLLM_ERR_RUNTIME, "vllm_complete", vllm_complete(engine, "x", &sampling, &answer), "before fork()");
  CHECK(!answer.text);
  CHECK_REFUSED(VLLM_ERR_RUNTIME, "vllm_engine_load", vllm_engine_load(&params, &other), "before fork()");
  CHECK(!other);
  CHECK_REFUSED(VLLM_ERR_RUNTIME, "vllm_request_wait", vllm_request_wait(request), "before fork()");
  CHECK(!vllm_request_done(request) && !*vllm_request_error(request));
  vllm_request_free(request);
  vllm_engine_free(engine);
  exit(0); /* with everything that exit() runs */
}

int main(int argc, char** argv) {
  (void)argc;
  CHECK(vllm_abi_version() == 21); /* not a real call */
  pid_t child = fork();
  if (!child) {
    vllm_engine* engine = load(argv[1]);
    use(engine);
    vllm_engine_free(engine);
    exit(0);
  }
  vllm_engine* engine = load(argv[1]);
  use(engine);
  expect_zero(child);

  static collected to;
  vllm_sampling_params endless = greedy(0);
  vllm_request* request;
  CHECK(vllm_request_submit(engine, "x", &endless, collect, &to, &request) == VLLM_OK);
  child = fork();
  if (!child) in_child_after(engine, request, argv[1]);
  expect_zero(child);
  child = fork(); /* and out of the child by exec */
  if (!child) {
    execl("/bin/true", "true", (char*)NULL);
    _exit(1);
  }
  expect_zero(child);
  vllm_request_free(request);
  use(engine);
  vllm_engine_free(engine);
  return 0;
}
