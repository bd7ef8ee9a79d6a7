"""The `vllm-cli` program: one completion, or a conversation, from the shell.

Owns: flags, what goes to stdout (the answer, and nothing else) and to stderr, exit codes. Must not know how a model is loaded or run: it is
a client of `vllm_cpp.api`. Its texts and exit codes are a contract with scripts: 0 done, 1 load or generation failed, 2 bad arguments.
"""

from vllm_cpp.cli.main import main

__all__ = ["main"]
