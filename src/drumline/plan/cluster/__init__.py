"""What a layout of a transformer on a cluster takes: seconds and bytes of its devices; models, machines by name."""
