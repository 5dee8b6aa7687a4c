"""`h3trt inspect` of a plan: layers, tensors and totals from a file of layers or from the one beside a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from engines.layers import Layer, LayerTensor
from h3trt.plan_view import PlanView

ROOT = Path(__file__).parents[2]
HASH = "0123456789abcdef"


def tensor(name: str, dtype: str, *shape: int) -> LayerTensor:
    return LayerTensor(name=name, dtype=dtype, shape=shape)


LAYERS = (
    Layer(
        name="node_linear_myl0_1",
        kind="gemm",
        inputs=(tensor("x", "FP8", -1, 8), tensor("w", "FP8", 8, 100)),
        outputs=(tensor("wide", "Float", -1, 100),),
    ),
    Layer(name="__myl_Mul_myl0_2", kind="kgen", inputs=(), outputs=(tensor("y", "BFloat16", -1, 100),)),
    Layer(name="__myl_Cast_myl0_3", kind="kgen", inputs=(), outputs=(tensor("z", "BFloat16", 10),)),
)


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    file = tmp_path / f"block.{HASH}.layers.json"
    file.write_text(json.dumps([layer.model_dump(mode="json") for layer in LAYERS]))
    return file


def inspect(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from h3trt.cli import main; main()", "inspect", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"COLUMNS": "200"})


def test_totals_say_where_the_memory_goes(layers: Path) -> None:
    view = PlanView.open(layers, rows=1000)
    assert view.totals() == [("gemm.FP8", "1", "400,000", "66.7%"), ("kgen", "2", "200,020", "33.3%")]
    assert view.rows_of_layers()[0] == ("node_linear_myl0_1", "gemm.FP8", "FP8", "400,000")
    assert view.biggest_tensors()[0] == ("wide", "Float", "[*, 100]", "400,000")


def test_the_command_shows_them(layers: Path) -> None:
    shown = inspect(layers, "--rows", "1000")
    assert shown.returncode == 0, shown.stderr
    for word in ("node_linear_myl0_1", "gemm.FP8", "400,000", "66.7%"):
        assert word in shown.stdout


def test_a_plan_is_shown_by_the_file_of_layers_beside_it(layers: Path, tmp_path: Path) -> None:
    """The two are named by different hashes; other graphs' and instances' files are not taken for it."""
    plan = tmp_path / "block.fedcba9876543210.plan"
    plan.write_bytes(b"")
    (tmp_path / f"block.{HASH}.0.layers.json").write_text("[]")
    (tmp_path / f"block.attend.{HASH}.layers.json").write_text("[]")
    assert PlanView.open(plan, None).layers == LAYERS
    layers.unlink()
    alone = inspect(plan)
    assert alone.returncode == 2
    assert "one file of its layers (.layers.json) expected beside it, 0 found" in alone.stderr


def test_a_file_that_holds_no_layers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"Layers": ["a name"]}')
    refused = inspect(tmp_path / "x.json")
    assert refused.returncode == 4
    assert "x.json: layers of a build or of an IEngineInspector" in refused.stderr
    assert "DETAILED" in refused.stderr


def test_options_of_plans_are_refused_for_other_files(tmp_path: Path) -> None:
    refused = inspect(tmp_path, "--rows", "5")
    assert refused.returncode == 2
    assert "is not a plan or a file of layers" in refused.stderr


def test_a_drawing_has_a_bar_for_each_kind_and_is_the_same_each_time(layers: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    view = PlanView.open(layers, rows=1000)
    for name in ("a.svg", "b.svg"):
        view.draw(tmp_path / name, "block")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    drawn = (tmp_path / "a.svg").read_text()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    for word in ("gemm.FP8", "kgen", "block"):
        assert f"<!-- {word} -->" in drawn  # matplotlib draws text as outlines, and says which


def test_without_matplotlib_a_drawing_is_refused_with_the_command(
    layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Exception, match="needs matplotlib; run: pip install matplotlib"):
        PlanView.open(layers, None).draw(tmp_path / "x.svg", "block")
