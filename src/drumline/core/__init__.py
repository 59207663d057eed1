"""The two values everything is built on, `Program` and `Timeline`, and what makes one from the other. No torch here."""
