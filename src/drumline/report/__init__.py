"""Readable results: summaries and comparisons; pictures, pages and advice have folders of their own."""
