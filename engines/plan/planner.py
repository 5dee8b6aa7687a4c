"""From a profile, a model's outline and a request to a plan, or to a refusal that says what would fit."""

from __future__ import annotations

from dataclasses import replace

from engines.plan.adapters import adapter_bytes
from engines.plan.graphs import Costs
from engines.plan.plan import GraphPlan, Plan, PlanError, Workload
from engines.plan.refusal import refuse
from engines.plan.rules import check
from engines.plan.run import Weighing
from engines.plan.stages import Placement
from engines.plan.weights import Model
from engines.profile import PARTITIONS, Profile
from export.checkpoint.outline import Outline
from export.checkpoint.sizes import student_dimensions
from export.checkpoint.student import Fused, Whole
from export.checkpoint.tree import COMPONENTS
from export.miniature.sizes import PICTURES, RELEASED_IDS, released
from plugins.distilled import Distilled

ENGINE_BYTES = 64 << 20
"""All plans of one compute capability with bound weights: 53 MB, half of it the audio decoder."""

HOST_PROCESS = 3 << 30
"""Host memory of a rank's process: torch, TensorRT and CUDA, and on the first one the media being encoded."""


def released_outline(student: Distilled | None = None) -> Outline:
    """The release, or a student of its size, without a checkpoint at hand."""
    sizes = released(RELEASED_IDS)
    configs = (sizes.denoiser, sizes.text_encoder, sizes.video_vae, sizes.audio_vae)
    outline = Outline.of(dict(zip(COMPONENTS, configs, strict=True)), PICTURES, partitions=PARTITIONS)
    if student is None:
        return outline
    dimensions = student_dimensions(outline.dimensions, student)
    pinned = replace(outline, dimensions=dimensions, student=student)
    if student.family == "fasth3_v2":
        return replace(pinned, transformer=Whole(kind="whole", path="transformer"))
    # All of the transformer but the norms of queries and keys, which are less than a megabyte.
    size = sum(one.nbytes for one in pinned.parameters["denoiser"].values())
    return replace(pinned, transformer=Fused(kind="fused", file="transformer.safetensors", bytes=size))


def make_plan(profile: Profile, outline: Outline, workload: Workload) -> Plan:
    """The plan of a request on a profile.

    Raises:
        PlanError: the profile contradicts the model, or the request does not fit; says what would.
    """
    model, workload = Model(outline), workload.of(outline.student)
    check(profile.serving(outline.student), model, workload)
    plan = draft(profile, model, workload)
    if plan.limit and plan.peak > plan.limit:
        raise PlanError(refuse(plan, profile, model, draft))
    return plan


def draft(profile: Profile, model: Model, workload: Workload) -> Plan:
    """The plan of a request, whether it fits or not."""
    student = model.outline.student
    profile, workload = profile.serving(student), workload.of(student)
    costs = Costs(Weighing(profile, model), workload)
    graphs = costs.plans()
    placement = Placement(costs, graphs)
    pinned = sum(holding.pinned for holding in placement.holdings.values())
    unified = profile.device is not None and profile.device.unified
    tables = costs.table_bytes * workload.forwards
    stored = tables if student else 0
    stages = placement.stages()
    # A CPU works in the host's own memory, where weights are mapped from their files.
    working = 0 if profile.on_gpu else max(stage.peak for stage in stages)
    return Plan(
        profile=profile.name,
        student=student.name if student else None,
        workload=workload,
        frames=costs.shape.frames,
        width=costs.shape.width,
        height=costs.shape.height,
        rows=costs.rows,
        tiles=costs.tiles,
        partitions=profile.partitions,
        tiers=profile.tiers,
        graphs=graphs,
        stages=stages,
        limit=profile.device.memory_bytes if profile.device else 0,
        tables=tables,
        adapter=adapter_bytes(costs.weighing),
        folded=costs.folded_bytes,
        # What shares the host's memory is read from the disk, not kept in memory twice.
        pinned=0 if unified else pinned,
        host=working + (0 if unified else pinned) + tables - stored + HOST_PROCESS * max(1, profile.gpus),
        checkpoint=_checkpoint_bytes(profile, model.outline),
        sidecar=_sidecar_bytes(graphs, costs.weighing),
        engines=ENGINE_BYTES + stored + (sum(graph.weights for graph in graphs) if profile.weights == "baked" else 0),
    )


def _checkpoint_bytes(profile: Profile, outline: Outline) -> int:
    """One transformer for each partition, the other components once; the base's too, of which a student is made."""
    others = sum(outline.stored_bytes(component) for component in COMPONENTS if component != "denoiser")
    if isinstance(outline.transformer, Whole):
        others += replace(outline, student=None, transformer=None).stored_bytes("denoiser")
    return len(profile.partitions) * outline.stored_bytes("denoiser") + others


def _sidecar_bytes(graphs: tuple[GraphPlan, ...], weighing: Weighing) -> int:
    """The encoder's quantised linears once, the transformer's for each partition."""
    holding = (graph.graph for graph in graphs if graph.weights)
    sizes = weighing.model.sidecar({graph: weighing.arithmetic(graph) for graph in holding})
    encoder = sum(size for graph, size in sizes.items() if graph.startswith("text_encoder"))
    return encoder + len(weighing.profile.partitions) * (sum(sizes.values()) - encoder)
