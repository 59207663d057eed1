"""How a layout is started: the order of ranks, the command, and the files of frameworks that can run it."""
