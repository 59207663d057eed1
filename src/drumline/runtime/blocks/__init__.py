"""Turn any model into a chain of blocks: trace its forward, write it out as pieces, and cut it into stages."""
