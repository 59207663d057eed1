"""What a model depends on beside its inputs, looked at before every step."""
