"""What happened or would happen, measured or simulated: spans, messages, idle seconds and their causes."""
