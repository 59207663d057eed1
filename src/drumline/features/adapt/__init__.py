"""Change what runs between two steps: the first search of schedule="auto", and adapting to what is measured."""
