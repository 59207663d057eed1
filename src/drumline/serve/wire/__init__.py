"""What travels between clients, front and stages: the protocol, tensors as bytes, the manifest, addresses and TLS."""
