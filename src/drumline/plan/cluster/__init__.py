"""What a transformer layout on a cluster costs: seconds and bytes of its devices; models and machines by name."""
