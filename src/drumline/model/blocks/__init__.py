"""Write a traced forward as pieces, and cut any model into stages."""
