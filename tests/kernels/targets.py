"""Compiles kernels for a processor that this machine need not have, to object code, and reports what came out; nothing of it is run.

Owns the way there: numba builds a kernel's LLVM code with the target's features in force and stops before it optimizes; llvmlite, whose
LLVM knows all processors, takes it from there. Run as a program in a process of its own (the features are fixed before kernels are
imported), with a name of TARGETS; prints JSON. Must not know what is expected.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections import Counter
from typing import Any

from llvmlite import binding
from llvmlite.binding import newpassmanagers
from numba import types
from numba.core import codegen, config, registry
from numba.core.ccallback import CFunc

AVX2 = "+sse2,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+f16c,+fma,+bmi,+bmi2,+avx2"
AVX512 = AVX2 + ",+avx512f,+avx512bw,+avx512dq,+avx512cd,+avx512vl"
ARM = "+neon,+dotprod,+fullfp16"
X86_64, AARCH64 = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
# by name: triple, processor, features
TARGETS = {
    "x86-64": (X86_64, "x86-64", "+sse2"),
    "x86-64-v3": (X86_64, "x86-64-v3", AVX2),
    "x86-64-v4 with VNNI": (X86_64, "x86-64-v4", AVX512 + ",+avx512vnni"),
    "neoverse-n1": (AARCH64, "neoverse-n1", ARM),
    "apple-m1": (AARCH64, "apple-m1", ARM),
}
KERNELS = (
    "encodings.q4_1.rows", "encodings.q4_1.tile", "encodings.q8_0.rows", "encodings.q8_0.tile", "encodings.q4_k.rows",
    "encodings.q6_k.tile", "encodings.f16.rows", "panel.product_f16", "panel.product_key_bytes", "panel.product_value_bytes",
    "quantize.quantize", "state_space.scan_heads", "state_space.scan_channels",
)  # fmt: skip
_CALL = re.compile(r"^\s+(?:callq|jmp|bl|b)\s+([A-Za-z_][\w.$]*)(?:@PLT)?$", re.MULTILINE)
_OPERATION = re.compile(r"^\s+([a-z][\w.]*)", re.MULTILINE)
_FMA_FORM = re.compile(r"^(vfn?m(?:add|sub))\d{3}")  # which operand the result replaces is the compiler's business
_REGISTERS = re.compile(r"%([xyz]mm)\d")


def llvm_of(kernel: Any) -> str:
    """A kernel's module with all that it calls linked in, before any optimization."""
    compiler = CFunc(kernel.python, ((types.int64,) * kernel.n_args, types.void), {}, {"nogil": True, "error_model": "numpy"})
    library = compiler._compile_uncached().library
    for other in dict.fromkeys(library._linking_libraries):
        library._final_module.link_in(other._get_module_for_linking(), preserve=True)
    return str(library._final_module)


def compiled(kernel: Any, triple: str, machine: binding.TargetMachine) -> dict[str, Any]:
    """What the kernel becomes: how often each instruction stands in it, register widths, calls that leave it, its object file's start."""
    text = re.sub(r"target triple = .*", f'target triple = "{triple}"', llvm_of(kernel))
    text = re.sub(r"target datalayout = .*", f'target datalayout = "{machine.target_data}"', text)
    module = binding.parse_assembly(text)
    options = newpassmanagers.create_pipeline_tuning_options(speed_level=3)
    passes = newpassmanagers.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    assembly = machine.emit_assembly(module)
    own = {function.name for function in module.functions if not function.is_declaration}
    return {
        "operations": Counter(_FMA_FORM.sub(r"\1", name) for name in _OPERATION.findall(assembly)),
        "registers": sorted(set(_REGISTERS.findall(assembly))),
        "calls": sorted(set(_CALL.findall(assembly)) - own),
        "object": machine.emit_object(module)[:20].hex(),
    }


def main(target: str) -> None:
    triple, cpu, features = TARGETS[target]
    assert registry.cpu_target.target_context is not None  # numba's own processor is fixed here, kernels look at the features below
    config.CPU_FEATURES = features
    codegen.CPUCodeLibrary._optimize_final_module = lambda _: None
    codegen.JITCodeLibrary._finalize_specific = lambda _: None
    codegen.JITCPUCodegen._add_module = lambda _, __: None
    codegen.JITCPUCodegen.set_env = lambda _, __, ___: None
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3)
    found = {}
    for name in KERNELS:
        module, _, function = name.rpartition(".")
        found[name] = compiled(getattr(importlib.import_module(f"vllm_cpp.kernels.cpu.{module}"), function), triple, machine)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
