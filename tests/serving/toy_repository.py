"""Writes a repository of toy models with the real one's public names, configuration and adapter."""

from __future__ import annotations

from pathlib import Path

from triton_repo import pbtxt
from triton_repo.config import EnsembleStep, InstanceGroup, ModelConfig, QueuePolicy
from triton_repo.names import ENSEMBLE, PREPARE, STREAM
from triton_repo.repository import DEVICE, EVENT, INDEX, MP4, PARAMS, PROMPT, RESOLVED, RepositorySettings

QUEUE = QueuePolicy(2, 60_000_000)


def toy_configs(store: Path, state: Path | None = None) -> list[tuple[ModelConfig, str | None]]:
    """Each model with the file of its source; the ensemble, which comes first, has none."""
    parameters = RepositorySettings(state=state).parameters(store)
    same = {"PROMPT": "PROMPT", "PARAMS": "PARAMS"}
    steps = (
        EnsembleStep(PREPARE, same, {"RESOLVED": "PREPARED"}),
        EnsembleStep("first", {"PROMPT": "PROMPT", "PARAMS": "PREPARED"}, {"RESOLVED": "MIDDLE"}),
        EnsembleStep("second", {"PROMPT": "PROMPT", "PARAMS": "MIDDLE"}, {"RESOLVED": "RESOLVED", "MP4": "MP4"}),
    )
    inputs = (PROMPT, PARAMS)
    return [
        (ModelConfig(ENSEMBLE, inputs, (MP4, RESOLVED), steps=steps), None),
        (ModelConfig(PREPARE, inputs, (RESOLVED,), InstanceGroup(), parameters=parameters), "prepare.py"),
        (ModelConfig("first", inputs, (RESOLVED, MP4), DEVICE, QUEUE, parameters=parameters), "work.py"),
        (ModelConfig("second", inputs, (RESOLVED, MP4), DEVICE, parameters=parameters), "work.py"),
        (ModelConfig(STREAM, inputs, (EVENT, RESOLVED, INDEX, MP4), DEVICE, QUEUE, True, parameters), "stream.py"),
    ]


def write_toy_repository(directory: Path, store: Path, state: Path) -> None:
    """Write the repository."""
    store.mkdir(exist_ok=True)
    for config, source in toy_configs(store, state):
        version = directory / config.name / "1"
        version.mkdir(parents=True)
        (directory / config.name / "config.pbtxt").write_text(pbtxt.render(config))
        if source is not None:
            (version / "model.py").write_text((Path(__file__).parent / "toys" / source).read_text())
