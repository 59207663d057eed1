"""Turn what a user has (a module, a file, a configuration, a batch) into a chain of blocks and its inputs."""
