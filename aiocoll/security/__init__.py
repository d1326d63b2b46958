"""Authentication of a job's ranks: the job key, the handshake, and connections that have not proven the key."""
