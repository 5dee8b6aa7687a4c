"""An emitted model as TensorRT's parser is to see it: functions inlined under names that nothing else has."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx.inliner

from plugins.exchanges import GROUP, OPERATORS

DOMAIN = "h3"
"""Domain of our own operators (`plugins.op.DOMAIN`, whose module needs torch)."""

NATIVE = ("Attention", "DistCollective")
"""Operators of our domain that the parser takes by their names, as layers of its own."""

PLUGINS = ("sage_attention", "skip_softmax_attention", "video_sparse_attention", *OPERATORS)
"""Operators of our domain that are plugins where there can be any. By their functions attentions would hold all scores,
and exchanges would go through TensorRT's own collective."""

PLUGIN_VERSION = "1"
"""Version that they are registered with (`plugins.tensorrt_plugin.VERSION`)."""


def lower(model: onnx.ModelProto, plugins: Iterable[str] = ()) -> onnx.ModelProto:
    """Inlines the model's functions, except those of native operators and of `plugins`; every node gets a name.

    The parser inlines functions too, but calls the nodes of a second call as it called those of the first, and then
    cannot tell them apart. An inlined node is named by its first output. Functions that stay are dropped: the parser
    would take one where it knows no native layer, and nothing would say so. A plugin's node says which one it is. The
    handle of the ranks' group is no input of a plan, which is given their communicator.
    """
    kept = [(DOMAIN, name) for name in (*NATIVE, *plugins)]
    lowered = onnx.inliner.inline_selected_functions(model, kept, exclude=True)
    del lowered.functions[:]
    _drop(lowered.graph, GROUP)
    for node in lowered.graph.node:
        node.name = node.name or f"node_{next(filter(None, node.output))}"
        if node.domain == DOMAIN and node.op_type not in NATIVE:
            attributes = {"plugin_namespace": DOMAIN, "plugin_version": PLUGIN_VERSION}
            node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())
    return lowered


def _drop(graph: onnx.GraphProto, name: str) -> None:
    """Takes an input away, from the graph and from the nodes that read it."""
    for value in [value for value in graph.input if value.name == name]:
        graph.input.remove(value)
    for node in graph.node:
        if name in node.input:
            node.input.remove(name)
