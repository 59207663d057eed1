"""Whether a program can run: one file per kind of rule, and what each broken one says. Time does not count here."""
