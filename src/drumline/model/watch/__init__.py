"""Check before every step what a model depends on besides its inputs."""
