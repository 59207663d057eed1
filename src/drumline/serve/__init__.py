"""A pipeline as a service: export stages as ONNX, serve them as processes joined by gRPC, and load them to measure."""
