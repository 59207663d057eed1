"""The two values everything is built on, `Program` and `Timeline`: their parts, rules, costs, texts. No torch here."""
