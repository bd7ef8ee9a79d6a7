"""`python -m vllm_cpp.cli`."""

import sys

from vllm_cpp.cli.main import main

sys.exit(main())
