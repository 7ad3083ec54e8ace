"""`mok convert`: files against `mok.quantize.convert_checkpoint` and safetensors' own reader, and what is refused."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mok import cli
from mok import convert as files
from mok import quantize as q
from mok.quantize import E4M3, FP8_SQUARE, MX_ROW


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    """An empty working folder; small tensors are faster without a second thread, which has to be waited for."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["convert", *arguments])
    return result.exit_code, result.output


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert torch.equal(got[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


def unquantized() -> dict[str, torch.Tensor]:
    """Shapes that leave every kind of element at odd places if tensors are not ordered by their width."""
    return {
        "a.mask": torch.tensor([True, False, True]), "norm.weight": torch.randn(7), "ids": torch.arange(5), "empty": torch.zeros(0, 8),
        "router": torch.randn(5, 3).bfloat16(), "scalar": torch.tensor(2.0, dtype=torch.float64), "half": torch.randn(3).half(),
    }  # fmt: skip


def checkpoint(block: q.Block, scale=lambda codes: codes) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    torch.manual_seed(1)
    tensors = unquantized()
    for name, shape in (("layers.0.gate", (2, 70, 200)), ("layers.1.gate", (2, 70, 200)), ("layers.1.down", (130, 257))):
        values, codes = q.quantize(torch.randn(shape) * torch.randn(shape).exp(), block)
        tensors |= {name: values, f"{name}_scale": scale(codes)}
    return tensors


@pytest.mark.parametrize("scale", [lambda codes: codes, q.scale_to_float, lambda codes: codes.view(torch.float8_e8m0fnu)])
@pytest.mark.parametrize("was, to", [("fp8", "mxfp8"), ("mxfp8", "fp8"), ("fp8", "fp8")])
def test_has_the_bits_of_convert_checkpoint(was, to, scale):
    tensors = checkpoint(q.WEIGHT_BLOCKS[was], scale)
    save_file(tensors, "in.safetensors", metadata={"format": "pt", "note": "ünïcode"})
    code, output = call("in.safetensors", "out.safetensors", "--to", to)
    assert code == 0, output
    want, reports = q.convert_checkpoint(tensors, to)
    same(load_file("out.safetensors"), want)
    with safe_open("out.safetensors", framework="pt") as made:
        assert made.metadata() == {"format": "pt", "note": "ünïcode"}
    lossless = sum(not report.changed for report in reports)
    assert (lossless == 3) == (to == "mxfp8" or was == to)
    assert f"3 weights in {to}, {lossless} of them without any loss; 7 other tensors copied" in output
    made, _ = files.convert_file(cli.Path("in.safetensors"), cli.Path("again.safetensors"), to)
    assert sorted((one.report.name, one.report) for one in made) == sorted((r.name, r) for r in reports)
    assert {one.was for one in made} == {was}


def test_the_table_says_where_it_was_not_lossless():
    tensors = checkpoint(MX_ROW)
    save_file(tensors, "in.safetensors")
    _, output = call("in.safetensors", "out.safetensors", "--to=fp8")
    reports = {report.name: report for report in q.convert_checkpoint(tensors, "fp8")[1]}
    gates = [reports[f"layers.{i}.gate"] for i in range(2)]
    (row,) = [line for line in output.splitlines() if line.startswith("layers.*.gate")]
    worst = max(gates, key=lambda report: report.largest_error)
    for part in ("mxfp8", "fp8", 2 * 2 * 70 * 200, sum(g.changed for g in gates), "100 % (became 0)", worst.name):
        assert str(part) in row
    assert worst.largest_error == 1
    assert str(reports["layers.1.down"].changed) in next(line for line in output.splitlines() if line.startswith("layers.1.down"))


@pytest.mark.parametrize("block", [MX_ROW, FP8_SQUARE])
def test_to_bf16_and_what_it_does_not_hold(block):
    tensors = checkpoint(block)
    tensors["layers.1.down_scale"].zero_()  # some of its numbers have bits below 2^-133
    save_file(tensors, "in.safetensors")
    code, output = call("in.safetensors", "out.safetensors", "--to=bf16")
    assert code == 0, output
    want = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale")}
    lost = 0
    for name, tensor in list(want.items()):
        if tensor.dtype == E4M3:
            exact = q.dequantize(tensor, tensors[f"{name}_scale"], block, torch.float64)
            want[name] = exact.bfloat16()
            lost += int((want[name].double() != exact).sum())
    same(load_file("out.safetensors"), want)
    assert lost and "3 weights in bf16, 2 of them without any loss" in output
    assert re.search(rf"^layers\.1\.down .* {lost} ", output, re.MULTILINE)


@pytest.mark.parametrize("to", ["mxfp8", "fp8"])
def test_quantizes_what_is_named(to):
    tensors = unquantized() | {"blocks.0.gate_EIH": torch.randn(2, 96, 64).bfloat16(), "blocks.0.down_EHI": torch.randn(64, 96)}
    save_file(tensors, "in.safetensors")
    code, output = call("in.safetensors", "out.safetensors", f"--to={to}", "--quantize=*_EIH", "--quantize", "*down*", "--suffix=.s")
    assert code == 0, output
    want = dict(tensors)
    for name in ("blocks.0.gate_EIH", "blocks.0.down_EHI"):
        want[name], want[f"{name}.s"] = q.quantize(tensors[name], q.WEIGHT_BLOCKS[to])
    same(load_file("out.safetensors"), want)
    assert "BF16" in output and "F32" in output and "2 weights" in output
    with safe_open("out.safetensors", framework="pt") as made:
        for name in made.keys():  # noqa: SIM118
            assert made.get_tensor(name).data_ptr() % made.get_tensor(name).element_size() == 0


def test_one_matrix_at_a_time(monkeypatch):
    """Of a weight with experts no more than one is there at once."""
    save_file(checkpoint(FP8_SQUARE), "in.safetensors")
    seen = []
    monkeypatch.setattr(files, "convert_weight", lambda values, *rest: seen.append(values.shape) or q.convert(values, *rest))
    assert call("in.safetensors", "out.safetensors", "--to=mxfp8")[0] == 0
    assert sorted(seen) == [(70, 200)] * 4 + [(130, 257)]


REFUSED = {
    "in.safetensors out.safetensors --to=int4": "--to=int4: must be one of bf16, mxfp8, fp8",
    "in.safetensors out.safetensors --to=bf16 --quantize=*": "--quantize: there is nothing to quantize with --to=bf16",
    "missing out.safetensors --to=fp8": "missing: no such file: must be a safetensors file",
    ". out.safetensors --to=fp8": ".: is a folder: must be a safetensors file",
    "in.safetensors . --to=fp8": ".: is a folder: must be a file",
    "in.safetensors there --to=fp8": "there: exists already; --force replaces it",
    "in.safetensors in.safetensors --to=fp8 --force": "in.safetensors: is the file that is read",
    "in.safetensors no/out --to=fp8": "no/out: there is no folder no",
    "there out --to=fp8": "there: is no safetensors file that can be read",
    "in.safetensors out --to=fp8 --suffix=.s": "layers.0.gate: its scale layers.0.gate.s is missing; is --suffix=.s right?",
    "in.safetensors out --to=fp8 --quantize=experts*": "--quantize=experts*: no tensor has such a name",
    "in.safetensors out --to=fp8 --quantize=norm*": "norm.weight: has shape (7,): must have at least two dimensions to be quantized",
    "in.safetensors out --to=fp8 --quantize=ids": "ids: has dtype I64: must be one of BF16, F16, F32, F64 to be quantized",
    "plain.safetensors out --to=fp8": "plain.safetensors: has no tensor of E4M3; --quantize=PATTERN names those to quantize",
    "plain.safetensors out --to=fp8 --quantize=router": "router: there is a tensor router_scale already",
    "odd.safetensors out --to=fp8": "w: scale has shape (1, 4): must be (4, 2) or (1, 1) for values (4, 64)",
    "flat.safetensors out --to=fp8": "w: scale has shape (1,): must be of a weight with two dimensions or more for values (64,)",
    "integer.safetensors out --to=fp8": "w_scale: has dtype I32: must be one of U8, F8_E8M0, F32",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_refuses(arguments, tmp_path):
    save_file(checkpoint(MX_ROW), "in.safetensors")
    save_file(unquantized() | {"router_scale": torch.zeros(1)}, "plain.safetensors")
    save_file({"w": torch.zeros(4, 64).to(E4M3), "w_scale": torch.zeros(1, 4, dtype=torch.uint8)}, "odd.safetensors")
    save_file({"w": torch.zeros(64).to(E4M3), "w_scale": torch.zeros(1, dtype=torch.uint8)}, "flat.safetensors")
    save_file({"w": torch.zeros(4, 64).to(E4M3), "w_scale": torch.zeros(4, 2, dtype=torch.int32)}, "integer.safetensors")
    (tmp_path / "there").write_text("mine")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    code, output = call(*arguments.split())
    assert code == 1 and output.startswith(f"error: {REFUSED[arguments]}"), output
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_replaces_only_when_told_and_only_with_a_whole_file(tmp_path, monkeypatch):
    save_file(checkpoint(MX_ROW), "in.safetensors")
    (tmp_path / "out").write_text("mine")

    def stop(*arguments):  # type: ignore[no-untyped-def]
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(files, "bytes_of", stop)
        code, output = call("in.safetensors", "out", "--to=fp8", "--force")
    assert (code, output.strip()) == (1, "error: no space left")
    assert (tmp_path / "out").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2
    assert call("in.safetensors", "out", "--to=fp8", "--force")[0] == 0
    assert set(load_file("out")) == set(checkpoint(MX_ROW))


def test_a_header_of_its_own():
    """Two entries of one byte each: 8 bytes of length, the text filled up to a multiple of 8."""
    text = files.header_of([files.Entry("a", "U8", (1,), 1), files.Entry("b", "U8", (1,), 1)], None)
    assert int.from_bytes(text[:8], "little") == len(text) - 8 and len(text) % 8 == 0
    assert json.loads(text[8:])["b"] == {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}
