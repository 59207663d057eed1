"""Decisions about a pipeline that runs: what has changed, and which program, cut or number of microbatches to take."""
