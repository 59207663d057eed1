"""What blocks keep beside parameters and buffers, for blocks that run twice."""
