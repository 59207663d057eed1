"""Data that a user's function gives: how they are gone through, continued exactly, and refused where they cannot be."""
