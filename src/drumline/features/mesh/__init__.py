"""The axes of a mesh beside the pipeline: who shares what with whom, and what they exchange."""
