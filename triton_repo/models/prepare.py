"""h3_prepare: checks a request, makes every choice it leaves open, and tokenises its prompt. Runs no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from runtime.forecast import now
from runtime.intake import Intake
from triton_repo import adapter
from triton_repo import metric_table as table


class TritonPythonModel(adapter.UnaryModel):
    """PROMPT, PARAMS, IMAGES, VIDEOS, AUDIOS -> RESOLVED, TOKENS and TAGS [L] int64, MEDIA [references]."""

    def open(self, store: Path) -> None:
        """Read the store's manifest and tokenizer."""
        self.intake = Intake.open(store, self.settings.media)
        self.measure(self.intake.manifest)
        state = self.settings.state
        self.metrics.show(table.RESTARTS, state.restarts() if state is not None else 0)

    def run(self, request: Any, work: adapter.Work) -> list[pb_utils.Tensor]:
        """Refuses with the request contract's own text, and what cannot meet its deadline."""
        arrival = now()
        taken = self.intake.take(*adapter.read_request(request))
        work.received(taken.media)
        resolved = self.admitted(taken, arrival, self.queue())
        return [
            adapter.write_bytes("RESOLVED", resolved.model_dump_json()),
            pb_utils.Tensor("TOKENS", taken.presented.token_ids),
            pb_utils.Tensor("TAGS", taken.presented.tags),
            adapter.write_bytes("MEDIA", *taken.media),
        ]
