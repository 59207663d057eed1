"""From what a user has (a module, a file, a configuration, a batch) to a chain of blocks and its inputs."""
