"""`mok doctor`, `mok trace`, `mok bench` and `mok tune` on a GPU, on one small shape; between two GPUs where there are two."""

from __future__ import annotations

import json

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from mok import doctor, trace, tune
from mok.bench import comm, layers, suites, warm
from mok.bench.layer import OneDevice
from mok.bench.shapes import ONE_GPU, Shape
from mok.kernels.launch import is_hopper

DEVICE = torch.device("cuda")
SHAPE = Shape(2048, 512, 256, 8, 4)
NAME = "x".join(map(str, SHAPE))
GPUS = torch.cuda.device_count()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_doctor_finds_what_these_tests_need():
    facts = doctor.collect()
    findings = doctor.judge(facts)
    print(*findings, sep="\n")
    assert len(facts.gpus) == GPUS and facts.triton
    assert not [finding for finding in findings if finding.state == "fails" and finding.name != "torch"]
    if GPUS > 1:
        assert facts.symmetric == "" and [copy[:2] for copy in facts.copies] == doctor.copied(GPUS)
        assert all(rate > 1 for *_, rate in facts.copies)
    assert {finding.name for finding in findings} >= {"BF16", "blockwise FP8", "MXFP8", "NVLink", "multicast"}


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (Shape(8192, 2048, 1024, 16, 4), {}),
        (Shape(8192, 2048, 1024, 16, 4), dict(programs_per_sm=1, num_sms=20, minibatch_tiles=4)),
        (Shape(8192, 2048, 1024, 16, 4), dict(ring_tiles=16, minibatch_tiles=4)),
        (Shape(8192, 2048, 1024, 16, 4), dict(ring_tiles=16, minibatch_tiles=4, gather=0)),
        (ONE_GPU["kimi-k2-slice"], {}),
    ],
)
def test_a_trace_adds_up_to_the_kernels_time_and_moves_no_bit(shape, changes):
    experts, batch = layers.make_experts(shape, DEVICE), layers.make_batch(shape, 0, 0, DEVICE)
    layer = layers.GpuLayer(shape.T, shape.E, shape.K, experts, None, 1.0)
    out, kept = layer.forward(batch, True, changes)
    gradients = layer.backward(batch, kept, changes)
    traced, kept = layer.forward(batch, True, {**changes, "trace": True})
    assert torch.equal(traced, out)
    for got, want in zip(layer.backward(batch, kept, {**changes, "trace": True}), gradients, strict=True):
        assert torch.equal(got, want)
    lines = trace.take(layer, batch, ("forward", "backward"), changes)
    assert [line.direction for line in lines] == ["forward", "backward"]
    for line in lines:
        about = trace.summary(line)
        print(json.dumps(about))
        programs = changes.get("num_sms") or torch.cuda.get_device_properties(DEVICE).multi_processor_count
        assert about["programs"] == programs and len(set(line.sm.tolist())) == programs
        assert sum(about["shares"].values()) == pytest.approx(about["accounted"], abs=2e-3)
        assert about["kernel_us"] is not None and 0.98 < about["accounted"] < 1.02, about
        assert min(about["shares"].values()) > -0.002
        clock = line.span_ns / 1e3
        assert 20 < clock < 20_000
        begin, ready, computed, done = line.moments()
        assert (begin <= ready).all() and (ready <= computed).all() and (computed <= done).all()
        flows = list(trace.links(line))
        assert len(flows) > 100
        if line.direction == "forward":
            signals, places = {"h_ready"}, {"a free place of h"}
        else:
            signals, places = {"d_gate_ready", "group_ready"}, set()
        if line.direction == "backward" or changes.get("gather") == 0 or not is_hopper(DEVICE):
            signals, places = signals | {"x_ready"}, places | {"a free place"}
        else:
            assert "pull" not in line.kind and not {"dispatch", "waiting for x_ready"} & set(about["shares"])
        found = {flow.signal for flow in flows}
        assert found >= (signals | places if "ring_tiles" in changes else signals)  # a ring of fewer tiles than there are
        # The wall clock ticks coarsely, and a backward's task pushes d_weights after its signal.
        late = [flow for flow in flows if flow.given > flow.taken + (3_000 if line.direction == "forward" else 30_000)]
        assert not late, f"{len(late)} of {len(flows)} tasks were ready long before what they wait for was done"
    json.dumps(trace.chrome(lines))


def test_compiling_for_two_ranks_here_leaves_an_ordinary_layer():
    warm.compile_for(SHAPE, DEVICE, 2)
    OneDevice(SHAPE, DEVICE).check_forward({})


def run(tmp_path, *arguments: str) -> dict:
    out = tmp_path / "rows.json"
    assert suites.main([*arguments, "--json", "--out", str(out)]) == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8"])
def test_the_suite_layer(tmp_path, precision):
    made = run(tmp_path, "layer", "--shapes", NAME, "--repeats", "4", "--precision", precision)
    assert {row["precision"] for row in made["rows"]} == {precision}
    assert ("mok in bf16" in made["rows"][0].get("products_tflops", {})) == (precision != "bf16")
    assert ("mok in bf16" in made["rows"][1].get("others_tflops", {})) == (precision != "bf16")
    assert [row["direction"] for row in made["rows"]] == ["fwd", "bwd", "memory"]
    memory = made["rows"][2]
    assert 0 < memory["gib"] <= memory["limit_gib"] < 2 and memory["baselines"]["torch gather"]["gib"] > 0
    assert all(row["ms"] > 0 for row in made["rows"][:2])


def test_the_suite_comm_of_one_rank(tmp_path):
    sizes = ("--rows", "2048", "--hidden", "1024")
    rows = run(tmp_path, "comm", "--ranks", "1", "--variants", "layer w8 32x512|st w8 16x1024", *sizes)["rows"]
    rates = {row["variant"]: row["gbs"] for row in rows if "gbs" in row}
    assert set(rates) == {"copy", "layer w8 32x512", "st w8 16x1024"} and all(row["share"] == 0 for row in rows if "gbs" in row)
    us = {row["variant"]: row["us"] for row in rows if row.get("us")}
    assert 0 < us[comm.WITHIN] < 100 and 0 < us["barrier, in a kernel"] < 100


@pytest.mark.skipif(GPUS < 2, reason="between two GPUs")
def test_the_suite_comm(tmp_path):
    sizes = ("--rows", "2048", "--hidden", "1024", "--programs", "8,16")
    rows = run(tmp_path, "comm", "--ranks", "2", "--parts", "skew,latency", *sizes)["rows"]
    for routing in ("one rank", "hot expert"):
        moved = [row for row in rows if row.get("routing") == routing]
        assert len(moved) == 4 and all(min(row["gbs"].values()) > 1 for row in moved), moved
    us = {row["variant"]: row["us"] for row in rows if row.get("us")}
    assert 0 < us[comm.PUSHED] < 1000 and 0 < us[comm.POLLED] < 1000


@pytest.mark.skipif(GPUS < 2, reason="between two GPUs")
def test_a_trace_of_two_ranks_has_arrows_between_them(tmp_path):
    out = tmp_path / "trace.json"
    assert trace.main(["--ranks", "2", "--shapes", "8192x2048x1024x16x4", "--out", str(out), "--json"]) == 0
    ends: dict[int, list[dict]] = {}
    for event in json.loads(out.read_text())["traceEvents"]:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], []).append(event)
    across = [pair for pair in ends.values() if pair[0]["pid"] != pair[1]["pid"]]
    assert [pair[0]["name"] for pair in across].count("published") == 4, "each way, forward and backward"
    assert all(start["ts"] <= end["ts"] for start, end in across if start["name"] == "pushed")


def test_the_suite_minibatch(tmp_path):
    rows = run(tmp_path, "minibatch", "--shapes", NAME, "--repeats", "2")["rows"]
    for mark in ("two_waves", "heuristic", "knee"):
        assert sum(row[mark] for row in rows) == 1, mark
    (waves,) = (row["waves"] for row in rows if row["two_waves"])
    per_tile = tune.tasks_of_tile(SHAPE.H, SHAPE.I) / torch.cuda.get_device_properties(DEVICE).multi_processor_count
    assert 2 <= waves < 2 + per_tile + 0.01 and len({row["knee_steps"] for row in rows}) == 1


def test_the_suite_schedule_counts_the_hosts_rows():
    for point in ((2048, 4, 8, 1), (512, 8, 64, 64), (300, 6, 5, 3)):
        assert suites.on_gpu(*point, DEVICE)[1] > 0
        ids = [suites._ids(*point[:3], rank, DEVICE).cpu() for rank in range(min(point[3], 4))]
        routes = [suites.sort_routes(ids[rank % len(ids)], point[2]) for rank in range(point[3])]
        counts = torch.stack([of.counts for of in routes])
        want = suites.build_schedule(counts, [of.order for of in routes], suites.local_experts(point[2], point[3], 0))
        assert suites.on_gpu(*point, DEVICE)[1] == int(want.num_tokens)


def test_overlap_is_the_layer_and_what_is_left_out_is_not_done():
    from mok.bench.overlap import VARIANTS, OnGpu
    from mok.kernels.launch import ForwardPlan

    for shape in (SHAPE, Shape(8192, 512, 256, 32, 4)):  # the second one's rows are more than the ring
        problem = OneDevice(shape, DEVICE)
        batch = problem.inputs[0]
        want = problem.layer.forward(batch)[0].clone()
        plan = ForwardPlan(ring_tiles=64)
        variants = OnGpu(problem.layer, batch, plan)
        memory = problem.layer.workspace.memory
        for name, left_out in VARIANTS.items():
            for _ in range(2):
                memory.own["combine"].fill_(float("nan"))
                out = variants.run(name)
                problem.layer.finish()
            assert (out is None) == ("combine" in left_out)
            assert bool(memory.own["combine"].isnan().all()) == ("combine" in left_out), name
            if name == "full":
                assert out is not None and torch.equal(out, want)
            if name == "moving":
                assert not memory.own["combine"].any()


def test_the_suite_overlap(tmp_path):
    name = "8192x2048x1024x8x4"  # not so small that the host's launches are the time
    rows = run(tmp_path, "overlap", "--shapes", name, "--repeats", "4", "--ranks", str(min(GPUS, 2)))["rows"]
    assert len(rows) == 1 and rows[0]["ep"] == min(GPUS, 2) and rows[0]["without"]["moving"] < rows[0]["ms"]


@pytest.mark.parametrize(("precision", "direction"), [("bf16", "forward"), ("fp8", "backward"), ("mxfp8", "backward")])
def test_tune(tmp_path, precision, direction):
    assert tune.main(["--shapes", NAME, "--repeats", "5", "--directions", direction, "--precision", precision, "--json"]) == 0
    (entry,) = (one for one in json.loads(tune.cache_file().read_text())["entries"] if one["key"]["precision"] == precision)
    assert entry["key"]["gpu"] == torch.cuda.get_device_name() and set(entry["ms"]) == {direction}
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    assert tune.tuned(tune.Key(**entry["key"]), sms).source == "tuned"
    problem = OneDevice(SHAPE, DEVICE, precision=precision)
    plain = problem.layer.forward(problem.inputs[0])[0]
    assert torch.equal(problem.layer.forward(problem.inputs[0], changes=entry["forward"])[0], plain)
