"""benchmarks/curves.py: runs of `mok train` beside each other, and what is said of them."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mok import train as job
from mok.bench import report

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "curves.py"
SPEC = importlib.util.spec_from_file_location("curves", SCRIPT)
assert SPEC and SPEC.loader
curves = importlib.util.module_from_spec(SPEC)
sys.modules["curves"] = curves
SPEC.loader.exec_module(curves)

SMALL = dict(hidden=32, layers=2, batch=4, sequence=16, experts=4, top_k=2)
TINY = [f"{job.flag(name)}={value}" for name, value in SMALL.items()]
NO_SEED = str(2**63)  # mok train refuses it


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch, restored):
    monkeypatch.chdir(tmp_path)


@pytest.mark.thorough
def test_runs_are_collected_kept_and_compared(text, capsys):
    """A failed run first; then the others, but for the one that is there. What a row holds is what `mok train` itself does."""
    of_train = ["--", *TINY, "--text", text]
    both = ["--steps", "3", "--jobs", "2", "--out", "a.json"]
    assert curves.main(["--precisions", "bf16", "--seeds", f"0,{NO_SEED}", *both, *of_train]) == 1
    said = capsys.readouterr().out
    assert f"bf16, seed {NO_SEED}: failed, exit code 1" in said and f"error: --seed={NO_SEED}: must be from 0" in said
    first = json.loads(Path("a.json").read_text())
    assert [row["seed"] for row in first["rows"]] == [0] and f"error: --seed={NO_SEED}" in first["missing"][f"bf16, seed {NO_SEED}"]

    assert curves.main(["--precisions", "bf16,fp8", "--seeds", "0,1", *both, "--plot", "a.png", *of_train]) == 0
    said = capsys.readouterr().out
    assert "bf16, seed 0: kept from a.json" in said and "3 runs, 2 at a time" in said
    assert "within noise" in said, "three steps in FP8 differ less than two seeds"
    made = json.loads(Path("a.json").read_text())
    assert made["sources_sha256"] == report.sources_sha256() and "missing" not in made and Path("a.png").stat().st_size > 10_000
    rows = {(row["precision"], row["seed"]): row for row in made["rows"]}
    assert list(rows) == [("bf16", 0), ("bf16", 1), ("fp8", 0), ("fp8", 1)] and rows["bf16", 0] == first["rows"][0]
    assert len({row["digest"] for row in rows.values()}) == 4 and not Path("runs").exists()

    job.train(job.Options(precision="fp8", seed=1, steps=3, eval_every=1, text=text, **SMALL), Path("runs/alone"), resume=False)
    lines = job.read_metrics(Path("runs/alone/metrics.jsonl"))
    assert capsys.readouterr().out.endswith(f"digest {rows['fp8', 1]['digest']}\n") and rows["fp8", 1]["steps"] == [1, 2, 3]
    for name, of_line in (("train", "loss"), ("validation", "validation")):
        assert rows["fp8", 1][name] == [round(line[of_line], 5) for line in lines]


def test_a_run_that_is_late_or_stopped_leaves_nothing(text, capsys):
    of_train = ["--steps", "1000000", "--seeds", "0", "--precisions", "bf16", "--out", "a.json", "--", *TINY, "--text", text]
    assert curves.main(["--limit", "1", *of_train]) == 1
    assert "bf16, seed 0: failed, --limit=1 seconds were over" in capsys.readouterr().out and not Path("runs").exists()
    with subprocess.Popen([sys.executable, str(SCRIPT), *of_train], stdout=subprocess.PIPE) as script:
        deadline = time.monotonic() + 120
        while not (metrics := list(Path("runs").glob("*/metrics.jsonl"))) and time.monotonic() < deadline:
            time.sleep(0.1)
        script.send_signal(signal.SIGTERM)
        assert script.wait(timeout=60) == 143 and metrics and not Path("runs").exists()
    assert json.loads(Path("a.json").read_text())["rows"] == []


def test_runs_of_other_options_stay_in_a_copy(capsys):
    now, rows = report.document([]), [dict(options="--steps 5", precision="bf16", seed=0)]
    for number, found in enumerate(({**now, "rows": rows}, {**now, "torch": "1.0", "rows": rows}), 1):
        Path("a.json").write_text(json.dumps(found))
        results = curves.Results(Path("a.json"), "", ["--steps", "6"])
        results.write()
        assert json.loads(Path("a.json").read_text())["rows"] == [] and json.loads(Path(f"a.json.{number}").read_text()) == found
        assert f"a.json holds 1 runs of other options, sources or versions; they are kept in a.json.{number}" in capsys.readouterr().out
    Path("a.json").write_text(json.dumps({**now, "rows": rows}))
    assert curves.Results(Path("a.json"), "", ["--steps", "5"]).rows == rows and not Path("a.json.3").exists()


def row_of(precision: str, seed: int, last: float) -> dict[str, object]:
    return dict(precision=precision, seed=seed, steps=[500, 900, 950, 1000], validation=[3.0, 2.5, last + 0.5, last - 0.5])


def test_the_comparison():
    """The example of the module: the mean over the last tenth of the steps, in pairs of one seed, beside bf16's own spread."""
    ends = {"bf16": (2.00, 2.02, 2.04), "mxfp8": (2.05, 2.07, 2.09), "fp8": (2.01, 2.03, 2.08)}
    rows = [row_of(name, seed, last) for name, lasts in ends.items() for seed, last in enumerate(lasts)]
    bf16, mxfp8, fp8 = curves.compare(rows)
    assert bf16 == dict(
        precision="bf16", seeds=3, final=pytest.approx(2.02), spread=pytest.approx(0.04), difference=None, low=None, high=None, verdict=None
    )
    assert [fp8[key] for key in ("difference", "low", "high")] == pytest.approx([0.02, -0.023, 0.063], abs=5e-4)
    assert fp8["verdict"] == "within noise" and fp8["spread"] == pytest.approx(0.07)
    assert mxfp8["verdict"] == "beyond noise", "each seed by 0.05, more than the 0.04 between seeds of bf16"
    assert [mxfp8[key] for key in ("difference", "low", "high")] == pytest.approx([0.05] * 3)
    *_, alone = curves.compare([row for row in rows if row["precision"] == "bf16" or row["seed"] == 1])
    assert (alone["difference"], alone["verdict"]) == (pytest.approx(0.01), None), "one pair says nothing of noise"


def test_what_it_refuses(capsys):
    Path("other.json").write_text("[]")
    for given, message in (
        ("--precisions fp8", "--precisions=fp8: must contain bf16"),
        ("--precisions bf16,fp4", "--precisions=bf16,fp4: 'fp4': must be some of bf16,mxfp8,fp8, each once"),
        ("--seeds 0,0", "--seeds=0,0: '0': must be whole numbers of at least 0, each once"),
        ("--seeds -1", "--seeds"),
        ("--jobs 0", "--jobs=0: must be at least 1"),
        ("--limit nan", "--limit=nan: must be at least 1"),
        ("--out none/a.json", "none/a.json: no folder none"),
        ("--out .", "--out=.: cannot be written (Is a directory)"),
        ("--out b.json --plot .", "--plot=.: cannot be written (Is a directory)"),
        ("--out other.json", "--out=other.json: is there, and not a file of this script"),
        ("-- --seed=3", "--seed=3 after --: is decided by this script's own options"),
    ):
        with pytest.raises(SystemExit) as error:
            curves.main(["--out", "a.json", *given.split()])
        assert error.value.code == 2 and message in capsys.readouterr().err


def test_the_options_of_a_run():
    options = curves.train_options("cpu", 1000, ["--lr", "1"])
    assert " ".join(options) == (
        "--steps 1000 --device cpu --eval-every 50 --checkpoint-every 0 --ranks 1 --size small --batch 8 --sequence 128 --lr 1"
    )
    assert "--hidden" not in curves.train_options("cuda", 3, ["--size=400m"]), "a size of one's own is left as it is"
