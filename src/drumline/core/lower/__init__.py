"""Programs with their messages: lowered for a channel, and as the text that PyTorch reads."""
