"""Plans of TensorRT and TensorRT-RTX. From outside: `request`, `process.build_plan`, `expectation.expected`,
`shapes.optimisation_profiles`.

A plan is built in a child process (`worker`), so that its memory can be measured and so that a parser or compiler that
ends its process does not end ours. Nothing that the child imports may import torch, but the
plugins of a graph that has some.
"""
