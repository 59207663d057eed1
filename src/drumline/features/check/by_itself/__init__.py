"""The unsplit model as this process can run it, whole or block by block with other ranks, and what it gives."""
