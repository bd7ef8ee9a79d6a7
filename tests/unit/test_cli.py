"""vllm-cli as scripts know it: texts, exit codes, streams, signals. Each run is a process; the model is the fake one where there is one."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiny_models
from fakes import decoded, fake_logits
from vllm_cpp import env
from vllm_cpp.cli import arguments
from vllm_cpp.cli.arguments import UsageError

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in env.ROWS},
    "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("engine", "capi", "tests")),
}
REAL = [sys.executable, "-m", "vllm_cpp.cli"]
# A model whose steps take a while, so that a signal surely finds it running.
SLOW = "run = models.Runner.run; models.Runner.run = lambda self, chunks: (time.sleep(0.005), run(self, chunks))[1]"
FAKE = [
    sys.executable,
    "-c",
    "import sys, time; from fakes import models; models.install(); from vllm_cpp.cli import main; sys.exit(main())",
]
SLOW_FAKE = [*FAKE[:2], FAKE[2].replace("models.install()", f"models.install(); {SLOW}")]
MISSING = "/nonexistent/model.gguf"
USAGE = arguments.USAGE + "\n"


def run(command, *flags, stdin: bytes | None = b"", **variables):
    done = subprocess.run([*command, *flags], input=stdin, env={**ENVIRONMENT, **variables}, capture_output=True, check=False, timeout=60)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def greedy(prompt: str, count: int) -> list[int]:
    context = list(prompt.encode())
    for _ in range(count):
        context.append(int(fake_logits(context).argmax()))
    return context[len(prompt.encode()) :]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--modle", "x"], "unknown argument '--modle'"),
        (["x.gguf"], "unknown argument 'x.gguf'"),
        (["--expert-stream", "many"], "unknown argument 'many': behind --expert-stream stands a whole number, or nothing"),
        (["--expert-stream", "-1"], "unknown argument '-1': behind --expert-stream stands a whole number, or nothing"),
        (["--expert-stream", "--many"], "unknown argument '--many'"),
        (["--stream", "many"], "unknown argument 'many'"),
        (["--stream=yes"], "unknown argument '--stream=yes'"),
        (["--model"], "missing value for '--model'"),
        (["-m", "x", "--max-tokens"], "missing value for '--max-tokens'"),
        ([], "--model <path> is required"),
        (["--prompt", "a"], "--model <path> is required"),
        (["--model", "", "--prompt", "a"], "--model <path> is required"),
        (["--model", "x", "--max-tokens", "many"], "'many' is not an integer (--max-tokens)"),
        (["--model", "x", "--temperature", "hot"], "'hot' is not a number (--temperature)"),
        (
            ["--model", "x", "-p", "a", "--json", "--stream"],
            "--json prints one object when the answer is complete, and --stream prints it as it comes: give one of them",
        ),
    ],
)
def test_a_wrong_command_line_in_its_words(flags, says):
    with pytest.raises(UsageError) as caught:
        arguments.parse(flags)
    assert str(caught.value) == says


def test_wrong_arguments_exit_2_with_usage_on_stderr():
    assert run(REAL, "--bogus") == (2, "", f"vllm-cli: unknown argument '--bogus'\n{USAGE}")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["-p", "a", "--top-p", "2"], "top_p"),
        (["-p", "a", "--temperature", "nan"], "temperature"),
        (["-p", "a", "--device", "tpu"], "device"),
        (["-p", "a", "--threads", "-1"], "threads"),
        (["-p", "a", "--kv-cache-dtype", "q4_0"], "kv_cache_dtype"),
        (["-p", ""], "the prompt is empty"),
        (["-p", b"\xff"], "the prompt is not valid UTF-8 (byte 0)"),
        (["-p", "-"], "the prompt is empty"),
        ([], "--prompt <text> is required where standard input is no terminal"),
    ],
)
def test_a_value_out_of_range_is_a_wrong_argument_and_nothing_is_loaded(flags, says):
    code, out, err = run(FAKE, "--model", "fake.gguf", *flags)
    assert (code, out) == (2, "")
    assert err.startswith(f"vllm-cli: {says}")
    assert "loading model" not in err


def test_flags_their_aliases_and_both_spellings():
    spelled = "--model=m --prompt=a=b --max-tokens=5 --temperature=-1 --top-p=0.5 --top-k=3 --seed=7 --max-model-len=9 --threads=2"
    short = ["-m", "m", "-p", "a=b", "-n", "5", "--temp", "-1", "--top-p", "0.5", "--top-k", "3", "-s", "7", "-c", "9", "-t", "2"]
    assert arguments.parse(spelled.split()) == arguments.parse(short)
    options = arguments.parse(["--model", "m"])
    assert (options.temperature, options.top_p, options.top_k, options.stream, options.json) == (0.0, 1.0, 0, False, False)


def test_help_and_version_need_no_model():
    code, out, err = run(REAL, "--help")
    assert (code, err) == (0, "")
    for name in ("--model", "--max-model-len", "--offload-config", "--json"):
        assert name in out
    code, out, err = run(REAL, "--version")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"vllm-cli \d+\.\d+\.\d+ \(C ABI 21, numba \S+, llvmlite \S+, device cpu\)\n", out)


def test_a_model_that_cannot_be_loaded_exits_1_with_its_status():
    code, out, err = run(REAL, "--model", MISSING, "--prompt", "a")
    assert (code, out) == (1, "")
    assert err.startswith(f"vllm-cli: loading model from {MISSING}\nvllm-cli: model load failed (status 2): ")


@pytest.mark.parametrize("plan", [False, True])
def test_a_document_that_cannot_be_read_is_a_failed_load(plan):
    code, out, err = run(FAKE, "--model", "fake.gguf", *(["--plan"] if plan else ["-p", "a"]), "--offload-config", "@/nonexistent")
    assert (code, out) == (1, "")
    says = "/nonexistent: no such file (behind @ stands a file's path, else the document itself)"
    assert err.endswith(f"vllm-cli: model load failed (status 1): --offload-config: {says}\n")


@pytest.mark.parametrize("form", ["text", "file"])
def test_a_bad_document_is_a_load_failure_with_status_1(form, tmp_path):
    document = '{"vllm_cpp":{"mmapp":{}}}'
    if form == "file":
        (tmp_path / "offload.json").write_text(document, encoding="utf-8")
        document = f"@{tmp_path / 'offload.json'}"
    code, out, err = run(REAL, "--model", MISSING, "--prompt", "a", "--offload-config", document)
    assert (code, out) == (1, "")
    assert err == (
        f"vllm-cli: loading model from {MISSING}\nvllm-cli: model load failed (status 1): offload config: unknown key "
        '"vllm_cpp.mmapp" (expected one of: mmap expert_stream device_fit placement)\n'
    )


def test_a_document_and_a_variable_are_both_said():
    document = '{"vllm_cpp":{"mmap":{"enabled":true,"prefault":false}}}'
    _, _, err = run(REAL, "--model", MISSING, "--prompt", "a", "--offload-config", document, VT_GGUF_MMAP="0")
    assert "engine: weight residency (offload_config vllm_cpp): mmap=on prefault=off\n" in err
    assert "engine: weight residency: the environment OVERRIDES the config for VT_GGUF_MMAP (mmap)\n" in err


SUMMARY = r"vllm-cli: finish_reason=(\w+) prompt_tokens=(\d+) completion_tokens=(\d+) secs=\d+\.\d{3} tok_s=\d+\.\d{3}\n"


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_the_answer_alone_is_on_stdout(flags):
    code, out, err = run(FAKE, "--model", "fake.gguf", "--prompt", "abc", *flags)
    assert code == 0
    assert out == decoded(greedy("abc", 16)) + "\n"
    found = re.fullmatch(r"vllm-cli: loading model from fake\.gguf\n" + SUMMARY, err)
    assert found
    assert found.groups() == ("length", "3", "16")


def test_the_prompt_from_standard_input():
    _, out, _ = run(FAKE, "--model", "fake.gguf", "--prompt", "-", "-n", "4", stdin="é\n".encode())
    assert out == decoded(greedy("é\n", 4)) + "\n"


def test_json_is_one_object_with_its_fields():
    code, out, _ = run(FAKE, "--model", "fake.gguf", "--prompt", "abc", "-n", "4", "--json")
    assert code == 0
    report = json.loads(out)
    assert list(report) == [
        *("text", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason", "load_s", "ttft_s", "prefill_tok_s"),
        *("decode_tok_s", "peak_rss_bytes", "expert_stream"),
    ]
    assert (report["text"], report["token_ids"]) == (decoded(greedy("abc", 4)), greedy("abc", 4))
    assert (report["prompt_tokens"], report["completion_tokens"], report["finish_reason"]) == (3, 4, "length")
    assert report["expert_stream"] is None
    assert all(report[name] > 0 for name in ("load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"))
    assert report["peak_rss_bytes"] > 1 << 20
    assert json.loads(run(FAKE, "--model", "fake.gguf", "--prompt", "abc", "-n", "1", "--json")[1])["decode_tok_s"] is None


def test_a_failed_completion_exits_1():
    code, out, err = run(FAKE, "--model", "fake.gguf", "--prompt", "a" * 600)
    assert (code, out) == (1, "")
    assert "vllm-cli: completion failed (status 1): prompt has 600 tokens" in err


def test_a_seed_repeats_and_sampling_is_asked_for():
    flags = ("--model", "fake.gguf", "--prompt", "abc", "--temperature", "1")
    assert run(FAKE, *flags, "--seed", "1")[1] == run(FAKE, *flags, "--seed", "1")[1] != run(FAKE, *flags, "--seed", "2")[1]


def test_output_is_utf_8_in_any_locale():
    code, out, _ = run(FAKE, "--model", "fake.gguf", "--prompt", "abc", "-n", "40", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (code, out) == (0, decoded(greedy("abc", 40)) + "\n")


def streaming(**more):
    flags = ["--model", "fake.gguf", "--prompt", "abc", "--stream", "-n", "400"]
    return subprocess.Popen([*SLOW_FAKE, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, **more)


def test_an_interrupt_ends_the_program_as_an_interrupt():
    with streaming() as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT
        assert b"Traceback" not in process.stderr.read()


def test_a_reader_that_goes_away_ends_the_program_silently():
    with streaming() as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(20) == -signal.SIGPIPE
        assert process.stderr.read() == b"vllm-cli: loading model from fake.gguf\n"


@pytest.mark.parametrize("redirection", [">/dev/full", ">&-"])
def test_an_answer_that_cannot_be_written_is_a_failure(redirection):
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *FAKE, "--model", "fake.gguf", "--prompt", "abc"]
    code, _, err = run(command)
    assert code == 1
    assert err.startswith("vllm-cli: loading model from fake.gguf\nvllm-cli: standard output cannot be written: ")
    assert "Exception" not in err


class Terminal:
    """vllm-cli on a terminal: what it shows, and keys for it."""

    def __init__(self, command, *flags):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], [*command, *flags], {**ENVIRONMENT, "TERM": "dumb"})
        self.shown = ""
        self.read_to = 0

    def wait_for(self, text, pressing=""):
        """Read until `text` is shown, behind what was waited for before.

        `pressing` is pressed, and again after a while: Python loses a signal that comes just before it waits for a key.
        """
        end = time.monotonic() + 30
        self.keys(pressing)
        while text not in self.shown[self.read_to :]:
            assert time.monotonic() < end, self.shown
            if not select.select([self.fd], [], [], 2)[0]:
                self.keys(pressing)
            else:
                try:
                    data = os.read(self.fd, 65536)
                except OSError:  # the other end is gone
                    data = b""
                assert data, self.shown
                self.shown += data.decode("utf-8", "replace")
        self.read_to = self.shown.index(text, self.read_to) + len(text)

    def keys(self, text):
        os.write(self.fd, text.encode())

    def exit_code(self):
        while True:
            try:
                if not os.read(self.fd, 65536):
                    break
            except OSError:
                break
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.fd)
        return code


def test_a_conversation_keeps_its_history_and_control_d_leaves():
    terminal = Terminal(FAKE, "--model", "fake.gguf", "--max-tokens", "6")
    terminal.wait_for("> ")
    terminal.keys("abc\n")
    first = decoded(greedy("<user>abc<assistant>", 6))
    terminal.wait_for(first)
    terminal.wait_for("> ")
    terminal.keys("b\n")
    terminal.wait_for(decoded(greedy(f"<user>abc<assistant>{first}<user>b<assistant>", 6)))
    terminal.wait_for("> ")
    terminal.keys("\x04")
    assert terminal.exit_code() == 0


def test_control_c_stops_the_answer_and_the_conversation_goes_on():
    terminal = Terminal(SLOW_FAKE, "--model", "fake.gguf", "--max-model-len", "100000")
    terminal.wait_for("> ")
    terminal.keys("abc\n")
    terminal.wait_for(decoded(greedy("<user>abc<assistant>", 6)))
    terminal.keys("\x03")
    terminal.wait_for("> ")
    terminal.keys("half a line")
    terminal.wait_for("half a line")
    terminal.wait_for("> ", pressing="\x03")
    terminal.keys("\x04")
    assert terminal.exit_code() == 0


def test_loading_shows_a_bar_on_a_terminal_only():
    terminal = Terminal(FAKE, "--model", "fake.gguf", "--prompt", "abc")
    terminal.wait_for("preparing the kernels")
    terminal.wait_for(" 50%")
    assert terminal.exit_code() == 0
    assert "%" not in run(FAKE, "--model", "fake.gguf", "--prompt", "abc")[2]


@pytest.fixture(scope="module")
def tiny_experts(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "tiny.gguf"
    tiny_models.build("qwen3moe", dtype="Q4_K").write(path)
    run(REAL, "--model", path, "--plan")  # the first on a machine compiles what measures memory, and says so
    return path


def test_a_plan_is_on_stdout_and_nothing_is_loaded(tiny_experts):
    code, out, err = run(REAL, "--model", tiny_experts, "--plan", "--n-cpu-moe", "1")
    assert (code, err) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in out.partition("\n\n")[0].splitlines())
    about = ["memory", "limit", "weights", "streaming", "slots", "drive", "bandwidth", "hits", "speed"]
    assert list(rows) == ["file", "architecture", "dense", "experts", "slices", "a", *about, "device", "placement"]
    assert rows["file"].startswith(f"{tiny_experts}, {tiny_experts.stat().st_size} bytes (0.00 GiB)")
    assert re.fullmatch(r"\d+ towers, \d+ slices, \d+ bytes \(0\.00 GiB\)", rows["experts"])
    assert rows["streaming"] == "off, and not needed: the file fits in memory, and borrowing serves it as fast"
    assert re.fullmatch(r"\d+, an arena of \d+ bytes \(0\.\d\d GiB\): 100 % of all slices, .* to spare", rows["slots"])
    assert re.fullmatch(r"\d+\.\d\d GB/s: random slices past the page cache by 4 lanes, for \d\.\d\d s", rows["drive"])
    assert re.fullmatch(r"[\d.]+ tokens/s expected: [\d.]+ ms of memory and 0\.0 ms of the drive for each; .*", rows["speed"])
    assert rows["placement"] == "1 override(s) resolve(s) to the engine's own device (cpu), so nothing is placed"
    head, *places = out.partition("\n\n")[2].splitlines()
    assert head.split() == ["layer", "what", "bytes", "lives", "in", "computed", "on"]
    assert places[0].split()[:2] == ["-", "dense"]
    assert all(place.split()[3:] == ["mapping", "cpu"] for place in places)


def test_a_plan_as_json_sums_up(tiny_experts):
    code, out, _ = run(REAL, "--model", tiny_experts, "--plan", "--json", "--no-mmap")
    plan = json.loads(out)
    assert code == 0
    assert sum(place["bytes"] for place in plan["places"]) == plan["dense_bytes"] + plan["tower_bytes"] < plan["file_bytes"]
    assert {place["lives"] for place in plan["places"]} == {"memory"}
    assert plan["token_slices"] > 0
    assert plan["refusal"] is None


def test_a_plan_of_streaming_says_what_is_asked_and_what_it_would_bring(tiny_experts):
    code, out, err = run(REAL, "--model", tiny_experts, "--plan", "--expert-stream", "9", "--max-model-len", "32")
    assert (code, err) == (0, "")
    rows = dict(re.findall(r"^(\S+(?: \S+)?) {2,}(.*)$", out.partition("\n\n")[0], re.MULTILINE))
    assert rows["streaming"] == "on; the file fits in memory, and borrowing serves it as fast"
    assert re.fullmatch(r"9, an arena of \d+ bytes \(0\.00 GiB\): \d+ % of all slices, \d\.\d times what a token reads", rows["asked"])
    assert "as recorded routing of Qwen3-30B-A3B and gpt-oss-120b hits with this share in slots" in rows["asked hits"]
    assert " tokens/s expected: " in rows["asked speed"]
    plan = json.loads(run(REAL, "--model", tiny_experts, "--plan", "--json", "--expert-stream", "9")[1])
    streaming, total = plan["streaming"], sum(plan["slices"].values())
    asked, proposed = streaming["asked"], streaming["proposed"]
    assert (asked["slots"], asked["share"], asked["tokens"]) == (9, 9 / total, 9 / plan["token_slices"])
    assert asked["read_s"] == pytest.approx((1 - asked["hit_rate"]) * plan["token_slice_bytes"] / streaming["drive_bytes_per_s"])
    assert asked["tokens_per_s"] == pytest.approx(1 / (asked["compute_s"] + asked["read_s"]))
    assert (proposed["slots"], proposed["hit_rate"], proposed["read_s"]) == (total, 1.0, 0.0)
    assert streaming["room_bytes"] == plan["available_bytes"] - plan["dense_bytes"] - streaming["kv_cache_bytes"] - streaming["spare_bytes"]
    assert 0 < streaming["measuring_s"] < 30
    off = json.loads(run(REAL, "--model", tiny_experts, "--plan", "--json", "--expert-stream", "--no-mmap")[1])["streaming"]
    assert (off["on"], off["asked"]) == (False, None)
    assert off["why_not"].startswith("mmap is off, so its experts were copied into memory")


def test_a_plan_is_refused_as_a_load_is(tiny_experts):
    document = '{"vllm_cpp":{"placement":{"cpu_moe":false}}}'
    code, out, err = run(REAL, "--model", tiny_experts, "--plan", "--cpu-moe", "--offload-config", document)
    assert (code, out) == (1, "")
    assert err == (
        'vllm-cli: model load failed (status 1): offload config: "vllm_cpp.placement.cpu_moe" is false in the document and true by '
        "--cpu-moe: say it in one of them\n"
    )
    assert run(REAL, "--model", MISSING, "--plan")[2].startswith("vllm-cli: model load failed (status 2): ")
    assert run(REAL, "--model", tiny_experts, "--plan", "--offload-config", '{"uva":{"cpu_offload_gb":1}}')[0] == 1


def test_flags_stand_in_the_installed_line():
    _, _, err = run(REAL, "--model", MISSING, "--prompt", "a", "--no-mmap", "-ot", "exps=CPU", "--offload-config", "{}")
    assert "engine: weight residency (offload_config vllm_cpp): mmap=off placement_overrides=1\n" in err
