"""What each graph costs for a request: weights, activations, buffers, operations and traffic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from engines.adapters import ADAPTED, low_rank_name
from engines.plan import arrays
from engines.plan.adapters import side_arrays
from engines.plan.arrays import FLOAT, Widths
from engines.plan.conditions import Conditions
from engines.plan.plan import GraphPlan, Rows, Workload
from engines.plan.references import References
from engines.plan.run import LIBRARY_WORKSPACE, Run, Weighing, operations
from engines.profile import Arithmetic, Profile, component_of
from engines.quality import graph_name, weights_of
from engines.sessions.modulation import MODULATION
from export.checkpoint.components.audio_vae import AudioVAEConfig
from export.checkpoint.components.video_vae import VideoVAEConfig
from plugins.block_attention import VIDEO_SPARSE, BlockAttention, quantises
from plugins.dimensions import AUDIO_CHANNELS, TIMESTEP_SLOTS, DenoiserDimensions
from plugins.shape import Shape, canvas, grid_frames, requested_frames
from plugins.tiling import chunk_count, tile_grid, tiles_ahead, used_tile
from plugins.video_tiles import TileCounts

INT64 = 8


def rows_of(profile: Profile, shape: Shape, references: References) -> Rows:
    """The request's rows, and those of one rank and of one chunk."""
    text = references.workload.text_rows + references.text_rows
    audio, video = shape.audio_rows + references.audio_rows, shape.video_rows + references.video_rows
    total = text + audio + video
    local = profile.local_rows(total)
    chunk = min(profile.row_chunk or local, local)
    return Rows(text=text, audio=audio, video=video, total=total, local=local, chunk=chunk)


@dataclass(frozen=True)
class Costs:
    """The graphs of one request on one profile."""

    weighing: Weighing
    workload: Workload

    @cached_property
    def shape(self) -> Shape:
        """The clip's sizes."""
        dimensions = self.weighing.outline.dimensions
        frames = grid_frames(requested_frames(self.workload.seconds), dimensions.video_vae)
        return Shape.of(*canvas(self.workload.aspect_ratio), frames, dimensions)

    @cached_property
    def rows(self) -> Rows:
        """The request's rows."""
        return rows_of(self.weighing.profile, self.shape, self.references)

    @cached_property
    def references(self) -> References:
        """The request's references."""
        return References(self.workload, self.weighing.outline.dimensions)

    @cached_property
    def tiles(self) -> int:
        """Calls of the video decoder."""
        vae = self.weighing.outline.dimensions.video_vae
        return chunk_count(self.shape.latent_frames, vae) * tile_grid(self.shape.height, self.shape.width, vae).count

    @cached_property
    def tile_bytes(self) -> int:
        """Bytes of one decoded tile."""
        vae = self.weighing.outline.dimensions.video_vae
        return 3 * vae.chunk_frames * vae.tile**2 * FLOAT

    @cached_property
    def table_bytes(self) -> int:
        """AdaLN parameters of one step."""
        return int(Widths.of(self._denoiser).item * self._size.table_elements)

    @cached_property
    def folded_bytes(self) -> int:
        """Weights of a pinned schedule's tables, which the build reads and no request."""
        return sum(sum(self.weighing.instances(graph)) for graph in MODULATION) if self._pinned else 0

    def plans(self) -> tuple[GraphPlan, ...]:
        """Every graph, in the order in which a request meets them; then those of further tiers, and of adapters.

        A request runs the graphs of one tier: here, of the first. It runs none of a pinned schedule's tables.
        """
        folded = MODULATION if self._pinned else ()
        used = (self._idle(name) if name in folded else self._plan(name, run) for name, run in self._runs())
        own = (*used, *self._variants())
        return (*own, *self._with_sides(own))

    @property
    def _pinned(self) -> bool:
        return self.weighing.outline.student is not None

    @cached_property
    def video_tiles(self) -> TileCounts | None:
        """Those that a student attends to; None for a model that attends to everything."""
        student = self.weighing.outline.student
        if student is None or student.video_sparse is None:
            return None
        shape, patch = self.shape, self._size.patch
        sizes = zip((shape.latent_frames, shape.latent_height, shape.latent_width), patch, strict=True)
        frames, rows, columns = (size // side for size, side in sizes)
        # Students make clips from text alone.
        runs = self.rows.text, self.rows.audio
        return TileCounts.of(runs, (frames, rows, columns), student.video_sparse.sparsity)

    @property
    def _size(self) -> DenoiserDimensions:
        return self.weighing.outline.dimensions.denoiser

    @property
    def _denoiser(self) -> Arithmetic:
        return self.weighing.profile.precision.denoiser

    @property
    def _compute(self) -> Arithmetic:
        """What the denoiser computes in outside its quantised linears."""
        return "float32" if self._denoiser == "float32" else "bfloat16"

    def _plan(self, name: str, run: Run) -> GraphPlan:
        instances = self.weighing.instances(name)
        passes = run.runs / len(instances)
        return GraphPlan(
            graph=name,
            component=component_of(name),
            instances=len(instances),
            runs=run.runs,
            weights=sum(instances),
            instance=max(instances),
            activations=math.ceil(run.activations),
            workspace=run.workspace,
            io=math.ceil(run.io),
            attention=math.ceil(run.attention),
            collectives=math.ceil(run.collectives),
            flops=run.flops,
            traffic=passes * sum(instances) + run.runs * run.arrays,
            exchanged=run.exchanged,
        )

    def _runs(self) -> Iterator[tuple[str, Run]]:
        yield from Conditions(self.weighing, self.references).runs()
        yield "text_encoder.embedding", self._embedding()
        yield "text_encoder.layer", self._text_layer()
        yield "context", self._context()
        yield "modulation.time", self._time()
        yield "modulation.adaln", self._adaln()
        yield "prologue", self._prologue()
        yield from self._blocks()
        yield "epilogue", self._epilogue()
        yield "video_decoder_tile", self._tile()
        yield "audio_decoder", self._audio()

    def _embedding(self) -> Run:
        text = self.weighing.outline.dimensions.text_encoder
        row, ranks = text.hidden * Widths.of(self.weighing.arithmetic("text_encoder")).item, self._text_ranks
        io = self.rows.text * (INT64 + row / ranks)
        # Only the rows of the prompt's tokens are read of the table.
        table = self.weighing.instances("text_encoder.embedding")[0]
        # The ranks' columns are gathered, and turned back to rows.
        gathered = 2 * self.rows.text * row if ranks > 1 else 0
        exchanged = self.rows.text * row * (ranks - 1) / ranks
        return Run(1, 0, {}, io - table, io, collectives=gathered, exchanged=exchanged)

    def _text_layer(self) -> Run:
        text, ranks, rows = self.weighing.outline.dimensions.text_encoder, self._text_ranks, self.rows.text
        arithmetic = self.weighing.arithmetic("text_encoder")
        widths = Widths.of(arithmetic)
        row = arrays.text_layer(text, arithmetic, ranks)
        hidden = text.hidden * widths.item
        linear = 2.0 * self.weighing.weights["text_encoder.layer"].products() * rows / ranks
        mixing = text.mixing(rows) / ranks
        flops = operations(arithmetic, text.layers * linear, text.layers * mixing)
        io = rows * (2 * hidden + 2 * text.head_dim * FLOAT)
        reduced = 2 * text.layers * 2 * rows * text.hidden * FLOAT * (ranks - 1) / ranks
        # The ranks' parts of a share of the sum, the share, and the whole sum.
        collectives = (2 + 1 / ranks) * rows * text.hidden * FLOAT if ranks > 1 else 0
        return Run(
            text.layers, rows * row, flops, 2 * rows * (row + hidden), io, collectives=collectives, exchanged=reduced
        )

    @property
    def _text_ranks(self) -> int:
        return self.weighing.profile.ranks.text_encoder

    def _context(self) -> Run:
        size, rows = self._size, self.rows.text
        row, item = arrays.context(size, self._denoiser), Widths.of(self._denoiser).item
        linear = 2.0 * self.weighing.weights["context"].products() * rows
        mixing = 4.0 * size.refiner_layers * size.inner * rows * rows
        io = rows * item * (size.text_dim + size.hidden)
        moved = 2 * rows * row * size.refiner_layers
        return Run(1, rows * row, operations(self._denoiser, linear, mixing), moved, io)

    def _time(self) -> Run:
        products = self.weighing.weights["modulation.time"].products()
        forwards = self.workload.forwards
        flops: dict[Arithmetic, float] = {"float32": 2.0 * products * TIMESTEP_SLOTS * forwards}
        io = TIMESTEP_SLOTS * (self._size.time_dim + 1) * FLOAT
        return Run(forwards, 0, flops, io, io, workspace=LIBRARY_WORKSPACE)

    def _adaln(self) -> Run:
        """All steps of the schedule, one instance after the other: its weights come once a schedule."""
        size, item = self._size, Widths.of(self._denoiser).item
        instances = size.layers + 1
        parameters = sum(self.weighing.weights["modulation.adaln"].products_of_all())
        flops: dict[Arithmetic, float] = {self._compute: 2.0 * parameters * TIMESTEP_SLOTS * self.workload.forwards}
        # The builder copies the matrix, whose size it does not know, and the table of a step.
        matrix = self.weighing.weights["modulation.adaln"].largest_matrix()
        copied = matrix + TIMESTEP_SLOTS * size.adaln_features * item
        io = TIMESTEP_SLOTS * item * (size.adaln_features + size.time_dim)
        return Run(instances * self.workload.forwards, copied, flops, 2 * io, io, workspace=LIBRARY_WORKSPACE)

    def _prologue(self) -> Run:
        size, rows = self._size, self.rows
        item = Widths.of(self._denoiser).item
        gathered = (rows.text + rows.audio + rows.video) * size.hidden * item
        state = FLOAT * (rows.video * size.video_row + rows.audio * size.audio_channels)
        products = 2.0 * size.hidden * (rows.video * size.video_row + rows.audio * size.audio_channels)
        flops: dict[Arithmetic, float] = {"float32": products * self.workload.forwards}
        io = state + rows.text * size.hidden * item + rows.local * (INT64 + size.hidden * item)
        return Run(self.workload.forwards, gathered, flops, 2 * gathered + io, io, workspace=LIBRARY_WORKSPACE)

    def _blocks(self) -> Iterator[tuple[str, Run]]:
        runs, base = self._size.layers * self.workload.forwards, self.weighing.profile.attention.blocks
        if not self.weighing.profile.segmented:
            yield "block", self._whole_block(runs, base)
            return
        chunks = math.ceil(self.rows.local / self.rows.chunk)
        yield "block.project", self._project(runs * chunks)
        yield "block.attend", self._attend(runs, base)
        yield "block.finish", self._finish(runs * chunks)

    def _variants(self) -> Iterator[GraphPlan]:
        """The engines of further tiers: working memory of their own, but the weights and buffers of the first's."""
        profile = self.weighing.profile
        for kind in profile.further_attention:
            graph = "block.attend" if profile.segmented else "block"
            run = self._attend(0, kind) if profile.segmented else self._whole_block(0, kind)
            held = {
                "graph": graph_name(graph, kind, profile.attention.blocks),
                "activations": math.ceil(run.activations),
                "workspace": run.workspace,
                "attention": math.ceil(run.attention),
            }
            yield self._idle(graph).model_copy(update=held)

    def _with_sides(self, plans: Sequence[GraphPlan]) -> Iterator[GraphPlan]:
        """The engines with low-rank sides, where requests may choose adapters: working memory of their own."""
        if not self.workload.adapters or self.weighing.profile.adapters.mode == "merged":
            return
        row = side_arrays(self._size, Widths.of(self._denoiser).item)
        for plan in plans:
            if weights_of(plan.graph) in ADAPTED:
                rows = self.rows.text if plan.graph == "context" else self.rows.chunk
                held = {
                    "graph": low_rank_name(plan.graph),
                    "activations": plan.activations + math.ceil(rows * row),
                    "workspace": plan.workspace,
                    "attention": plan.attention,
                }
                yield self._idle(weights_of(plan.graph)).model_copy(update=held)

    def _idle(self, graph: str) -> GraphPlan:
        """A graph that the request does not run, and that has no weights of its own on the device."""
        return GraphPlan(
            graph=graph,
            component=component_of(graph),
            instances=len(self.weighing.instances(graph)),
            runs=0,
            weights=0,
            instance=0,
            activations=0,
            workspace=0,
            io=0,
            attention=0,
            collectives=0,
            flops={},
            traffic=0,
            exchanged=0,
        )

    def _whole_block(self, runs: int, attention: BlockAttention) -> Run:
        size, rows, widths = self._size, self.rows, Widths.of(self._denoiser)
        held = arrays.compiled_block if self.weighing.profile.backend == "inductor" else arrays.block
        row = held(size, self._denoiser) + arrays.images(size, attention)
        sparse = self._sparse_bytes(attention)
        linear = 2.0 * self.weighing.weights["block"].products() * rows.local
        io = rows.local * (2 * size.hidden * widths.item + self._per_row) + self._table
        kept = arrays.projected(size, widths) + arrays.heads(size, widths) + arrays.feed_forward(size, widths)
        return Run(
            runs,
            rows.local * row + sparse,
            operations(self._denoiser, runs * linear, runs * self._mixing(attention), _mixed(attention)),
            2 * rows.local * kept + io,
            io,
            workspace=LIBRARY_WORKSPACE,
            attention=rows.local * arrays.heads(size, widths) + sparse,
            collectives=self._exchange_buffers,
            exchanged=runs * self._exchanged,
        )

    def _project(self, runs: int) -> Run:
        size, rows, widths = self._size, self.rows, Widths.of(self._denoiser)
        linear = 2.0 * self.weighing.weights["block.project"].products() * rows.local
        heads = self._exchanged_heads - 1
        io = rows.local * (2 * size.hidden * widths.item + heads * size.inner * widths.item + self._per_row)
        io += self._table
        row = arrays.project(size, self._denoiser)
        flops = operations(self._denoiser, self._block_runs * linear, 0)
        return Run(
            runs,
            rows.chunk * row,
            flops,
            (2 * rows.chunk * row + io * rows.chunk / rows.local),
            io,
            workspace=LIBRARY_WORKSPACE,
        )

    def _attend(self, runs: int, attention: BlockAttention) -> Run:
        size, rows, widths = self._size, self.rows, Widths.of(self._denoiser)
        heads = rows.local * arrays.heads(size, widths)
        copied = rows.local * arrays.attend(size, self._denoiser)
        copied += rows.local * arrays.images(size, attention) + self._sparse_bytes(attention)
        return Run(
            runs,
            copied,
            {_mixed(attention) or self._compute: runs * self._mixing(attention)},
            2 * copied + heads,
            rows.local * size.inner * widths.item,
            attention=heads + copied,
            collectives=self._exchange_buffers,
            exchanged=runs * self._exchanged,
        )

    def _finish(self, runs: int) -> Run:
        size, rows = self._size, self.rows
        linear = 2.0 * self.weighing.weights["block.finish"].products() * rows.local
        row = arrays.finish(size, self._denoiser)
        flops = operations(self._denoiser, self._block_runs * linear, 0)
        # Hidden rows and mixed values are counted where they are made.
        return Run(runs, rows.chunk * row, flops, 2 * rows.chunk * row, 0, workspace=LIBRARY_WORKSPACE)

    @property
    def _block_runs(self) -> int:
        return self._size.layers * self.workload.forwards

    def _mixing(self, attention: BlockAttention) -> float:
        """Operations of one block's attention on one rank, which has a share of the heads and all rows."""
        if attention != VIDEO_SPARSE:
            return self._size.mixing(self.rows.total) / self._ulysses
        counts, video = self._attended, self.shape.video_rows
        pairs = counts.pairs(self.rows.total - video, video) + counts.all**2
        return 4.0 * self._size.inner * pairs / self._ulysses

    def _sparse_bytes(self, attention: BlockAttention) -> float:
        """What attention to video tiles takes on a rank beside dense attention's arrays."""
        if attention != VIDEO_SPARSE:
            return 0
        tiles = arrays.tiled(
            self._size, Widths.of(self._denoiser), self._attended.all, self._size.heads // self._ulysses
        )
        return tiles + self.rows.local * self._size.inner * Widths.of(self._denoiser).item

    @property
    def _attended(self) -> TileCounts:
        """The tiles of a student that attends to them."""
        if self.video_tiles is None:
            raise ValueError("attention 'vsa' is a student's; the model is none")
        return self.video_tiles

    @property
    def _exchanged_heads(self) -> int:
        """Arrays of all heads that a block's projections make and its attention returns: one more with a gate."""
        return 4 if self.video_tiles is None else 5

    @property
    def _ulysses(self) -> int:
        return self.weighing.profile.ranks.ulysses

    @property
    def _per_row(self) -> int:
        """A row's rotary angles, modulation index and timestep index."""
        return 2 * 3 * self._size.rope_frequencies * FLOAT + 2 * INT64

    @property
    def _table(self) -> int:
        """AdaLN parameters of two steps: one is used while the next one comes."""
        return 2 * self.table_bytes

    @property
    def _exchange_buffers(self) -> float:
        """What a block's exchanges take beside what it attends with.

        Over a link two places of all that comes, in turns (`plugins.kernels.symmetric_exchange`): it attends with one
        of queries, keys and values, or, as a plugin of a TensorRT plan, with copies of them. Else what is packed and
        sent, and mixed values as they come.
        """
        profile = self.weighing.profile
        if self._ulysses == 1:
            return 0
        places = self._exchanged_heads
        if profile.device is not None and profile.device.peer_gbps:
            copied = profile.backend == "tensorrt" and not profile.segmented
            places = 2 * self._exchanged_heads if copied else self._exchanged_heads + 1
        return places * self.rows.local * self._size.inner * Widths.of(self._denoiser).item

    @property
    def _exchanged(self) -> float:
        """Bytes that a rank sends in one block: queries, keys, values and gates there, mixed values back."""
        share = (self._ulysses - 1) / self._ulysses
        return self._exchanged_heads * self.rows.local * self._size.inner * Widths.of(self._denoiser).item * share

    def _epilogue(self) -> Run:
        size, rows, forwards = self._size, self.rows, self.workload.forwards
        channels = size.video_row + size.audio_channels
        flops: dict[Arithmetic, float] = {"float32": 2.0 * size.hidden * channels * rows.local * forwards}
        row = arrays.epilogue(size)
        velocity = rows.total * channels * FLOAT
        sharing = self._ulysses > 1
        return Run(
            forwards,
            rows.local * row,
            flops,
            2 * rows.local * row + velocity,
            # The state before and after the step, and the velocities of all rows.
            velocity + 2 * FLOAT * (rows.video * size.video_row + rows.audio * size.audio_channels),
            workspace=LIBRARY_WORKSPACE,
            collectives=rows.local * channels * FLOAT if sharing else 0,
            exchanged=forwards * rows.local * channels * FLOAT * (self._ulysses - 1),
        )

    def _tile(self) -> Run:
        vae, config = self.weighing.outline.dimensions.video_vae, self._video
        width = config.decoder_num_attention_heads * config.decoder_attention_head_dim
        tokens = vae.chunk_latents * vae.tile_latents**2 + config.decoder_num_register_tokens + 1
        arithmetic = self.weighing.arithmetic("video_decoder_tile")
        kept = arrays.tile(tokens, width, config.decoder_ffn_mult * width, int(Widths.of(arithmetic).item))
        runs = math.ceil(self.tiles / self.weighing.profile.ranks.video_tiles)
        linear = 2.0 * tokens * self.weighing.weights["video_decoder_tile"].products()
        mixing = 4.0 * config.decoder_num_layers * width * tokens**2
        moved = 2 * config.decoder_num_layers * tokens * width * (2 * FLOAT + 4)
        ranks = self.weighing.profile.ranks.video_tiles
        return Run(
            runs,
            kept,
            operations(arithmetic, runs * linear, runs * mixing),
            moved + self.tile_bytes,
            2 * self.tile_bytes,
            workspace=LIBRARY_WORKSPACE,
            collectives=FLOAT * tiles_ahead(vae, ranks),
            exchanged=FLOAT * runs * math.prod(used_tile(vae)) * (ranks - 1),
        )

    @property
    def _video(self) -> VideoVAEConfig:
        config = self.weighing.outline.configs["video_vae"]
        assert isinstance(config, VideoVAEConfig)
        return config

    def _audio(self) -> Run:
        config = self.weighing.outline.configs["audio_vae"]
        assert isinstance(config, AudioVAEConfig)
        samples, widest, products = 1, 0, 0.0
        weights = self.weighing.weights["audio_decoder"]
        for stage, rate in enumerate(config.decoder_rates):
            samples *= rate
            widest = max(widest, samples * config.decoder_dim >> (stage + 1))
            products += samples * weights.stage_products(stage, len(config.resblock_kernel_sizes))
        latents = self.shape.audio_latents
        flops: dict[Arithmetic, float] = {"float32": 2.0 * AUDIO_CHANNELS * latents * products}
        io = AUDIO_CHANNELS * latents * FLOAT * (config.latent_channels + samples)
        kept = latents * arrays.audio(widest)
        return Run(1, kept, flops, 2 * kept * len(config.decoder_rates), io, workspace=LIBRARY_WORKSPACE)


def _mixed(attention: BlockAttention) -> Arithmetic | None:
    """The arithmetic of the blocks' attention, where it is another than the rest's."""
    return "fp8" if quantises(attention) else None
