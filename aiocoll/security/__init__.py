"""Authentication of the peers of a job: its key, the handshake, and connections that have not proven the key."""
