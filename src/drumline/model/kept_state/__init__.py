"""What blocks keep beside parameters and buffers: where it may be, how to take it and how to put it back."""
