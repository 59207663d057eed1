"""Any model as a chain of blocks: the graph of its forward, written out as pieces and cut into stages."""
