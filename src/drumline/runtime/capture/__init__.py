"""Steps as graphs that a device launches again; the one room that names torch.cuda."""
