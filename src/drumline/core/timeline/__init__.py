"""What happened or would happen, whoever says so: spans, messages, idle seconds and their causes."""
