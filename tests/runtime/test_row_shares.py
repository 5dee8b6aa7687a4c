"""The rows of one rank: together they are the sequence, in its order, and nobody has two of the same."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.packing import STREAMS, Condition, Layout, layout
from runtime.row_shares import RowShare

CONDITIONS = (
    Condition("audio", "reference", audio_latents=2),
    Condition("image", "reference", latent_frames=1, latent_height=2, latent_width=4),
    Condition("video", "reference", latent_frames=2, latent_height=4, latent_width=2, audio_latents=3),
)

layouts = st.builds(
    lambda text, conditions, frames, audio: layout(
        torch.ones(text, dtype=torch.int64), conditions, frames, 4, 4, audio
    ),
    st.integers(1, 20),
    st.lists(st.sampled_from(CONDITIONS), max_size=4),
    st.integers(1, 3),
    st.integers(1, 5),
)


@settings(max_examples=60, deadline=None)
@given(layouts, st.integers(1, 9), st.sampled_from([1, 4, 64]))
def test_the_shares_of_all_ranks_are_the_sequence(packed: Layout, ranks: int, multiple: int) -> None:
    local = -(-packed.rows // (ranks * multiple)) * multiple
    sizes = {"text": packed.text_indices, "audio": packed.audio_indices, "video": packed.video_indices}
    streams = {name: torch.randn(len(sizes[name]), 3) for name in STREAMS}
    expected = torch.cat([streams[name] for name in STREAMS])[packed.row_order]
    found, tags = [], []
    for rank in range(ranks):
        share = RowShare.of(packed, local, rank)
        here = torch.cat([share.of_stream(name, streams[name]) for name in STREAMS])
        embedded = here[share.row_order]
        assert len(embedded) == local
        real = min(max(packed.rows - rank * local, 0), local)
        assert torch.equal(share.of_packed(expected)[:real], embedded[:real])
        assert not share.of_packed(packed.modulation_index)[real:].any(), "padding is indexed by 0"
        assert not share.row_order[real:].any()
        found.append(embedded[:real])
        tags.append(share.of_packed(packed.token_tags)[:real])
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(torch.cat(tags), packed.token_tags)


def test_one_rank_has_the_streams_as_they_are() -> None:
    packed = layout(torch.ones(5, dtype=torch.int64), CONDITIONS, 2, 4, 4, 3)
    share = RowShare.of(packed, packed.rows, 0)
    assert torch.equal(share.row_order, packed.row_order)
    rows = torch.randn(len(packed.video_indices), 2)
    assert share.of_stream("video", rows).data_ptr() == rows.data_ptr(), "no copy"
    assert share.of_packed(packed.token_tags).data_ptr() == packed.token_tags.data_ptr()
