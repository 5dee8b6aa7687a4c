"""The summary says what is in the files."""

import json
from pathlib import Path

from export.checkpoint import Checkpoint
from export.checkpoint.summary import summarise
from export.checkpoint.tree import COMPONENTS


def test_summary_agrees_with_the_files(native_root: Path) -> None:
    checkpoint = Checkpoint.open(native_root)
    summary = summarise(checkpoint)
    assert (summary.layout, summary.partitions, summary.fingerprint) == (
        "native",
        ("fl2va", "ref2va"),
        checkpoint.fingerprint,
    )
    assert summary.nbytes == sum(file.stat().st_size for file in native_root.rglob("*.safetensors"))
    assert [(part.component, part.partition) for part in summary.components] == [
        (component, partition) for partition in ("fl2va", "ref2va") for component in COMPONENTS
    ]
    first = summary.components[0]
    assert (first.directory, first.files, first.qkv_layout) == ("FL2VA/transformer", 2, "interleaved")
    assert set(first.dtypes) == {"BF16", "F32"}
    assert sum(first.dtypes.values()) == first.nbytes


def test_shared_files_are_counted_once(diffusers_root: Path) -> None:
    summary = summarise(Checkpoint.open(diffusers_root))
    assert summary.nbytes == sum(file.stat().st_size for file in diffusers_root.rglob("*.safetensors"))
    assert summary.components[0].qkv_layout == "split"


def test_summary_is_plain_data(native_root: Path) -> None:
    values = summarise(Checkpoint.open(native_root)).as_dict()
    assert json.loads(json.dumps(values))["components"][1]["component"] == "text_encoder"
