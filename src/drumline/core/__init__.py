"""`Program` and `Timeline`, the two values everything else builds on, with their parts, rules and costs. No torch."""
