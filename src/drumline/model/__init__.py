"""What a model is: its values, blocks and tensors, and what it draws; knows neither ranks nor steps."""
