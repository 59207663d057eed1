"""What a user holds: the pipeline, how it is set up, cut and connected, and the step."""
