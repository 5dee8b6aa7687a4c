"""Latency and throughput of a running server, as two unmodified load generators see it: `h3trt perf`.

perf_analyzer calls the ensemble over gRPC; aiperf calls the HTTP gateway. A point that did not settle is marked in the
table and in the plot, and is never left out.
"""
