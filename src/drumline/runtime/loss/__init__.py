"""What a loss is made of, and how much each part of it counts in a microbatch."""
