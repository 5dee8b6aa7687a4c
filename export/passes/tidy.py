"""The light optimisation of an exported graph: no rule here can see, merge or copy a weight, as weights are inputs."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants_ir

LARGEST_CONSTANT = 65_536
"""Bytes of a constant in a graph: folding makes none above it, so a larger one is a weight that the tracer captured."""


def tidy(model: ir.Model) -> ir.Model:
    """Inlines the exporter's functions, folds shape arithmetic, drops what is unused or repeated, and strips traces.

    The exporter's pattern rewrites are left out: they take most of the time of a large graph and TensorRT builds the
    same without them.
    """
    common.InlinePass()(model)
    # The limit counts elements, of up to 8 bytes.
    fold_constants_ir(model, output_size_limit=LARGEST_CONSTANT // 8)
    passes = (
        common.IdentityEliminationPass(),
        common.CommonSubexpressionEliminationPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.ClearMetadataAndDocStringPass(),
    )
    ir.passes.Sequential(*passes)(model)
    for node in model.graph:
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in model.graph.inputs:
        value.metadata_props.clear()
    return model
