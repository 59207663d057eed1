"""What `drumline train` can train: the built-in GPT and MLP, Hugging Face models, and what a user's function builds."""
