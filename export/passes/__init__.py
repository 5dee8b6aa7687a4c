"""Graph-to-graph rewrites, each one function from an ONNX model to an ONNX model."""
