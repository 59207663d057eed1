"""How to start a layout: the order of ranks, the command, and config files for the frameworks that can run it."""
