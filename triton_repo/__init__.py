"""The Triton model repository: its renderer, the model adapters, the server process and the gRPC client."""
