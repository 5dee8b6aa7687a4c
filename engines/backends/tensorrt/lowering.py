"""An emitted model as TensorRT's parser is to see it: functions inlined under names that nothing else has."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx.inliner

DOMAIN = "h3"
"""Domain of our own operators (`plugins.op.DOMAIN`, whose module needs torch)."""

NATIVE = ("Attention", "DistCollective")
"""Operators of our domain that the parser takes by their names, as layers of its own."""

PLUGINS = ("sage_attention", "skip_softmax_attention", "video_sparse_attention")
"""Operators of our domain that are plugins where there can be any; by their functions they would hold all scores."""

PLUGIN_VERSION = "1"
"""Version that they are registered with (`plugins.tensorrt_plugin.VERSION`)."""


def lower(model: onnx.ModelProto, plugins: Iterable[str] = ()) -> onnx.ModelProto:
    """Inlines the model's functions, except those of native operators and of `plugins`; every node gets a name.

    The parser inlines functions too, but calls the nodes of a second call as it called those of the first, and then
    cannot tell them apart. An inlined node is named by its first output. Functions that stay are dropped: the parser
    would take one where it knows no native layer, and nothing would say so. A plugin's node says which one it is.
    """
    kept = [(DOMAIN, name) for name in (*NATIVE, *plugins)]
    lowered = onnx.inliner.inline_selected_functions(model, kept, exclude=True)
    del lowered.functions[:]
    for node in lowered.graph.node:
        node.name = node.name or f"node_{next(filter(None, node.output))}"
        if node.domain == DOMAIN and node.op_type not in NATIVE:
            attributes = {"plugin_namespace": DOMAIN, "plugin_version": PLUGIN_VERSION}
            node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())
    return lowered
