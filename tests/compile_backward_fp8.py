"""Compile the backward in blockwise FP8 for three chips without a GPU; the last line printed is JSON: {"case arch": facts}.

Run alone: python tests/compile_backward_fp8.py [case arch ...]
"""

from __future__ import annotations

from compile_backward import PLAN, compile_one, constants_of, quantized_type, run_jobs, stages

from mok.kernels.backward_fp8 import backward_fp8_kernel

BLOCK = 128
CASES = {  # hidden, width, ranks, then flags
    "plain": (7168, 2048, 1, {}),
    "runs": (7168, 2048, 1, dict(RUN=4)),
    "frozen": (7168, 2048, 2, dict(NEED_EXPERTS=False)),
    "quantized weight gradients": (7168, 2048, 1, dict(SNAP_COLUMNS=True, RUN=4)),
    "everything": (4096, 1024, 4, dict(RECOMPUTE=True, CARRY=True, CLAMP=True)),
    "odd sizes added": (2880, 1424, 2, dict(ACCUMULATE=True, CARRY=True, RECOMPUTE=True)),
}
JOBS = (("plain", 90), ("runs", 90), ("quantized weight gradients", 90), ("frozen", 90), ("everything", 90), ("odd sizes added", 90),
        ("runs", 100), ("everything", 100), ("everything", 103))  # fmt: skip


def argument_type(name: str, constants: dict[str, object]) -> str:
    m = PLAN.block_m
    if name.endswith("_desc") and name not in constants:
        of_bf16 = name.endswith(("weight_desc", "_n_desc", "_t_desc")) and name not in ("down_t_desc", "gate_up_t_desc")
        if not of_bf16 and name.startswith("store_"):
            return f"tensordesc<fp8e4nv[{m // 2 if 'half_' in name else m}, {BLOCK // 2}]>"
        if not of_bf16:
            return f"tensordesc<fp8e4nv[1, {m // 2 if name.startswith('half_') else m}, {BLOCK}]>"
    return quantized_type(name, constants)


def one(case: str, arch: int) -> dict[str, object]:
    hidden, width, ranks, flags = CASES[case]
    constants = constants_of(hidden, width, 0, ranks, flags) | dict(BLOCK=BLOCK, BLOCK_H=2 * PLAN.block_h)
    constants.setdefault("SNAP_COLUMNS", False)
    if constants["RECOMPUTE"]:
        for name in ("ring_x_desc", "gate_desc", "up_desc"):
            constants.pop(name, None)
    num_stages = stages(constants, arch)
    return compile_one(backward_fp8_kernel, arch, constants, PLAN.num_warps, num_stages, argument_type, enable_fp_fusion=False)


if __name__ == "__main__":
    run_jobs(one, JOBS)
