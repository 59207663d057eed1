"""Results made readable: tables, summaries and comparisons; pictures, pages and advice have rooms of their own."""
