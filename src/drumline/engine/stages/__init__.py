"""The stages of this process: built from blocks, fed with microbatches, and run by a program."""
