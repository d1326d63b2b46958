"""Who may take part in a job: its key, the handshake, and connections that have not proven it."""
