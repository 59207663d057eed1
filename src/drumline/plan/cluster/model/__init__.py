"""A transformer as numbers: sizes, parameters, operations, and the files and names it is read from."""
