"""Files that are trained on: found, checked and turned into documents."""
