"""Plans and profiles as text, pages and charts."""
