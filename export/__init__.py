"""Front and middle end: opens a checkpoint, declares the graphs, rewrites and emits them as ONNX."""
