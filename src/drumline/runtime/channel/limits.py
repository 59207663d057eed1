"""How long the real transports wait for what, in seconds: the only copy of each default."""

# Connecting, and whatever else has no deadline of its own.
TIMEOUT = 60.0

# A peer's connection ended without a word: so long an abort may still explain it before the peer itself is blamed.
GRACE = 0.5

# Closing: so long the last packets may take to leave.
LINGER = 1.0

# A wait looks again and again for so long before it sleeps: waking up costs tens of microseconds.
SPIN = 50e-6
