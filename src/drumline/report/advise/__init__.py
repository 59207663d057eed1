"""What to change, and what that is predicted to gain."""
