"""How lines of a mesh attach to a pipeline: what of its model they divide, check and keep alike."""
