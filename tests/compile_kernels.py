"""Compile the kernels for three chips without a GPU; the last line printed is JSON: {"case arch": [facts of each kernel]}."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from mok.kernels.combine import combine_kernel, live_slots_kernel
from mok.kernels.forward import forward_kernel
from mok.kernels.forward_fp8 import forward_fp8_kernel
from mok.kernels.forward_hopper import forward_hopper_kernel
from mok.kernels.forward_mxfp8 import forward_mxfp8_kernel
from mok.kernels.launch import OF_SHARED, ForwardPlan
from mok.kernels.launch_mxfp8 import HOPPER_STAGES
from mok.kernels.router import choose_backward_kernel, choose_kernel
from mok.kernels.schedule import BLOCK_N, SCANNED_BLOCKS, SCANNED_EXPERTS, count_kernel, place_kernel, rows_kernel, scan_kernel
from mok.kernels.signals import barrier_kernel
from mok.kernels.tasks import tasks_kernel

PLAN = ForwardPlan()
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
READABLE = (90, 100)  # the disassembler that comes with Triton 3.6 does not know sm_103; that of 3.9 does
UNREAD = re.compile(r"(store_)?(shared_)?d_(gate|up|down)_(weight_)?desc")  # weights' gradients: nobody in the kernel reads them
BF16 = {"x_ptr", "combine_ptr", "ring_ptr", "shared_out_ptr", "y_ptr", "shared_ptr", "out_ptr"}
FP32 = {"weights_ptr", "shared_scale_ptr", "logits_ptr", "bias_ptr", "scores_ptr", "d_weights_ptr", "d_scores_ptr", "d_logits_ptr"}
INT64 = {"tasks_ptr", "ids_ptr", "trace_ptr"}
FP8 = "BLOCK"  # a constant of the forward in FP8 alone


def argument_type(name: str, constants: dict[str, object]) -> str:
    m, n, k = PLAN.block_m, PLAN.block_n, PLAN.block_k
    if name in constants:
        return "constexpr"
    if name.endswith("_desc") and "BLOCK_N" not in constants and FP8 not in constants:  # MXFP8
        if name.endswith("_scale_desc"):
            return f"tensordesc<u8[{1 if name[0] in 'xh' else 2}, 1, 1, 2, 256]>"
        shape = f"{m}, {m}" if name.startswith(("save_", "ring_")) else f"2, {m}, {m}"
        return f"tensordesc<{'bf16' if name.startswith('save_') else 'fp8e4nv'}[{shape}]>"
    if name.endswith("_desc") and FP8 in constants:
        rows = m // 2 if "half" in name else m
        return f"tensordesc<{'bf16' if name.startswith('save_') else 'fp8e4nv'}[{rows}, {constants[FP8]}]>"
    if name.endswith("_desc"):
        if "half" in name:
            m //= 2
        if name.startswith(("store_", "save_")):
            return f"tensordesc<bf16[{m}, {n}]>"
        return f"tensordesc<bf16[{m}, {k}]>" if "x_desc" in name or "h_desc" in name else f"tensordesc<bf16[2, {n}, {k}]>"
    if name.endswith("_ptrs") or name in INT64:
        return "*i64"
    if name == "x_ptr" and constants.get("MXFP8"):
        return "*u8"
    if name in BF16:
        return "*bf16"
    if name in FP32:
        return "*fp32"
    if name.endswith("_scale_ptr"):
        return "*u8"
    if name.endswith("_ptr"):
        return "*i32"
    return "fp32" if name == "factor" or (name in ("limit", "shared_limit") and "BLOCK_M" in constants) else "i32"


def stores_of_copy_engine(ptx: str, descriptors: Sequence[str]) -> list[set[str]]:
    """For each store of the copy engine, in order, the descriptors (of these arguments) that its address may be, over all moves and
    selections of registers."""
    params = re.findall(r"\.param \.align 64 \.b8 (\w+)\[128\]", ptx)
    names = dict(zip(params, descriptors, strict=True))
    sources: dict[str, set[str]] = {}
    for to, of in re.findall(r"^\s*(?:@!?%p\d+\s+)?(?!ld|atom)[\w.:]+\s+(%rd?\d+), ([^\[\];]*);", ptx, re.MULTILINE):
        sources.setdefault(to, set()).update(re.findall(r"%rd?\d+|\w+_param_\d+", of))
    found = []
    for address in re.findall(r"cp\.async\.bulk\.tensor\.\dd\.global\S* \[(%\w+),", ptx):
        seen, todo = set(), {address}
        while todo:
            seen |= todo
            todo = set().union(*(sources.get(name, ()) for name in todo)) - seen
        found.append({names[name] for name in seen if name in names})
    return found


def unfinished_stores(ptx: str, unread: Collection[int] = ()) -> int:
    """Releases that can be reached from a store of the copy engine without a full wait in between, over all paths through the branches;
    unread: which stores, in order, nobody is told of."""
    blocks: dict[str, tuple[list[str], list[str]]] = {}  # label -> (what happens, where it goes on)
    name, events, count, stores = "entry", [], 0, 0
    for line in [*ptx.splitlines(), "ret;"]:
        label = re.match(r"\s*(\$\w+):", line)
        branch = re.match(r"\s*(@!?%p\d+\s+)?bra(?:\.uni)?\s+(\$\w+)", line)
        if label or branch or re.match(r"\s*ret;", line):
            count += 1
            follow = label[1] if label else f"after {count}"
            targets = [follow] if label or (branch and branch[1]) else []
            blocks[name] = (events, targets + ([branch[2]] if branch else []))
            name, events = follow, []
        elif re.search(r"cp\.async\.bulk\.tensor\.\dd\.global\.shared", line):
            if stores not in unread:
                events.append("store")
            stores += 1
        elif "cp.async.bulk.wait_group 0" in line:
            events.append("wait")
        elif re.search(r"(release|acq_rel)\.(gpu\.global\.)?add", line):
            events.append("release")
    bad, seen, todo = set(), set(), [("entry", False)]
    while todo:
        name, pending = state = todo.pop()
        if state in seen or name not in blocks:
            continue
        seen.add(state)
        for position, event in enumerate(blocks[name][0]):
            if event == "release" and pending:
                bad.add((name, position))
            pending = event == "store" or (pending and event != "wait")
        todo += [(target, pending) for target in blocks[name][1]]
    return len(bad)


def copies_not_shown_to_products(ptx: str) -> int:
    """Waits for the threads' copies that are not followed by a barrier of the threads and then by the fence that products need."""
    found = re.findall(r"cp\.async\.wait_group|bar\.sync|fence\.proxy\.async|wgmma\.mma_async", ptx)
    waits = [i for i, event in enumerate(found) if event == "cp.async.wait_group"]
    return sum(found[i + 1 : i + 3] != ["bar.sync", "fence.proxy.async"] for i in waits)


def local_accesses_among_products(sass: str) -> int:
    """Loads and stores of local memory (spilled registers) in the loops that hold the tensor cores' instructions: for each of these the
    shortest stretch around it from the target of a branch that leads back to this branch, unless another one's lies within it (the first
    step of a loop may stand before it)."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]
    branches = [(at, re.search(r"\bBRA(?:\.\w+)* (?:\S+, )?0x([0-9a-f]+)", text)) for at, text in lines]
    back = [(int(to[1], 16), at) for at, to in branches if to and int(to[1], 16) <= at]
    products = [at for at, text in lines if re.search(r"GMMA|UTC\w*MMA", text)]
    loops = {min(((end - start, start, end) for start, end in back if start <= at <= end), default=None) for at in products}
    assert loops and None not in loops, "products outside of any loop"
    loops = {a for a in loops if not any(a != b and a[1] <= b[1] and b[2] <= a[2] for b in loops)}
    return sum("LDL" in text or "STL" in text for at, text in lines for _, start, end in loops if start <= at <= end)


def waited_at_once(ttgir: str) -> int:
    """Blackwell's products whose own end is the next thing that is waited for, where the next loads or the product before should be."""
    bad, own = 0, set()
    for line in ttgir.splitlines():
        if "ttng.tc_gen5_mma" in line:
            signal = re.search(r"(%[\w#]+)\[%\w+\] \{is_async\}", line)
            own.add(signal and signal[1])
            bad += not signal
        elif waited := re.search(r"ttng\.wait_barrier (%[\w#]+)", line):
            bad += waited[1] in own
            own.clear()
    return bad


def facts_of(kernel, arch: int, signature: dict[str, str], constants: dict[str, object], **options: object) -> dict[str, object]:
    """Compile a kernel; what it became. `local_in_loop` is None where the disassembler does not know the chip."""
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name.endswith(("_ptr", "_ptrs"))}
    form = GluonASTSource if kernel.is_gluon() else ASTSource
    source = form(kernel, signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx, ttgir = made.asm["ptx"], made.asm["ttgir"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([str(CUOBJDUMP), what, file.name], capture_output=True, text=True).stdout
            for what in ("--dump-resource-usage", "--dump-sass")
        )
    readable = re.search(r"/\*[0-9a-f]{4,}\*/", sass)
    assert readable or arch not in READABLE, f"no instructions of sm_{arch} to read"
    products = re.search(r"wgmma|tcgen05\.mma", ptx)
    stores = stores_of_copy_engine(ptx, [name for name in kernel.arg_names if signature[name].startswith("tensordesc")])
    unread = {i for i, names in enumerate(stores) if names and all(map(UNREAD.fullmatch, names))}
    hopper_waits = re.findall(r"HGMMA[^\n]*gsb0 ;[^\n]*\n(?:[^\n]*\n){0,2}[^\n]*WARPGROUP\.DEPBAR\.LE gsb0, 0x0", sass)
    return dict(
        name=kernel.__name__, shared=made.metadata.shared, stack=int(re.search(r"STACK:(\d+)", usage)[1]),
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        local_in_loop=(local_accesses_among_products(sass) if products else 0) if readable else None,
        tensor_core=ptx.count("wgmma.mma_async" if arch == 90 else "tcgen05.mma"),
        e4m3=len(re.findall(r"wgmma\.mma_async\S*\.e4m3\.e4m3", ptx)),
        scaled=len(re.findall(r"tcgen05\.mma\S*block_scale", ptx)), unscaled=len(re.findall(r"tcgen05\.mma\.(?!\S*block_scale)", ptx)),
        of_bf16=len(re.findall(r"tcgen05\.mma\S*kind::f16", ptx)), code_copies=ptx.count("tcgen05.cp."),
        serialized=len(hopper_waits) if arch == 90 else waited_at_once(ttgir),
        full_waits=sass.count("DEPBAR.LE gsb0, 0x0"), single_conversions=sass.count("F2F.BF16"),
        copy_engine=len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx)),
        copy_engine_stores=len(stores), stored=sorted(set().union(*stores)), unfinished=unfinished_stores(ptx, unread),
        announced=len(re.findall(r"gpu\.release\.add|release\.gpu\.global\.add", ptx)),
        clocks=len(re.findall(r"%clock|%globaltimer|%smid", ptx)),
        thread_copies=len(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\n]*, 0x10", ptx)),
        not_shown=copies_not_shown_to_products(ptx),
        wide_loads=ptx.count("ld.global.v4"), wide_stores=ptx.count("st.global.v4"), narrow_stores=ptx.count("st.global.b16"),
        exponentials=ttgir.count("ex2.approx"), warp_reductions=ptx.count("redux.sync"),
        inexact=len(re.findall(r"\.ftz|\.approx|\.full|\bfma\.|\b(?:add|sub|mul)\.f32", ptx)),
    )  # fmt: skip


def compile_one(
    kernel, arch: int, constants: dict[str, object], num_warps: int = 4, num_stages: int = 3, **options: object
) -> dict[str, object]:  # fmt: skip
    tile = {}
    if kernel.is_gluon():  # no arguments of these, but fixed
        tile = dict(BLOCK_M=PLAN.block_m, BLOCK_N=PLAN.block_n)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: argument_type(name, {**tile, **constants}) for name in kernel.arg_names}
    if kernel.is_gluon():
        for name in signature:
            if name.endswith("_desc") and name not in constants:
                rank = signature[name].count(",") + 1
                layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)
                signature[name] = f"{signature[name][:-1]},{layout!r}>"
    return facts_of(kernel, arch, signature, constants, num_warps=num_warps, num_stages=num_stages, **options)


def without(shared: int) -> dict[str, None]:
    """Arguments that are missing where there are no shared experts."""
    return {} if shared else dict.fromkeys(OF_SHARED)


def forward(arch: int, hidden=7168, width=2048, shared=0, ranks=1, save=False, mxfp8=False) -> list[dict[str, object]]:
    constants = dict(
        H=hidden, I=width, S=shared, K=8, R=ranks, CLAMP=save, SHARED_CLAMP=save, SAVE=save, PARTS=PLAN.parts,
        BLOCK_M=PLAN.block_m, BLOCK_N=PLAN.block_n, BLOCK_K=PLAN.block_k, BLOCK_H=PLAN.block_h, THREADS=32 * PLAN.num_warps,
        MXFP8=mxfp8, TRACE=False, **without(shared),
    )  # fmt: skip
    return [compile_one(forward_kernel, arch, constants, PLAN.num_warps, PLAN.num_stages)]


def forward_hopper(hidden=7168, width=2048, shared=0, ranks=1, save=False, gather=False) -> list[dict[str, object]]:
    constants = dict(
        H=hidden, I=width, S=shared, K=8, R=ranks, CLAMP=save, SHARED_CLAMP=save, SAVE=save,
        PARTS=0 if gather and ranks == 1 else PLAN.parts, GATHER=gather, BLOCK_H=PLAN.block_h, TRACE=False, **without(shared),
    )  # fmt: skip
    return [compile_one(forward_hopper_kernel, 90, constants, PLAN.num_warps)]


def forward_fp8(arch: int, hidden=7168, width=2048, ranks=1, save=False) -> list[dict[str, object]]:
    constants = dict(
        H=hidden, I=width, K=8, R=ranks, CLAMP=save, SAVE=save, PARTS=PLAN.parts, BLOCK_M=PLAN.block_m, BLOCK=128, BLOCK_H=PLAN.block_h,
        THREADS=32 * PLAN.num_warps, TRACE=False,
    )  # fmt: skip
    return [compile_one(forward_fp8_kernel, arch, constants, PLAN.num_warps, PLAN.num_stages)]


def forward_mxfp8(arch: int, hidden=7168, width=2048, ranks=1, save=False) -> list[dict[str, object]]:
    constants = dict(
        H=hidden, I=width, K=8, R=ranks, CLAMP=save, SAVE=save, PARTS=PLAN.parts, BLOCK_M=PLAN.block_m, BLOCK_H=PLAN.block_h,
        THREADS=32 * PLAN.num_warps, TRACE=False,
    )  # fmt: skip
    return [compile_one(forward_mxfp8_kernel, arch, constants, PLAN.num_warps, HOPPER_STAGES if arch == 90 else PLAN.num_stages)]


def schedule(arch: int) -> list[dict[str, object]]:
    return [
        compile_one(count_kernel, arch, dict(E=128, R=2, BLOCK_N=BLOCK_N, BINS=256)),
        compile_one(scan_kernel, arch, dict(E=128, BLOCK_B=SCANNED_BLOCKS, BLOCK_E=SCANNED_EXPERTS), 8),
        compile_one(place_kernel, arch, dict(E=128, BLOCK_E=128, BLOCK_N=BLOCK_N, CHUNK=64)),
        compile_one(rows_kernel, arch, dict(R=2, BLOCK_M=128, BLOCK_L=64, BLOCK_R=2)),
    ]


def choice(arch: int) -> list[dict[str, object]]:
    """The router's kernels: of the widest rows in groups, and of gradients."""
    groups = dict(E=1024, K=9, G=32, TOP_GROUPS=5, SCORE="softmax", RENORMALIZE=True, T2=1, G2=32, P2=32)
    gradient = dict(E=256, K=6, SCORE="sqrt_softplus", RENORMALIZE=True, UNROLL=6, T2=2, E2=256)
    return [
        compile_one(kernel, arch, constants, 1, enable_fp_fusion=False)
        for kernel, constants in ((choose_kernel, groups), (choose_backward_kernel, gradient))
    ]


def one(case: str) -> list[dict[str, object]]:
    """What a case's kernels became; but those for Hopper alone, a case ends with the compute capability."""
    if case.startswith("forward hopper"):
        return forward_hopper(**HOPPER_SIZES[case.removeprefix("forward hopper").strip()])
    name, _, arch = case.rpartition(" ")
    size = next((size for size in SIZES if name.endswith(f" {size}")), "")
    of = name.removesuffix(size).strip()
    if of in SMALL:
        return SMALL[of](int(arch))
    return FORWARDS[of](int(arch), **SIZES[size])


SIZES: dict[str, dict[str, Any]] = {
    "": {}, "shared saved two ranks": dict(shared=2048, ranks=2, save=True), "saved two ranks": dict(ranks=2, save=True),
    "odd sizes": dict(hidden=2880, width=1424),
}  # fmt: skip
HOPPER_SIZES: dict[str, dict[str, Any]] = {
    **SIZES, "shared": dict(shared=2048), "saved two ranks": dict(hidden=4096, width=14336, ranks=2, save=True),
    "odd sizes": dict(hidden=2880, width=1408), "two ranks": dict(ranks=2),
    "gathered": dict(gather=True), "gathered two ranks": dict(ranks=2, gather=True),
    "gathered shared saved odd sizes": dict(hidden=2896, width=1424, shared=2048, save=True, gather=True),
}  # fmt: skip
FORWARDS = {"forward": forward, "forward mxfp8": functools.partial(forward, mxfp8=True), "fp8": forward_fp8, "mxfp8": forward_mxfp8}
TASKS = dict(TILES=16, PARTS=4, UPS=16, DOWNS=28, SHARED_UPS=16, BLOCK_M=128, HALF_TILES=True, BLOCK=256)
COMBINE = dict(H=7168, K=8, E=128, HAS_WEIGHTS=True, HAS_SHARED=True, HAS_SCALE=True, BLOCK_H=1024)
SMALL = {
    "schedule": schedule, "tasks": lambda arch: [compile_one(tasks_kernel, arch, TASKS)],
    "combine": lambda arch: [compile_one(combine_kernel, arch, COMBINE)],
    "live_slots": lambda arch: [compile_one(live_slots_kernel, arch, dict(E=128, BLOCK=1024))],
    "choice": choice,
    "barrier": lambda arch: [compile_one(barrier_kernel, arch, dict(R=8, LANES=8), 1)],
}  # fmt: skip


def main() -> None:
    """Compile the cases of the command line."""
    print(json.dumps({case: one(case) for case in sys.argv[1:]}))


if __name__ == "__main__":
    main()
