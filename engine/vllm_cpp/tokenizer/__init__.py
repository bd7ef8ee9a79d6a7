"""Text and ids: the file's tokenizer, decoding that never splits a character, and chat templates.

Owns everything between a prompt and token ids. Must not know models, requests or sampling: other rooms import from here, and only from
here.
"""

from vllm_cpp.tokenizer.chat_template import ChatTemplate
from vllm_cpp.tokenizer.config_file import TokenizerConfig, read_tokenizer_config
from vllm_cpp.tokenizer.decoding import IncrementalDecoder
from vllm_cpp.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDecoder", "Tokenizer", "TokenizerConfig", "read_tokenizer_config"]
