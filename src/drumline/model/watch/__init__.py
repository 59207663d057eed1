"""What a model depends on besides its inputs, checked before every step; and what a run of it changes, put back."""
