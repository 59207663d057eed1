"""Programs without a flush: what a rank does per call of a step, weight versions, and updates inside of a step."""
