"""What a layout of a transformer on a cluster takes, in seconds and bytes of its devices."""
