"""The simulator's arithmetic in C: its sources, how they are compiled, and how the library is loaded."""
