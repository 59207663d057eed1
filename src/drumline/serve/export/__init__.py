"""From a PyTorch model to a folder that `drumline serve` serves. Only this room of `serve` needs PyTorch."""
