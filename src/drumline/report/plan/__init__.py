"""Plans and profiles to look at: text, page and charts."""
