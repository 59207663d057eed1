"""Devices of ranks: which one each computes on, who shares one, and how to say so."""
