"""Without a GPU: every kernel compiles for sm_90, sm_100 and sm_103, uses the tensor cores and the copy engine, and does not spill.

All compilations run in one process of their own, because another one may have loaded Triton as an interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
from scripts import run_script

pytest.importorskip("triton")

ARCHS = (90, 100, 103)
SIZES = ("", " shared saved two ranks", " odd sizes")


def of_archs(*cases: str) -> list[Any]:
    """(case, arch) of all; of the second Blackwell `make test` compiles the first one alone, of the first one not the odd sizes."""
    return [
        pytest.param(case, arch, marks=[pytest.mark.thorough] * (arch > 90 and ("odd" in case or (arch == 103 and case != cases[0]))))
        for case in cases for arch in ARCHS
    ]  # fmt: skip


FORWARDS = of_archs(*(f"forward{size}" for size in SIZES)) + of_archs(*(f"forward mxfp8{size}" for size in SIZES))
OTHERS = [(case, arch) for case in ("schedule", "tasks", "combine", "live_slots", "barrier", "choice") for arch in ARCHS]
HOPPER_STACK = {  # bytes; all is read and written outside of the steps
    "forward hopper": 0, "forward hopper shared": 0, "forward hopper two ranks": 0, "forward hopper odd sizes": 0,
    "forward hopper shared saved two ranks": 8,  # an address of a signal, from one task to the next
    "forward hopper gathered two ranks": 0,
    "forward hopper gathered": 56,  # numbers of lanes and columns, the same for every task
    "forward hopper gathered shared saved odd sizes": 40,  # a step's addresses beside the sums, with a clamp
    "forward hopper saved two ranks": 48,  # five such, and of a tile that is clipped and saved three pairs of gate and up
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(request) -> dict[str, dict]:
    """What the tests of this session look at."""
    found: dict[str, None] = {}
    for item in request.session.items:
        if item.path == request.path and (callspec := getattr(item, "callspec", None)):
            found[" ".join(str(callspec.params[name]) for name in ("case", "arch") if name in callspec.params)] = None
    return run_script("compile_kernels.py", found)


@pytest.mark.parametrize(("case", "arch"), FORWARDS + OTHERS)
def test_compiles_without_spills(compiled, case, arch):
    for kernel in compiled[f"{case} {arch}"]:
        assert kernel["stack"] == 0, kernel
        assert kernel["shared"] <= 232448


@pytest.mark.parametrize(("case", "arch"), of_archs("fp8", "fp8 saved two ranks", "fp8 odd sizes"))
def test_fp8_uses_the_chip(compiled, case, arch):
    """The sums fill the registers: what a task needs around its loop may be spilled, but nothing in the loop."""
    (kernel,) = compiled[f"{case} {arch}"]
    assert kernel["shared"] <= 232448 and kernel["stack"] <= (128 if arch == 90 else 512), kernel
    assert kernel["tensor_core"] > 0 and kernel["copy_engine"] > 0, kernel
    assert kernel["wide_loads"] > 0 and kernel["wide_stores"] > 0 and kernel["narrow_stores"] == 0, kernel
    assert kernel["unfinished"] == 0 and kernel["announced"] > 0 and kernel["clocks"] == 0, kernel
    if arch == 90:
        assert kernel["e4m3"] == kernel["tensor_core"] == 16, "a step is two products of four instructions, and there are half tiles"
        assert kernel["local_in_loop"] == 0, "spilled registers are read or written for every step"


@pytest.mark.parametrize(("case", "arch"), of_archs("mxfp8", "mxfp8 saved two ranks", "mxfp8 odd sizes"))
def test_mxfp8_uses_the_chip(compiled, case, arch):
    """Blackwell's tensor cores take E4M3 and codes as they lie in shared memory; Hopper's take what was widened to bf16, in every step."""
    (kernel,) = compiled[f"{case} {arch}"]
    assert kernel["shared"] <= 232448 and kernel["stack"] <= 256, kernel
    assert kernel["local_in_loop"] == (None if arch == 103 else 0), "spilled registers are read or written for every step"
    assert kernel["tensor_core"] > 0 and kernel["copy_engine"] > 0, kernel
    assert kernel["wide_loads"] > 0 and kernel["wide_stores"] > 0 and kernel["narrow_stores"] <= 1, "one is that of the codes of h"
    assert kernel["unfinished"] == 0 and kernel["announced"] > 0 and kernel["clocks"] == 0, kernel
    if arch == 90:
        assert kernel["tensor_core"] == 8, "a step is eight instructions of 16 columns"
    else:
        assert kernel["scaled"] == kernel["tensor_core"] and kernel["unscaled"] == 0, "a product without scales"
        assert kernel["code_copies"] > 0, "codes go through registers"


@pytest.mark.parametrize("case", HOPPER_STACK)
def test_hopper_ring_of_loads(compiled, case):
    """A step is 3 loads and 4 products; six places begin steps (two first ones, three stretches of a task, the next task's loads) for whole
    and for half tiles, and none waits for its own product. Only a task's last product is waited for in full. Up tasks that gather have
    all of that for themselves."""
    (kernel,) = compiled[case]
    gathered = "gathered" in case
    kinds = 2 * (1 + gathered)
    assert kernel["shared"] <= 232448 and kernel["registers"] <= 255 and kernel["stack"] <= HOPPER_STACK[case], kernel
    assert kernel["tensor_core"] == kinds * 6 * 4 and kernel["full_waits"] == kinds and kernel["serialized"] == 0, kernel
    assert kernel["local_in_loop"] == 0 and kernel["single_conversions"] == 0, kernel
    copies = 2 * (8 + 1 + 1) * 4  # by 16 bytes of a thread, four a step: in eight places of up tasks, for the next task in these and others
    assert kernel["thread_copies"] == copies * gathered and (kernel["wide_loads"] == 0) == (gathered and "ranks" not in case), kernel
    assert kernel["not_shown"] == 0, kernel
    assert kernel["wide_stores"] > 0 and kernel["narrow_stores"] == 0, kernel
    assert kernel["unfinished"] == 0 and kernel["announced"] > 0 and kernel["clocks"] == 0, kernel


def test_the_search_for_copies_that_products_do_not_see():
    from compile_kernels import copies_not_shown_to_products as search

    wait, barrier, fence, product = "cp.async.wait_group 1;", "bar.sync 0;", "fence.proxy.async.shared::cta;", "wgmma.mma_async.sync x;"
    listing = lambda *texts: "\n".join(("cp.async.bulk.wait_group 0;", "mov x;", *texts))  # noqa: E731
    assert search(listing(wait, "add x;", barrier, fence, product, wait, barrier, fence)) == 0
    assert search(listing(wait, barrier, product, fence)) == 1
    assert search(listing(wait, fence, barrier, product, wait)) == 2


def test_the_search_for_spills_in_the_loop():
    from compile_kernels import local_accesses_among_products as search

    store, product, load, again = "STL [R1], R0", "QGMMA.64x128x32 R24, gdesc[UR4], R24", "LDL R0, [R1]", "@!P2 BRA 0x0010"
    listing = lambda *texts: "\n".join(f"  /*{16 * i:04x}*/   {text} ;   /* 0x1 */" for i, text in enumerate(texts))  # noqa: E731
    assert search(listing(store, "NOP", product, again, load)) == 0
    assert search(listing(store, load, product, again, load)) == 1
    inner, outer = "@!P2 BRA 0x0030", "BRA 0x0000"
    assert search(listing(store, product, load, product, inner, load, outer)) == 0


def test_the_search_for_unfinished_stores():
    """It follows branches: a store in one branch does not reach a release that only the other one reaches."""
    from compile_kernels import unfinished_stores

    store, wait, release = "cp.async.bulk.tensor.2d.global.shared::cta", "cp.async.bulk.wait_group 0;", "atom.global.gpu.release.add.u32"
    apart = f"@%p1 bra $A;\n{store}\n{wait}\nbra.uni $B;\n$A:\n{release}\n$B:\nret;"
    assert unfinished_stores(apart) == 0
    assert unfinished_stores(apart.replace(wait, "cp.async.bulk.wait_group.read 0;")) == 0
    assert unfinished_stores(f"{store}\ncp.async.bulk.wait_group.read 0;\n{release}\nret;") == 1
    assert unfinished_stores(f"$A:\n{release}\n{store}\n@%p1 bra $A;\nret;") == 1


def test_the_search_for_the_descriptors_of_stores():
    """Through moves and selections; an address that comes from memory may be anything."""
    from compile_kernels import stores_of_copy_engine, unfinished_stores

    params = "".join(f".param .align 64 .b8 k_param_{i}[128],\n" for i in (3, 8, 9))
    moves = "".join(f"mov.b64 \t%rd{i}, k_param_{i};\n" for i in (3, 8, 9)) + "@%p1 mov.b64 %rd20, %rd3;\nld.global.b64 %rd30, [%rd9];\n"
    store = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd{}, {{%r1, %r2}}], [%r3];\n"
    ptx = f"{params}{moves}selp.b64 %rd21, %rd20, %rd8, %p2;\n{store.format(21)}{store.format(30)}atom.global.gpu.acq_rel.add.u32"
    assert stores_of_copy_engine(ptx, ("a", "b", "c")) == [{"a", "b"}, set()]
    assert [unfinished_stores(ptx, unread) for unread in ((), {0}, {1}, {0, 1})] == [1, 1, 1, 0]


def test_the_search_for_products_that_are_waited_for_at_once():
    from compile_kernels import waited_at_once

    product = "ttng.tc_gen5_mma %a, %b, %c, %true, %true, %x[%true] {is_async} :"
    other = "ttng.tc_gen5_mma_scaled %a, %b, %c, %d, %e, %true, %true, %y#1[%true] {is_async} :"
    assert waited_at_once(f"{product}\nttng.wait_barrier %loads, %p\nttng.wait_barrier %x, %p") == 0
    assert waited_at_once(f"{product}\n{other}\nttng.wait_barrier %x, %p") == 1
    assert waited_at_once(f"{other}\nttng.wait_barrier %y#1, %p\nttng.tc_gen5_mma %a, %b, %c, %true, %true :") == 2


@pytest.mark.parametrize(("case", "arch"), FORWARDS)
def test_forward_uses_the_chip(compiled, case, arch):
    (kernel,) = compiled[f"{case} {arch}"]
    assert kernel["tensor_core"] > 0, "no wgmma or tcgen05"
    assert kernel["copy_engine"] > 0, "no bulk tensor loads"
    assert kernel["serialized"] == 0, "products wait for each other"
    assert kernel["single_conversions"] == 0, "bf16 values are rounded one by one"
    assert kernel["wide_loads"] > 0 and kernel["wide_stores"] > 0 and kernel["narrow_stores"] == 0
    assert kernel["unfinished"] == 0, "a store of the copy engine is announced before it is in memory"
    assert kernel["announced"] > 0


@pytest.mark.parametrize(("case", "arch"), [("combine", arch) for arch in ARCHS])
def test_combine_reads_sixteen_bytes_at_a_time(compiled, case, arch):
    (kernel,) = compiled[f"{case} {arch}"]
    assert kernel["wide_loads"] == 1 + 8 and kernel["wide_stores"] == 1  # shared, K = 8


@pytest.mark.parametrize(("case", "arch"), [("choice", arch) for arch in ARCHS])
def test_the_router_rounds_every_operation_and_keeps_rows_within_a_warp(compiled, case, arch):
    """Of a thread's 32 elements four are read or written at a time, ids and weights one by one; of the gradient's 16 four."""
    forward, backward = compiled[f"{case} {arch}"]
    assert forward["inexact"] == backward["inexact"] == 0, (forward, backward)
    assert forward["wide_loads"] == 2 * 8 and forward["wide_stores"] == 8 and forward["warp_reductions"] >= 2, forward
    assert backward["wide_loads"] == 3 * 4 and backward["wide_stores"] == 4 and backward["shared"] == 0, backward
