"""Messages between ranks: the seam that the executor sees, the control mesh, and one file per transport."""
